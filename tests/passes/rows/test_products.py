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
    assert watch.looks_up_packed and "turbogr.sequence_mm.default" in watch.targets


# --- linear attention: the rows of a sequence make a matrix, and each row is multiplied with it ------------------

WIDE = torch.randn(FEATURES, 3 * 24, dtype=torch.float64)


def by_products(q, k, v):
    """(B, h, N, d) throughout."""
    return q @ (k.transpose(-1, -2) @ v)


def by_one_head(q, k, v):
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    return torch.bmm(q, torch.bmm(k.transpose(1, 2), v)).unsqueeze(1)


def by_heads_in_the_batch(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(q, torch.bmm(k.transpose(1, 2), v)).unflatten(0, (SEQUENCES, 2))


def by_letters(q, k, v):
    return torch.einsum("bhnd,bhde->bhne", q, torch.einsum("bhnd,bhne->bhde", k, v))


def by_letters_in_another_order(q, k, v):
    """Heads behind rows, the matrix transposed, three operands."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    made, total = torch.einsum("nshd,nshm->nhmd", k, v), torch.einsum("nlhd,nhd->nlh", q, k.sum(1))
    return torch.einsum("nlhd,nhmd,nlh->nlhm", q, made, 1 / (total + 1)).transpose(1, 2)


def by_one_matrix_for_all_heads(q, k, v):
    """The matrix broadcasts: each row has a line per head."""
    return q @ (k[:, :1].transpose(-1, -2) @ v[:, :1])


@pytest.mark.parametrize(
    "attend",
    [
        by_products,
        by_one_head,
        by_heads_in_the_batch,
        by_letters,
        by_letters_in_another_order,
        by_one_matrix_for_all_heads,
    ],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("capacity", [None, 4])
def test_linear_attention_is_packed(attend, capacity, table):
    def step(ids):
        valid = (ids != 0)[:, None, :, None]
        q, k, v = (F.embedding(ids, table) @ WIDE).unflatten(-1, (2, 36)).transpose(1, 2).split(12, -1)
        return (attend(q.relu(), k.relu() * valid, v).tanh() * valid).sum()

    watch = Watch()
    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=[watch], capacity=capacity)
    assert watch.looks_up_packed
    assert {"turbogr.sequence_mm.default", "turbogr.sequence_outer.default"} <= set(watch.targets)


def summed_first(q, m):
    """A letter of one operand alone is a sum, and no product contracts it."""
    return torch.einsum("bnd,bef->bnf", q, m)


def of_another_sequence(q, m):
    return torch.einsum("bnd,bde->bne", q, m.roll(1, 0))


def of_columns(q, m):
    """A matrix for each column."""
    return torch.einsum("bnd,nde->bne", q, m.repeat(2, 1, 1))


def broadcast_inside(q, m):
    """A contracted dim of size one broadcasts."""
    return torch.einsum("bnd,bde->bne", q, m[:, :1])


def test_rows_that_meet_those_of_other_sequences(table):
    """Two letters run over sequences: neither operand's sequence is the other's."""

    def step(ids):
        x = F.embedding(ids, table) * (ids != 0)[..., None]
        return torch.einsum("bnd,ane->bade", x, x.tanh()).square().sum()

    assert_same(step, table, *[(ids,) for ids in BATCHES])


@pytest.mark.parametrize(
    "product", [summed_first, of_another_sequence, of_columns, broadcast_inside], ids=lambda f: f.__name__
)
def test_products_that_look_like_those_by_sequence(product, table):
    matrices = torch.randn(SEQUENCES, 24, 24, dtype=torch.float64)

    def step(ids):
        q = F.embedding(ids, table) @ WIDE[:, :24]
        return (product(q, matrices).tanh() * (ids != 0)[..., None]).sum()

    assert_same(step, table, *[(ids,) for ids in BATCHES])
