"""Products of rows with what their sequence has one of: packed; with what other sequences have: not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .test_row_ops import BATCHES, FEATURES, SEQUENCES, Watch, assert_same

pytestmark = pytest.mark.usefixtures("fresh")

WANTED = torch.tensor([2, 7, 4])


def behind(x, one):
    return torch.matmul(x, one.unsqueeze(2)).squeeze(-1)


def in_front(x, one):
    return torch.bmm(one.unsqueeze(1), x.transpose(1, 2)).squeeze(1)


def by_heads(x, one):
    """A small matrix of its own for each sequence and head."""
    matrices = one.unflatten(-1, (2, 2)).unsqueeze(2) * torch.ones(2, 1, dtype=torch.float64)
    return (x.unflatten(-1, (2, 2)).transpose(1, 2) @ matrices.transpose(-1, -2)).sum((1, 3))


def added(x, one):
    return torch.baddbmm(x[..., :1], x, one.unsqueeze(2)).squeeze(-1)


def looked_at(score, table, watch, **options):
    def step(ids):
        one = F.embedding(WANTED, table)
        return (score(F.embedding(ids, table).tanh(), one).tanh() * (ids != 0)).sum()

    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=[watch], **options)


@pytest.mark.parametrize("score", [behind, in_front, by_heads, added], ids=lambda f: f.__name__)
@pytest.mark.parametrize("capacity", [None, 8])
def test_a_candidate_against_its_history_is_packed(score, capacity, table):
    watch = Watch()
    looked_at(score, table, watch, capacity=capacity)
    assert "turbogr.gather_rows.default" in watch.targets


def against_all(x, one):
    """Scores of every sequence's candidate: the other sequences' rows are no rows of the result."""
    return (x @ one.T).logsumexp(-1)


def of_another(x, one):
    return behind(x, one.roll(1, 0))


def over_rows(x, one):
    """Contracted over columns: each row meets all others of its sequence."""
    return (x.transpose(1, 2) @ x @ one.unsqueeze(2)).squeeze(-1).sum(1, keepdim=True) + x.sum(-1)


@pytest.mark.parametrize("score", [against_all, of_another, over_rows], ids=lambda f: f.__name__)
def test_look_alikes_are_what_eager_gives(score, table):
    looked_at(score, table, Watch())


def test_a_large_matrix_is_not_copied_for_each_row(table):
    watch, wide = Watch(), torch.randn(SEQUENCES, FEATURES, 50, dtype=torch.float64)

    def step(ids):
        return ((F.embedding(ids, table) @ wide).tanh().sum(-1) * (ids != 0)).sum()

    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=[watch])
    assert not watch.looks_up_packed
