"""Rows that a step leaves for later readers, and reads of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import turbogr_compile
from turbogr_compile.kernels.kept import RowsMissing

OPTIONS = {"worth": "always", "on_error": "raise", "verify": "validate"}
IDS = torch.tensor([[3, 4, 5, 0, 0, 0], [6, 7, 0, 0, 0, 0], [1, 2, 3, 4, 0, 0]])
TARGET = torch.tensor([[4, 5, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0], [2, 3, 4, 0, 0, 0]])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.up, self.head = nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 8), nn.Linear(8, 9)

    def forward(self, ids):
        return self.head(torch.tanh(self.up(self.items(ids))))


def time_first(z):
    return z.transpose(0, 1)


def summed_up(z):
    return z.cumsum(1)


def as_it_is(z):
    return z


def flattened(z):
    return z.flatten(0, 1)


def kept(change, road):
    torch.manual_seed(0)
    model = Model()

    def step(ids, target):
        z = change(model(ids))
        rows, where = torch.ops.turbogr.leave_rows(z)
        target = (target.T if change is time_first else target).flatten()
        return F.cross_entropy(z.flatten(0, -2), target, ignore_index=0), rows, where

    loss, rows, where = turbogr_compile.compile(step, **OPTIONS, **road)(IDS, TARGET)
    loss.backward()
    return rows, where, change(model(IDS)).detach()


ROADS = [{"target": "eager"}, {"target": "cpu", "codegen": "aten"}]


@pytest.mark.parametrize("road", ROADS, ids=str)
@pytest.mark.parametrize("change", [as_it_is, flattened, time_first, summed_up])
def test_what_is_kept_is_the_value(change, road):
    torch.compiler.reset()
    rows, where, expected = kept(change, road)
    assert not rows.requires_grad and where.shape == expected.shape[:-1]
    there = where >= 0
    torch.testing.assert_close(rows[where[there]], expected[there])


def test_rows_that_the_step_computes_are_kept_and_no_others():
    torch.compiler.reset()
    rows, where, _ = kept(as_it_is, ROADS[0])
    assert torch.equal(where >= 0, TARGET != 0) and len(rows) == 6


@pytest.mark.parametrize("road", ROADS, ids=str)
def test_who_reads_others_is_told(road):
    torch.compiler.reset()
    rows, where, expected = kept(as_it_is, road)

    def right(rows, where, target, mask):
        return ((torch.ops.turbogr.left_rows(rows, where).argmax(-1) == target) & mask).sum()

    read = turbogr_compile.compile(right, **OPTIONS, **road)
    found = read(rows, where, TARGET, TARGET != 0)
    assert found == ((expected.argmax(-1) == TARGET) & (TARGET != 0)).sum()
    with pytest.raises(RowsMissing):
        read(rows, where, TARGET, TARGET >= 0)
