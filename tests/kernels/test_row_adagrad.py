"""Row-wise Adagrad in one visit of each row: the numbers of its reference, and the copy that would be made anew."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.kernels import row_adagrad as module
from turbogr_compile.kernels.half_copy import HalfCopy
from turbogr_compile.kernels.half_rows import BLOCK

ops = torch.ops.turbogr


def updated(dtype: torch.dtype, count: int, width: int, seed: int, copy: bool) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    table = torch.randn(count, width, generator=made).to(dtype) * 2.0 ** torch.randint(
        -9, 9, (count, 1), generator=made
    )
    sums = torch.rand(count, generator=made).to(dtype)
    half = None
    if copy:
        half = HalfCopy(table)
        half.follow(table)
    for lr in (0.1, 30.0):
        rows = torch.randperm(count, generator=made)[: torch.randint(0, count + 1, (), generator=made)]
        gradient = torch.randn(len(rows), width, generator=made).to(dtype)
        version = table._version
        module.row_adagrad(table, sums, rows, gradient, lr, 1e-10, half)
        assert table._version > version
        if half is not None:
            wanted, scales = ops.half_rows(table, BLOCK)
            assert torch.equal(half.half, wanted) and torch.equal(half.scales, scales)
    return table, sums


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 2, 63, 64, 65, 300]),
    st.sampled_from([1, 7, 16, 32, 33, 64]),
    st.integers(0, 2**31),
)
def test_the_kernel_is_its_reference(dtype: torch.dtype, count: int, width: int, seed: int):
    copy = dtype == torch.float32
    found = updated(dtype, count, width, seed, copy)
    before, module.library = module.library, lambda dtype: None
    try:
        expected = updated(dtype, count, width, seed, copy)
    finally:
        module.library = before
    near = 1e-4 if dtype == torch.float32 else 1e-11  # numbers are up to some thousands, and take steps of a hundred
    torch.testing.assert_close(found, expected, rtol=near, atol=near)


def test_rows_must_be_of_the_table():
    table = torch.ones(4, 2)
    with pytest.raises(IndexError, match="rows"):
        module.row_adagrad(table, torch.zeros(4), torch.tensor([4]), torch.ones(1, 2), 0.1, 1e-10)
    with pytest.raises(ValueError, match="gradient"):
        module.row_adagrad(table, torch.zeros(4), torch.tensor([3]), torch.ones(1, 2).double(), 0.1, 1e-10)
