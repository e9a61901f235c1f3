"""HR@10 and NDCG@10 against a count by hand."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from turbogr_compile.runtime.sharding.layout import Layout
from turbogr_compile.runtime.sharding.placements import RowWise
from turbogr_compile.training.evaluate import evaluate, ranks, without_history
from turbogr_compile.training.ranks import Ranks
from turbogr_compile.training.standings import ranks_of


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


def test_what_is_no_number_is_no_hit():
    assert ranks(torch.full((1, 101), math.nan), torch.tensor([1])).item() == 101


class Held:
    """Rows of a table as one of several ranks has them; sums and vectors of others are added by hand."""

    def __init__(self, weight: torch.Tensor, count: int, rank: int) -> None:
        self.layout = Layout(*weight.shape, count, RowWise())
        self.table, self.rank = self, rank
        self.shard = self.layout.cut(weight, rank)

    def settle(self) -> None:
        pass


class Together(Ranks):
    """Ranks that run one after the other: what each has to add is known from a first round."""

    def __init__(self, others: list[torch.Tensor], mine: list[torch.Tensor]) -> None:
        super().__init__(0, 2)
        self.others, self.mine = iter(others), mine

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        self.mine.append(x.clone())
        return x + next(self.others, torch.zeros_like(x))


@given(seed=st.integers(0, 1000), items=st.integers(1, 60), users=st.integers(1, 9), whole=st.booleans())
def test_counting_in_the_table_is_a_full_ranking(seed, items, users, whole):
    """Ties included: of small whole numbers, whose products are exact; of others, of rows that are there twice.

    A matrix product of torch rounds equal rows in different ways, by where they lie: not even a full one keeps ties.
    """
    g = torch.Generator().manual_seed(seed)
    weight, vectors = torch.randn(items + 1, 8, generator=g), torch.randn(users, 8, generator=g)
    if whole:
        weight, vectors = weight.round(), vectors.round()
    weight[items // 2 + 1 :] = weight[1 : items - items // 2 + 1].clone()
    targets = torch.randint(1, items + 1, (users,), generator=g)
    full = ranks((vectors.double()[:, None] * weight[1:].double()).sum(-1), targets)
    found = ranks_of(vectors, targets, Held(weight, 1, 0), Ranks())
    assert found.tolist() == full.tolist()


def test_ranks_count_in_their_own_rows():
    g = torch.Generator().manual_seed(0)
    weight, vectors = torch.randn(52, 8, generator=g), torch.randn(7, 8, generator=g)
    targets = torch.tensor([1, 25, 26, 27, 51, 30, 2])
    own: list[torch.Tensor] = []
    for rank in (0, 1):  # what each contributes to the targets' scores
        seen: list[torch.Tensor] = []
        ranks_of(vectors, targets, Held(weight, 2, rank), Together([], seen))
        own.append(seen[0])
    counts = []
    for rank in (0, 1):
        seen = []
        ranks_of(vectors, targets, Held(weight, 2, rank), Together([own[1 - rank]], seen))
        counts.append(seen[1])
    found = ranks_of(vectors, targets, Held(weight, 2, 0), Together([own[1], counts[1]], []))
    assert found.tolist() == ranks(vectors @ weight[1:].T, targets).tolist()
