"""What probing says about ops whose treatment of rows is known."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from tests.fuzz.judge import quiet

from .judge import judged
from .probe import MIX, aligned, packs
from .samples import entries
from .sweep import rows_of

X = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
TABLE, IDS = torch.rand(6, 5, dtype=torch.float64), torch.tensor([[1, 2, 1], [3, 1, 0], [1, 1, 4]])


def asked(fn, *tensors):
    leaves, spec = pytree.tree_flatten((*tensors, {}))
    return {"fn": fn, "leaves": leaves, "spec": spec}


@pytest.mark.parametrize(
    "fn, dim, expected",
    [
        (lambda x: x.relu(), 1, [1]),
        (lambda x: x.transpose(0, 1), 1, [0]),
        (lambda x: x.softmax(-1), 1, [1]),
        (lambda x: x.softmax(1), 1, MIX),
        (lambda x: x.cumsum(1), 1, MIX),
        (lambda x: x.flip(1), 1, MIX),
        (lambda x: F.layer_norm(x, (4, 5)), 1, MIX),
        (lambda x: x[:, :, 0], 2, MIX),
        (lambda x: torch.zeros_like(x), 1, None),
    ],
)
def test_where_rows_come_out(fn, dim, expected):
    with quiet():
        assert aligned(**asked(fn, X), leaf=0, dim=dim) == [expected]


@pytest.mark.parametrize(
    "fn, expected",
    [
        (lambda x: F.layer_norm(x, (5,)), ""),
        (lambda x: x.cumsum(1), "other values on fewer rows"),
        (lambda x: x.softmax(1), "other values on fewer rows"),
        (lambda x: x.view(3, 4, 5), "cannot be called on fewer rows: RuntimeError"),
    ],
)
def test_the_op_on_some_rows_is_those_rows_of_the_op(fn, expected):
    with quiet():
        assert packs(**asked(fn, X), where={0: 1}, outs=[1]) == expected


@pytest.mark.parametrize("by_frequency, expected", [(False, ""), (True, "other gradients on fewer rows")])
def test_a_gradient_that_counts_rows_is_seen(by_frequency, expected):
    """Only the gradient of the table knows how often an id occurs among the rows."""
    with quiet():
        call = asked(lambda i, t: F.embedding(i, t, scale_grad_by_freq=by_frequency), IDS, TABLE)
        assert packs(**call, where={0: 0}, outs=[0]) == expected


def test_what_draws_cannot_be_asked():
    """Also where it seeds itself: eager's numbers are the same every time, and others than a graph's."""
    case = next(c for c in rows_of(entries()["svd_lowrank"], 1, 0))
    assert judged(case) == {"case": case.text, "status": "skip", "why": "random"}
