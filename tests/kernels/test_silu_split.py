"""silu_split against F.silu and split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from turbogr_compile import _torch

from .layouts import COMPILED, LAYOUTS, threads
from .references import references

ops = torch.ops.turbogr
BOTH = pytest.mark.parametrize(
    "forward, backward",
    [(ops.silu_split, ops.silu_split_backward), (references.silu_split, references.silu_split_backward)],
    ids=["op", "reference"],
)
SIZES = [3, 17, 0, 8]


def wanted(x, sizes):
    return [part.contiguous() for part in F.silu(x).split(sizes, -1)]


def slopes(x, sizes, grads):
    """The gradient that eager has, for gradients of the parts."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(wanted(x, sizes), x, grads)[0]


@BOTH
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 35), min_size=1, max_size=4), st.sampled_from([(), (0,), (1,), (5,), (2, 3)]))
def test_equals_silu_and_split(forward, backward, sizes, leading):
    x = 3 * torch.randn(*leading, sum(sizes)).double()
    found = forward(x, sizes)
    torch.testing.assert_close(found, wanted(x, sizes))
    assert all(part.is_contiguous() for part in found)
    grads = [torch.randn_like(part) for part in found]
    torch.testing.assert_close(backward(grads, x, sizes), slopes(x, sizes, grads))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_rounds_only_at_the_end(forward, backward, dtype):
    x = (4 * torch.randn(50, sum(SIZES))).to(dtype)
    close = dict(rtol=max(torch.finfo(dtype).eps / 2, 1e-6) * 1.01, atol=1e-6)
    for found, exact in zip(forward(x, SIZES), wanted(x.double(), SIZES), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, **close)
    grads = [torch.randn(50, size).to(dtype) for size in SIZES]
    exact = slopes(x.double(), SIZES, [g.double() for g in grads])
    torch.testing.assert_close(backward(grads, x, SIZES).double(), exact, **close)


@COMPILED
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("leading", [(6,), (2, 3)])
def test_layouts_change_nothing(layout, dtype, leading):
    x, grads = torch.randn(*leading, 28).to(dtype), [torch.randn(*leading, n).to(dtype) for n in SIZES]
    for found, plain in zip(ops.silu_split(layout(x), SIZES), ops.silu_split(x, SIZES), strict=True):
        assert torch.equal(found, plain)
    plain = ops.silu_split_backward(grads, x, SIZES)
    assert torch.equal(ops.silu_split_backward([layout(g) for g in grads], layout(x), SIZES), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_extremes_flow_as_in_eager(dtype):
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e4, -1e4, 80, -80] * 2).to(dtype)
    (found,) = ops.silu_split(x, [18])
    torch.testing.assert_close(found, F.silu(x), equal_nan=True, rtol=1e-2, atol=1e-6)
    grads = [torch.ones_like(x)]
    exact = slopes(x, [18], grads)
    torch.testing.assert_close(ops.silu_split_backward(grads, x, [18]), exact, equal_nan=True, rtol=1e-2, atol=1e-6)


@COMPILED
def test_threads_change_no_bit():
    x, sizes = torch.randn(500, 131), [64, 67]
    grads = [torch.randn(500, n) for n in sizes]
    found = []
    for count in (1, 2):
        with threads(count):
            found.append([*ops.silu_split(x, sizes), ops.silu_split_backward(grads, x, sizes)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradcheck_and_opcheck():
    x = torch.randn(4, 28).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: tuple(ops.silu_split(x, SIZES)), [x])
    torch.library.opcheck(ops.silu_split.default, (x, SIZES))
    grads = [torch.randn(4, n).double() for n in SIZES]
    torch.library.opcheck(ops.silu_split_backward.default, (grads, x.detach(), SIZES))


def test_parts_without_a_gradient():
    x = torch.randn(4, 28).double().requires_grad_()
    _, part, _, _ = ops.silu_split(x, SIZES)
    (found,) = torch.autograd.grad(part.square().sum(), x)
    (exact,) = torch.autograd.grad(F.silu(x)[:, 3:20].square().sum(), x)
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic):
    def loss(x):
        a, b, _, c = ops.silu_split(x, SIZES)
        return a.sum() + (b.square().sum() * c).sum()

    x = torch.randn(4, 28).requires_grad_()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(*(torch.autograd.grad(f(x), x) for f in (compiled, loss)))


def test_unbacked_rows_are_not_guarded_on():
    def step(x, mask):
        x = x.detach().requires_grad_()
        a, b = ops.silu_split(ops.gather_rows(x, mask.nonzero()[:, 0]), [1, 2])
        return torch.autograd.grad(a.sum() + b.square().sum(), x)[0]

    x, mask = torch.randn(7, 3), torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    traced = _torch.make_fx(step, tracing_mode="symbolic")(x, mask)
    env = _torch.shape_env_of(traced.graph)
    assert not env.deferred_runtime_asserts and not [g for g in _torch.new_guards(env, 0) if "u" in g]
    torch.testing.assert_close(traced(x, ~mask), step(x, ~mask))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ops.silu_split(x, [3, 4]),
        lambda x: ops.silu_split(x, []),
        lambda x: ops.silu_split(x, [9, -1]),
        lambda x: ops.silu_split(x.long(), [8]),
        lambda x: ops.silu_split(x[0, 0], [1]),
        lambda x: ops.silu_split_backward([x], x, [4, 4]),
        lambda x: ops.silu_split_backward([x], x.double(), [8]),
        lambda x: ops.silu_split_backward([x[:1]], x, [8]),
        lambda x: ops.silu_split_backward([x[0]], x, [8]),
    ],
)
def test_bad_shapes_and_dtypes_raise_real_and_fake(call):
    x = torch.zeros(5, 8)
    for value in (x, *_torch.fake_inputs([x])):
        with pytest.raises(ValueError, match="silu_split"):
            call(value)
