"""A copy in FP16 that follows changed rows is the copy that would be made anew, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.kernels import half_copy as module
from turbogr_compile.kernels.half_rows import BLOCK

ops = torch.ops.turbogr
ODD = torch.tensor([0.0, 1e-40, 6e4, -3e38, float("inf"), float("nan"), 2.0**15, 2.0**-85])


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 2, 63, 64, 65, 200, 1000]), st.sampled_from([1, 7, 16, 33]), st.integers(0, 2**31))
def test_following_is_copying(kernels: bool, count: int, width: int, seed: int):
    made = torch.Generator().manual_seed(seed)
    before, module.library = module.library, module.library if kernels else lambda dtype: None
    try:
        table = torch.randn(count, width, generator=made) * 10 ** torch.empty(count, 1).uniform_(-4, 4, generator=made)
        copy = module.HalfCopy(table)
        copy.follow(table)
        for _ in range(4):
            same(copy, table)
            rows = torch.randperm(count, generator=made)[: torch.randint(0, count + 1, (), generator=made)]
            factor = 2.0 ** torch.randint(-3, 4, (len(rows), 1), generator=made)
            table[rows] = table[rows] * factor
            table[rows[:2], 0] = ODD[torch.randint(0, len(ODD), (len(rows[:2]),), generator=made)]
            copy.follow(table, rows)
        same(copy, table)
    finally:
        module.library = before


def same(copy: module.HalfCopy, table: torch.Tensor) -> None:
    half, scales = ops.half_rows(table, BLOCK)
    torch.testing.assert_close(copy.half, half, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(copy.scales, scales)


def test_only_named_rows_are_read():
    table = torch.ones(640, 8)
    copy = module.HalfCopy(table)
    copy.follow(table)
    table[5], table[300] = 1.5, 7.0
    copy.follow(table, torch.tensor([5]))
    assert (copy.half[5] == 1.5 * copy.half[4]).all() and torch.equal(copy.half[300], copy.half[4])
