"""norm_gate against F.layer_norm times the gate."""

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
    [(ops.norm_gate, ops.norm_gate_backward), (references.norm_gate, references.norm_gate_backward)],
    ids=["op", "reference"],
)
EPS = 1e-5
ALL = [True] * 4


def inputs(*shape, parts=(True, True), dtype=torch.float64):
    """x, gate, weight, bias."""
    vectors = [torch.randn(shape[-1]).to(dtype) if part else None for part in parts]
    return [(torch.randn(shape) + 1).to(dtype), torch.randn(shape).to(dtype), *vectors]


def wanted(x, gate, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS) * gate


def slopes(grad, *arguments):
    """Gradients that eager has; None where there is no argument."""
    arguments = [None if x is None else x.detach().requires_grad_() for x in arguments]
    given = [x for x in arguments if x is not None]
    found = iter(torch.autograd.grad(wanted(*arguments), given, grad))
    return [None if x is None else next(found) for x in arguments]


def check(found, exact, **close):
    for one, other in zip(found, exact, strict=True):
        if other is None:
            assert one.numel() == 0
        else:
            torch.testing.assert_close(one.to(other.dtype), other, **close)


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([(), (0,), (1,), (5,), (2, 3), (300,)]),
    st.integers(1, 40),
    st.tuples(st.booleans(), st.booleans()),
)
def test_equals_layer_norm_times_gate(forward, backward, leading, width, parts):
    a = inputs(*leading, width, parts=parts)
    result, mean, rstd = forward(*a, EPS)
    close = dict(rtol=1e-6, atol=1e-7) if width > 1 else dict(rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result, wanted(*a), **close)
    torch.testing.assert_close(mean, a[0].mean(-1))
    grad = torch.randn_like(result)
    found = backward(grad, *a, mean, rstd, ALL)
    check(found, slopes(grad, *a), **close)
    assert all(x.is_contiguous() for x in (result, mean, rstd, *found))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("own", [True, False], ids=["weights of the dtype", "weights in float32"])
def test_low_precision_rounds_only_at_the_end(forward, backward, dtype, own):
    a = inputs(50, 67, dtype=dtype)
    a[2:] = a[2:] if own else [x.float() for x in a[2:]]
    exact = [x.double() for x in a]
    close = dict(rtol=max(torch.finfo(dtype).eps / 2, 1e-5) * 1.01, atol=1e-5)
    result, mean, rstd = forward(*a, EPS)
    assert result.dtype == dtype and mean.dtype == rstd.dtype == torch.float32
    torch.testing.assert_close(result.double(), wanted(*exact), **close)
    grad = torch.randn(50, 67).to(dtype)
    found = backward(grad, *a, mean, rstd, ALL)
    assert [x.dtype for x in found] == [x.dtype for x in a]
    check(found, slopes(grad.double(), *exact), **close)


@COMPILED
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("leading", [(6,), (2, 3)])
def test_layouts_change_nothing(layout, dtype, leading):
    a, grad = inputs(*leading, 19, dtype=dtype), torch.randn(*leading, 19).to(dtype)
    other = [layout(x) for x in a]
    plain, moved = ops.norm_gate(*a, EPS), ops.norm_gate(*other, EPS)
    assert all(torch.equal(x, y) for x, y in zip(plain, moved, strict=True))
    plain = ops.norm_gate_backward(grad, *a, *plain[1:], ALL)
    moved = ops.norm_gate_backward(layout(grad), *other, *(layout(x) for x in moved[1:]), ALL)
    assert all(torch.equal(x, y) for x, y in zip(plain, moved, strict=True))


@COMPILED
@pytest.mark.parametrize("rows, width", [(700, 131), (3000, 17)])
def test_threads_change_no_bit(rows, width):
    a, grad = inputs(rows, width, dtype=torch.float32), torch.randn(rows, width)
    found = []
    for count in (1, 2):
        with threads(count):
            result, mean, rstd = ops.norm_gate(*a, EPS)
            found.append([result, mean, rstd, *ops.norm_gate_backward(grad, *a, mean, rstd, ALL)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_many_rows_add_up_exactly():
    """Sums over rows go through chunks: none is lost, and none counted twice."""
    rows = 70_000
    x = torch.tensor([1.0, -1.0]).repeat(rows, 1)
    gate, one = torch.ones(rows, 2), torch.ones(2)
    _, mean, rstd = ops.norm_gate(x, gate, one, one, 0.0)
    _, _, weight, bias = ops.norm_gate_backward(gate, x, gate, one, one, mean, rstd, ALL)
    assert weight.tolist() == [rows, -rows] and bias.tolist() == [rows, rows]


@BOTH
@pytest.mark.parametrize("place", range(4))
def test_only_what_is_wanted(forward, backward, place):
    a, grad = inputs(5, 3), torch.randn(5, 3).double()
    _, mean, rstd = forward(*a, EPS)
    found = backward(grad, *a, mean, rstd, [i == place for i in range(4)])
    exact = slopes(grad, *a)
    check(found, [x if i == place else None for i, x in enumerate(exact)])


def test_nan_and_infinity_stay_in_their_row():
    x, gate, weight, bias = inputs(4, 9)
    x[1, 3], x[2, 8] = float("nan"), float("inf")
    result, _, _ = ops.norm_gate(x, gate, weight, bias, EPS)
    torch.testing.assert_close(result, wanted(x, gate, weight, bias), equal_nan=True)
    assert result[1:3].isnan().all() and not result[::3].isnan().any()


def test_a_large_mean_does_not_drown_the_deviation():
    x = torch.randn(3, 256) + 1e4
    one = torch.ones_like(x)
    found, exact = ops.norm_gate(x, one, None, None, EPS)[0], wanted(x.double(), one.double(), None, None)
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("parts", [(True, True), (False, True), (True, False), (False, False)])
def test_gradcheck_and_opcheck(parts):
    a = [None if x is None else x.requires_grad_() for x in inputs(3, 5, parts=parts)]
    assert torch.autograd.gradcheck(lambda *a: ops.norm_gate(*a, EPS)[0], a)
    torch.library.opcheck(ops.norm_gate.default, (*a, EPS))
    a = [None if x is None else x.detach() for x in a]
    result, mean, rstd = ops.norm_gate(*a, EPS)
    torch.library.opcheck(ops.norm_gate_backward.default, (result, *a, mean, rstd, ALL))


def test_compiles_whole():
    def loss(*a):
        return ops.norm_gate(*a, EPS)[0].square().sum()

    a = [x.requires_grad_() for x in inputs(4, 6)]
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(*(torch.autograd.grad(f(*a), a) for f in (compiled, loss)))


def test_unbacked_rows_are_not_guarded_on():
    def step(x, mask, weight):
        x = x.detach().requires_grad_()
        rows = ops.gather_rows(x, mask.nonzero()[:, 0])
        return torch.autograd.grad(ops.norm_gate(rows, rows, weight, None, EPS)[0].sum(), x)[0]

    x, mask, weight = torch.randn(7, 3), torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool(), torch.randn(3)
    traced = _torch.make_fx(step, tracing_mode="symbolic")(x, mask, weight)
    env = _torch.shape_env_of(traced.graph)
    assert not env.deferred_runtime_asserts and not [g for g in _torch.new_guards(env, 0) if "u" in g]
    torch.testing.assert_close(traced(x, ~mask, weight), step(x, ~mask, weight))


WRONG = {
    "x of integers": lambda x, w: ops.norm_gate(x.long(), x.long(), w, w, EPS),
    "x without dims": lambda x, w: ops.norm_gate(x[0, 0], x[0, 0], None, None, EPS),
    "gate of another shape": lambda x, w: ops.norm_gate(x, x[:1], w, w, EPS),
    "gate of another dtype": lambda x, w: ops.norm_gate(x, x.double(), w, w, EPS),
    "weight of another length": lambda x, w: ops.norm_gate(x, x, w[:2], w, EPS),
    "bias of two dims": lambda x, w: ops.norm_gate(x, x, w, x, EPS),
    "grad of another shape": lambda x, w: ops.norm_gate_backward(x[1:], x, x, w, w, x[:, 0], x[:, 0], ALL),
    "mean of another shape": lambda x, w: ops.norm_gate_backward(x, x, x, w, w, w, x[:, 0], ALL),
    "rstd of another dtype": lambda x, w: ops.norm_gate_backward(x, x, x, w, w, x[:, 0], x[:, 0].double(), ALL),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_bad_shapes_and_dtypes_raise_real_and_fake(call):
    x, weight = torch.zeros(5, 4), torch.zeros(4)
    for arguments in ((x, weight), _torch.fake_inputs([x, weight])):
        with pytest.raises(ValueError, match="norm_gate"):
            call(*arguments)
