"""Scores gathered from products of rows with positions: rows that no attention reads are not multiplied."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from .test_row_ops import BATCHES, COLUMNS, FEATURES, SEQUENCES, Watch, assert_same

pytestmark = pytest.mark.usefixtures("fresh")

HEADS, SPAN = 2, 5
G = torch.Generator().manual_seed(1)
PLACES = torch.randn(HEADS, 2 * SPAN, FEATURES // HEADS, generator=G, dtype=torch.float64)
NEARBY = (torch.arange(COLUMNS)[:, None] - torch.arange(COLUMNS) + SPAN).clamp(0, 2 * SPAN - 1)
WIDE = NEARBY.expand(SEQUENCES, HEADS, -1, -1)


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def attends(ids, x, bias):
    scores = (heads(x) @ heads(x).transpose(-1, -2) + bias) / 2
    return scores.masked_fill((ids == 0)[:, None, None], -1e9).softmax(-1) @ heads(x)


def read(ids, y):
    return (y.transpose(1, 2).flatten(2).tanh() * (ids != 0)[..., None]).sum()


def of_queries(x):
    return (heads(x) @ PLACES.transpose(-1, -2)).gather(-1, WIDE)


def of_keys(x):
    return (heads(x) @ PLACES.transpose(-1, -2)).gather(-1, WIDE).transpose(-1, -2)


def of_both_by_repeated_matrices(x):
    """Heads in one dim with sequences, and the matrices repeated for each sequence."""
    matrices = PLACES.repeat(SEQUENCES, 1, 1)
    scores = torch.bmm(heads(x).flatten(0, 1), matrices.transpose(1, 2))
    both = scores.gather(-1, WIDE.flatten(0, 1)) + scores.gather(-1, WIDE.flatten(0, 1)).transpose(1, 2)
    return both.unflatten(0, (SEQUENCES, HEADS))


def products(watch):
    """Sizes of first operands, rows of which a product counts."""
    return [n for n in watch.targets if "einsum" in n]


@pytest.mark.parametrize("bias", [of_queries, of_keys, of_both_by_repeated_matrices], ids=lambda f: f.__name__)
def test_rows_of_gathered_pairs_are_packed(bias, table):
    watch = Watch()

    def step(ids):
        x = F.embedding(ids, table)
        return read(ids, attends(ids, x, bias(x)))

    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=[watch])
    assert watch.looks_up_packed and products(watch)


def among_rows(x):
    """Gathered along the queries: each pair is an element of another row."""
    return (heads(x) @ PLACES.transpose(-1, -2))[..., :COLUMNS].gather(-2, WIDE.clamp(max=COLUMNS - 1))


def matrices_of_sequences(x):
    """Not the same for all rows: each sequence has its own."""
    own = torch.arange(1.0, 1 + SEQUENCES, dtype=torch.float64)[:, None, None, None] * PLACES
    return (heads(x) @ own.transpose(-1, -2)).gather(-1, WIDE)


@pytest.mark.parametrize("bias", [among_rows, matrices_of_sequences], ids=lambda f: f.__name__)
def test_look_alikes_are_what_eager_gives(bias, table):
    watch = Watch()

    def step(ids):
        x = F.embedding(ids, table)
        return read(ids, attends(ids, x, bias(x)))

    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=[watch])
    assert watch.looks_up_packed is (bias is matrices_of_sequences)  # a product of its own


def test_pairs_that_are_also_read_elsewhere_need_all_rows(table):
    watch = Watch()

    def step(ids):
        x = F.embedding(ids, table)
        bias = of_queries(x)
        return read(ids, attends(ids, x, bias)) + bias.square().sum()

    assert_same(step, table, *[(ids,) for ids in BATCHES], instruments=[watch])
    assert not watch.looks_up_packed
