"""Rows in FP16 with scales: bounds that are never exceeded, copies that are refreshed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.kernels import half_rows as module

from .references import references

ops = torch.ops.turbogr
BOTH = pytest.mark.parametrize("of", [ops, references], ids=["op", "reference"])
MAGNITUDES = st.floats(-6.0, 4.778)  # powers of ten, from 1e-6 to 6e4


def random_rows(count, width, low, high, seed):
    """Numbers whose sizes are anywhere between two powers of ten, zeros among them."""
    made = torch.Generator().manual_seed(seed)
    exponents = low + (high - low) * torch.rand(count, width, generator=made, dtype=torch.float64)
    signs = torch.randint(-1, 2, (count, width), generator=made)
    return (signs * 10.0**exponents).float()


@BOTH
@settings(max_examples=100, deadline=None)
@given(
    MAGNITUDES,
    MAGNITUDES,
    st.integers(1, 9),
    st.sampled_from([1, 7, 64, 129]),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_errors_stay_within_the_bound(of, one, other, count, width, block, seed):
    table = random_rows(count, width, min(one, other), max(one, other), seed)
    half, scales = of.half_rows(table, block)
    assert half.isfinite().all() and (torch.frexp(scales).mantissa == 0.5).all()
    block = module.rows_per_scale(count, block)
    scales = scales.repeat_interleave(block)[:count, None].double()
    most = torch.stack([table[i // block * block : (i // block + 1) * block].abs().max() for i in range(count)])
    error = (half.double() * scales - table.double()).abs()
    bound = torch.maximum(table.abs().double() * 2.0**-11, most[:, None].double() * 2.0**-39)
    assert (error <= bound).all()


@settings(max_examples=100, deadline=None)
@given(MAGNITUDES, MAGNITUDES, MAGNITUDES, st.sampled_from([1, 7, 64, 129]), st.integers(0, 2**31))
def test_errors_of_scores_stay_within_the_bound(one, other, third, width, seed):
    table = random_rows(12, width, min(one, other), max(one, other), seed)
    query = random_rows(3, width, min(third, 0.0), max(third, 0.0), seed + 1)
    ids = torch.arange(12).view(3, 4)
    half, scales = ops.half_rows(table, 4)
    found = ops.lookup_dot(query, table, ids, -1.0, half, None, scales).double()
    rows = table.double().view(3, 4, width)
    products = query.double()[:, None] * rows
    most = rows.abs().amax((1, 2))
    bound = 2.0**-11 * products.abs().sum(-1)
    bound += 2.0**-39 * (most * query.double().abs().sum(-1))[:, None]
    in_single_precision = width * 2.0**-24 * 1.001 * products.abs().sum(-1)
    assert ((found - products.sum(-1)).abs() <= bound + in_single_precision).all()


@BOTH
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=5), MAGNITUDES, st.integers(0, 2**31))
def test_each_segment_has_its_scale(of, lengths, magnitude, seed):
    table = random_rows(20, 9, -6.0, max(magnitude, -5.9), seed)
    ids = torch.randint(0, 20, (sum(lengths),))
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    half, scales = of.quantize_rows(table, ids, offsets)
    assert half.shape == (sum(lengths), 9) and scales.shape == (len(lengths),)
    for number in range(len(lengths)):
        part = slice(int(offsets[number]), int(offsets[number + 1]))
        rows = table[ids[part]]
        most = rows.abs().max() if rows.numel() else 0.0
        assert most == 0 or 2.0**14 <= most / scales[number] < 2.0**15
        assert torch.equal(half[part], (rows / scales[number]).half())


@BOTH
def test_what_is_not_finite_stays_and_does_not_count(of):
    table = torch.tensor([[1.0, float("inf")], [float("nan"), -float("inf")]])
    half, scales = of.half_rows(table, 2)
    assert scales.tolist() == [2.0**-14]
    torch.testing.assert_close(half.float() * scales, table, equal_nan=True)


@BOTH
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e38, 3.4e38], ids=str)
def test_the_ends_of_the_range(of, size):
    table = torch.full((3, 2), size)
    half, scales = of.half_rows(table, 2)
    assert half.isfinite().all() and scales.isfinite().all() and (scales > 0).all()
    assert ((half.double() * scales[:1].double() - table.double()).abs() <= max(2.0**-11 * size, 2.0**-125)).all()


def test_a_copy_is_refreshed_where_rows_changed():
    table = torch.randn(100, 5)
    half, scales = ops.half_rows(table, 16)
    assert len(scales) == 7 and module.rows_per_scale(100, 16) == 15
    table[3] *= 1e6
    table[99] *= 1e-6
    stale = half.clone()
    module.refresh(half, scales, table, 16, torch.tensor([[3], [99]]))
    whole = ops.half_rows(table, 16)
    assert torch.equal(half, whole[0]) and torch.equal(scales, whole[1])
    assert torch.equal(half[15:90], stale[15:90])
    table.mul_(3.0)
    module.refresh(half, scales, table, 16)
    assert torch.equal(half, ops.half_rows(table, 16)[0])


def test_refusals():
    table = torch.zeros(5, 2)
    half, scales = ops.half_rows(table, 2)
    with pytest.raises(ValueError, match="block must be 1 or more"):
        ops.half_rows(table, 0)
    with pytest.raises(IndexError, match="row 5, entry 0 of ids, is out of range"):
        module.refresh(half, scales, table, 2, torch.tensor([5]))
    with pytest.raises(ValueError, match="number of scales must be 5, not 3"):
        module.refresh(half, scales, table, 1)
    for of in (ops, references):
        with pytest.raises(IndexError, match="out of range"):
            of.quantize_rows(table, torch.tensor([5]), torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="begin at 0 and end at 2"):
            of.quantize_rows(table, torch.tensor([0, 1]), torch.tensor([0, 1]))


def test_opcheck():
    torch.library.opcheck(ops.half_rows.default, (torch.randn(5, 3), 2))
    arguments = torch.randn(5, 3), torch.tensor([1, 0, 4]), torch.tensor([0, 1, 3])
    torch.library.opcheck(ops.quantize_rows.default, arguments)
