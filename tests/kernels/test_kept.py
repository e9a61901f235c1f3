"""Rows that are kept, and the value that is made from them again."""

from __future__ import annotations

import pytest
import torch

import turbogr_compile.kernels  # noqa: F401
from turbogr_compile.kernels.kept import RowsMissing

ops = torch.ops.turbogr


@pytest.mark.parametrize("shape", [(4, 3), (2, 5, 3), (2, 0, 3), (2, 3, 2, 4)])
def test_where_nothing_is_left_out_the_value_comes_back(shape):
    x = torch.randn(shape, requires_grad=True)
    rows, where = ops.leave_rows(x)
    assert not rows.requires_grad and where.shape == x.shape[:-1]
    assert torch.equal(ops.left_rows(rows, where), x)


def test_kept_rows_are_memory_of_their_own():
    x = torch.randn(4, 3)
    rows, _ = ops.leave_rows(x)
    before = rows.clone()
    x.zero_()
    assert torch.equal(rows, before)


def test_a_row_that_is_not_there_is_never_made_up():
    rows, where = ops.leave_rows(torch.randn(4, 3))
    where[2] = -1
    with pytest.raises(RowsMissing):
        ops.left_rows(rows, where)
    assert torch.equal(ops.left_rows(rows, where[:2]), rows[:2])


def test_what_has_no_features_is_refused():
    with pytest.raises(ValueError, match="leave_rows"):
        ops.leave_rows(torch.randn(4))


def test_registered_as_torch_wants():
    x = torch.randn(2, 5, 3)
    torch.library.opcheck(ops.leave_rows.default, (x,))
    torch.library.opcheck(ops.left_rows.default, ops.leave_rows(x))
