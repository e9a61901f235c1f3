"""HR@10 and NDCG@10 against a count by hand."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from turbogr_compile.training.evaluate import evaluate, ranks, without_history


def by_hand(scores: list[list[float]], targets: list[int]) -> tuple[float, float]:
    hits = gain = 0.0
    for row, target in zip(scores, targets, strict=True):
        order = sorted(range(1, len(row) + 1), key=lambda item: -row[item - 1])
        place = order.index(target)
        if place < 10:
            hits, gain = hits + 1, gain + 1 / math.log2(place + 2)
    return hits / len(targets), gain / len(targets)


@given(seed=st.integers(0, 1000), items=st.integers(1, 40), rows=st.integers(1, 9))
def test_as_counted_by_hand(seed, items, rows):
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, items, generator=g, dtype=torch.float64)
    targets = torch.randint(1, items + 1, (rows,), generator=g)
    ids = torch.arange(rows)[:, None]
    batches = [{"ids": i, "times": i, "target": t} for i, t in zip(ids.split(4), targets.split(4), strict=True)]
    found = evaluate(lambda ids, times: scores[ids[:, 0]], batches)
    hits, gain = by_hand(scores.tolist(), targets.tolist())
    assert math.isclose(found.hits, hits) and math.isclose(found.gain, gain, rel_tol=1e-6) and found.count == rows


def test_rows_without_target_do_not_count():
    scores = torch.arange(20.0).repeat(3, 1)
    batch = {"ids": scores.long(), "times": scores.long(), "target": torch.tensor([20, 0, 1])}
    found = evaluate(lambda ids, times: scores, [batch])
    assert (found.hits, found.gain, found.count) == (0.5, 0.5, 2)


def test_equal_scores_are_no_hits():
    """A model that says the same about all items must not look good."""
    assert ranks(torch.zeros(1, 101), torch.tensor([1])).item() == 50


def test_history_can_be_left_out():
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    found = without_history(scores, torch.tensor([[1, 3, 0]]), torch.tensor([3]))
    assert found.tolist() == [[-math.inf, 4.0, 3.0, 2.0]]
