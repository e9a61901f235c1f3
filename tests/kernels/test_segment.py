"""segment_softmax against softmax of each sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile import _torch

from .layouts import COMPILED, LAYOUTS, threads
from .references import references

ops = torch.ops.turbogr
BOTH = pytest.mark.parametrize(
    "softmax, backward",
    [
        (ops.segment_softmax, ops.segment_softmax_backward),
        (references.segment_softmax, references.segment_softmax_backward),
    ],
    ids=["op", "reference"],
)
OFFSETS = torch.tensor([0, 2, 2, 5])


def of_each(x, lengths):
    """Softmax of each sequence; some rows may be left."""
    parts = x.split([*lengths, x.shape[0] - sum(lengths)])
    return torch.cat([*(part.softmax(0) for part in parts[:-1]), parts[-1] * 0])


@BOTH
@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 21), max_size=6),
    st.sampled_from([(), (1,), (3,), (2, 3), (8,), (17,), (0,)]),
    st.integers(0, 2),
)
def test_equals_softmax_of_each_sequence(softmax, backward, lengths, rest, left):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    x = (3 * torch.randn(sum(lengths) + left, *rest)).double().requires_grad_()
    wanted = of_each(x, lengths)
    found = softmax(x.detach(), offsets)
    torch.testing.assert_close(found, wanted)
    slope = torch.randn_like(found)
    torch.testing.assert_close(backward(slope, found, offsets), torch.autograd.grad(wanted, x, slope)[0])


@COMPILED
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("rest", [(1,), (3,), (2, 9)])
def test_layouts_change_nothing(layout, rest):
    x, grad = torch.randn(6, *rest), torch.randn(6, *rest)
    apart = torch.stack([OFFSETS, OFFSETS], 1)[:, 0]
    out = ops.segment_softmax(x, OFFSETS)
    assert torch.equal(ops.segment_softmax(layout(x), apart), out)
    slopes = ops.segment_softmax_backward(grad, out, OFFSETS)
    assert torch.equal(ops.segment_softmax_backward(layout(grad), layout(out), apart), slopes)


@COMPILED
def test_threads_change_no_bit():
    offsets = torch.tensor([5, 7, 7, 1000, 2500, 2990])
    for width in (13, 20):
        x, grad, found = torch.randn(3000, width), torch.randn(3000, width), []
        for count in (1, 2):
            with threads(count):
                out = ops.segment_softmax(x, offsets)
                found.append((out, ops.segment_softmax_backward(grad, out, offsets)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("width", [1, 8, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_extremes_flow_as_in_eager(width, dtype):
    low, nan = -float("inf"), float("nan")
    for scores in ([low, 1, 2], [low, low], [nan, 1], [-low, 1], [low], [300, -300, 0], [6e4, -6e4]):
        x = torch.tensor(scores).to(dtype)[:, None].repeat(1, width)
        found = ops.segment_softmax(x, torch.tensor([0, len(scores)]))
        torch.testing.assert_close(found, x.softmax(0), equal_nan=True)


@BOTH
def test_a_shift_of_all_scores_has_next_to_no_gradient(softmax, backward):
    """Equal gradients for all rows: what is left of them is the rounding of the weights, and not that of sums."""
    x, offsets = 3 * torch.randn(4000, 9), torch.tensor([0, 4000])
    out = softmax(x, offsets)
    found = backward(torch.full_like(out, 1e4), out, offsets)
    exact = out.double() * 1e4 * (1 - out.double().sum(0))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-12)


def test_gradcheck_and_opcheck():
    x = torch.randn(5, 2).double().requires_grad_()
    assert torch.autograd.gradcheck(ops.segment_softmax, (x, OFFSETS))
    torch.library.opcheck(ops.segment_softmax.default, (x, OFFSETS))
    out = ops.segment_softmax(x.detach(), OFFSETS)
    torch.library.opcheck(ops.segment_softmax_backward.default, (torch.randn_like(out), out, OFFSETS))


def test_rows_behind_the_last_offset_belong_to_nobody():
    x = torch.randn(7, 2).requires_grad_()
    out = ops.segment_softmax(x, OFFSETS)
    (slope,) = torch.autograd.grad(out.square().sum(), x)
    assert (out[5:] == 0).all() and (slope[5:] == 0).all() and (slope[:5] != 0).all()


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [2, 9])
def test_low_precision_rounds_only_at_the_end(softmax, backward, dtype, width):
    x, offsets = torch.randn(300, width).to(dtype), torch.tensor([0, 300])
    close = dict(rtol=max(torch.finfo(dtype).eps / 2, 1e-6) * 1.01, atol=1e-7)
    out = softmax(x, offsets)
    torch.testing.assert_close(out.double(), x.double().softmax(0), **close)
    grad = torch.randn(300, width).to(dtype)
    slope, weight, wide = backward(grad, out, offsets), out.double(), grad.double()
    assert out.dtype == slope.dtype == dtype
    torch.testing.assert_close(slope.double(), weight * (wide - (weight * wide).sum(0)), **close)


def test_unbacked_rows_are_not_guarded_on():
    def step(x, mask, offsets):
        x = x.detach().requires_grad_()
        out = ops.segment_softmax(ops.gather_rows(x, mask.nonzero()[:, 0]), offsets)
        return torch.autograd.grad(out.square().sum(), x)[0]

    x, mask = torch.randn(7, 2), torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    module = _torch.make_fx(step, tracing_mode="symbolic")(x, mask, OFFSETS)
    env = _torch.shape_env_of(module.graph)
    assert not env.deferred_runtime_asserts and not [g for g in _torch.new_guards(env, 0) if "u" in g]
    torch.testing.assert_close(module(x, mask, OFFSETS), step(x, mask, OFFSETS))


@pytest.mark.parametrize(
    "x, offsets",
    [(torch.zeros(5).long(), OFFSETS), (torch.zeros(()), OFFSETS), (torch.zeros(5), OFFSETS.int())],
)
def test_bad_shapes_and_dtypes_raise_real_and_fake(x, offsets):
    for arguments in ((x, offsets), _torch.fake_inputs([x, offsets])):
        with pytest.raises(ValueError, match="segment_softmax: "):
            ops.segment_softmax(*arguments)


@BOTH
@pytest.mark.parametrize("bounds", [[0, 6], [0, 3, 2], [-1, 5], [], [0, 2**62, 5], [2**62]])
def test_offsets_outside_of_rows_raise(softmax, backward, bounds):
    x, offsets = torch.zeros(5, 2), torch.tensor(bounds, dtype=torch.int64)
    with pytest.raises(ValueError, match="segment_softmax: offsets"):
        softmax(x, offsets)
    with pytest.raises(ValueError, match="segment_softmax_backward: offsets"):
        backward(x, x, offsets)
