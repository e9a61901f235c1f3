"""Products by sequence against products of each sequence, and each as the derivative of the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from turbogr_compile import _torch

from .layouts import LAYOUTS

ops = torch.ops.turbogr
OFFSETS = torch.tensor([0, 2, 2, 5])


def example(lengths=(2, 0, 3), left=1, heads=2, inner=3, width=4, dtype=torch.float64):
    rows = sum(lengths) + left
    x, matrices = torch.randn(rows, heads, inner), torch.randn(len(lengths), heads, inner, width)
    return x.to(dtype), matrices.to(dtype), torch.tensor([0, *lengths]).cumsum(0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 2), *[st.integers(0, 5)] * 3)
def test_equals_products_of_each_sequence(lengths, left, heads, inner, width):
    x, matrices, offsets = example(lengths, left, heads, inner, width)
    of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    rows = len(of)
    wanted = torch.einsum("thk,thke->the", x[:rows], matrices[of])
    found = ops.sequence_mm(x, matrices, offsets)
    torch.testing.assert_close(found[:rows], wanted)
    assert not found[rows:].any()
    each = torch.einsum("thk,the->thke", x[:rows], wanted)
    sums = torch.zeros_like(matrices).index_add(0, of, each)
    torch.testing.assert_close(ops.sequence_outer(x, found, offsets), sums)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_change_nothing(layout):
    x, matrices, offsets = example()
    found = ops.sequence_mm(x, matrices, offsets)
    torch.testing.assert_close(ops.sequence_mm(layout(x), layout(matrices), offsets), found)
    torch.testing.assert_close(
        ops.sequence_outer(layout(x), layout(found), offsets), ops.sequence_outer(x, found, offsets)
    )


def test_gradcheck_and_opcheck():
    x, matrices, offsets = example()
    x.requires_grad_()
    matrices.requires_grad_()
    y = torch.randn(6, 2, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(ops.sequence_mm, (x, matrices, offsets))
    assert torch.autograd.gradcheck(ops.sequence_outer, (x, y, offsets))
    assert torch.autograd.gradgradcheck(ops.sequence_mm, (x, matrices, offsets))
    torch.library.opcheck(ops.sequence_mm.default, (x, matrices, offsets))
    torch.library.opcheck(ops.sequence_outer.default, (x, y, offsets))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_adds_up_in_more(dtype):
    x, matrices, offsets = example((300,), 0, inner=200, dtype=dtype)
    found, exact = ops.sequence_mm(x, matrices, offsets), x.double().transpose(0, 1) @ matrices[0].double()
    assert found.dtype == dtype
    close = dict(rtol=4 * torch.finfo(dtype).eps, atol=200 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(found.double(), exact.transpose(0, 1), **close)


def test_autocast_stays_out():
    x, matrices, offsets = example(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ops.sequence_mm(x, matrices, offsets), ops.sequence_mm(x, matrices, offsets).float())


def test_flops_are_those_of_the_rows():
    x, matrices, offsets = example(left=0)
    x.requires_grad_()
    with FlopCounterMode(display=False) as counted:
        ops.sequence_mm(x, matrices, offsets).sum().backward()
    assert counted.get_total_flops() == 2 * (2 * 5 * 2 * 3 * 4)  # the product, and the gradient of the rows


def test_unbacked_rows_are_not_guarded_on():
    def step(x, matrices, mask, offsets):
        rows = ops.gather_rows(x, mask.nonzero()[:, 0])
        return ops.sequence_outer(rows, ops.sequence_mm(rows, matrices, offsets), offsets)

    x, matrices, offsets = example(left=2)
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    module = _torch.make_fx(step, tracing_mode="symbolic")(x, matrices, mask, offsets)
    env = _torch.shape_env_of(module.graph)
    assert not env.deferred_runtime_asserts and not [g for g in _torch.new_guards(env, 0) if "u" in g]
    torch.testing.assert_close(module(x, matrices, mask, offsets), step(x, matrices, mask, offsets))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, m, o: (x, m[:2], o),
        lambda x, m, o: (x, m[:, :1], o),
        lambda x, m, o: (x, m.float(), o),
        lambda x, m, o: (x[..., :2], m, o),
        lambda x, m, o: (x, m, o + 2),
    ],
)
def test_what_does_not_fit_raises(change):
    with pytest.raises(ValueError, match="sequence_mm: "):
        ops.sequence_mm(*change(*example()))
