"""Rules about numbers: over all 65,536 values of each half type, and at random in fp32 and fp64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from turbogr_compile.passes.rows.attention.calls import Call
from turbogr_compile.passes.rows.attention.language import (
    Data,
    Number,
    Score,
    Sum,
    Test,
    Unknown,
    just,
    number,
    product,
)
from turbogr_compile.passes.rows.attention.numbers import (
    BOUND,
    LOW,
    added,
    calculated,
    cast,
    exact_up_to,
    is_lowest,
    linear,
    scaled,
)
from turbogr_compile.passes.rows.attention.pointwise import _clamped, compared_data, function
from turbogr_compile.passes.rows.attention.softmax import hidden_by
from turbogr_compile.passes.rows.attention.table import compared

HALVES = [torch.float16, torch.bfloat16]
WIDE = [torch.float32, torch.float64]
aten = torch.ops.aten
NODE = fx.Graph().placeholder("x")


def every(dtype: torch.dtype) -> Tensor:
    """All values of a half type."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def scores_of(dtype: torch.dtype) -> Tensor:
    """All finite values that a score may have."""
    x = every(dtype)
    return x[x.abs() <= BOUND]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a, 7.25), torch.nan_to_num(b, 7.25)) and torch.equal(a.isnan(), b.isnan())


class Evaluation(SimpleNamespace):
    """As much of an evaluator as rules about numbers ask for."""

    def __init__(self) -> None:
        super().__init__(assumed=[])

    def assume(self, text: str) -> None:
        self.assumed.append(text)

    def gradients_reach(self, node: Any) -> bool:
        return False


# --- all values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
def test_a_number_keeps_its_value(dtype):
    x = every(dtype)
    kept = torch.tensor([Number.of(v).value for v in x], dtype=torch.float64).to(dtype)
    assert same(kept, x) and torch.equal(kept.signbit() & (kept == 0), x.signbit() & (x == 0))


@pytest.mark.parametrize("dtype", HALVES)
def test_what_removes_a_score_leaves_it_nothing(dtype):
    """Every number as a fill, against the lowest visible score there may be: its weight is 0."""
    x = every(dtype)
    x = x[~x.isnan() & (x < math.inf)]
    how = [hidden_by(Number.of(v), NODE) for v in x]
    bounded = torch.tensor([h == "fill" for h in how])
    pairs = torch.stack([torch.full_like(x, -BOUND), x], -1)
    assert (pairs.softmax(-1)[bounded][:, 1] == 0).all()
    for at in [i for i, h in enumerate(how) if h in ("infinity", "fill-lowest")]:
        others = every(dtype)
        others = others[others.isfinite() & (others != x[at])]
        pairs = torch.stack([others, x[at].expand_as(others)], -1)
        assert (pairs.softmax(-1)[:, 1] == 0).all(), x[at]
    assert bounded.any() and not all(how)


@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_added_removes_a_score(dtype):
    """Every number added to the highest hidden score, against the lowest visible one."""
    x = every(dtype)
    x = x[~x.isnan() & (x < math.inf)]
    score = just(Score(), dtype)
    sums = [linear(dict(score.terms), float(v), dtype, 0.0) for v in x]
    removed = torch.tensor([hidden_by(s, NODE).startswith(("add", "infinity")) for s in sums])
    highest = torch.full_like(x, BOUND) + x
    pairs = torch.stack([torch.full_like(x, -BOUND), highest], -1)
    assert (pairs.softmax(-1)[removed][:, 1] == 0).all()
    assert removed.any() and not removed.all()


def test_the_lowest_half_removes_bounded_scores_only():
    """Its next number is 32 above it, where the next of the other types lies beyond any score."""
    low = torch.finfo(torch.float16).min
    assert torch.tensor([low + 32, low], dtype=torch.float16).softmax(-1)[1] > 0 or not is_lowest(low, torch.float16)
    assert not is_lowest(low, torch.float16) and hidden_by(number(low, torch.float16), NODE) == "fill"
    for dtype in (torch.bfloat16, *WIDE):
        lowest = torch.finfo(dtype).min
        after = torch.nextafter(torch.tensor(lowest, dtype=dtype), torch.tensor(0.0, dtype=dtype))
        assert is_lowest(lowest, dtype) and torch.stack([after, torch.tensor(lowest, dtype=dtype)]).softmax(-1)[1] == 0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("to", [*HALVES, *WIDE])
def test_casts_of_constants(dtype, to):
    x = every(dtype)
    x = x[~x.isnan()]
    got = [cast(Evaluation(), linear({product(Score()): 1.0}, float(v), dtype, 0.0), to).const for v in x]
    assert torch.equal(torch.tensor(got, dtype=torch.float64), x.to(to).double())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("factor", [0.1, -1.0, 1 / 3, 1024.0, 1e-3])
def test_constants_are_scaled_as_the_op_does(dtype, factor):
    x = every(dtype)
    got = torch.tensor([calculated(aten.mul.Tensor, dtype, (float(v),), factor) for v in x[::16]])
    assert same(got.to(dtype), x[::16] * factor)
    assert same(torch.full((1,), 1.0, dtype=dtype).expand(len(x)) * x, x)


def test_coefficients_of_halves_are_not_rounded_to_halves():
    """`half * 0.1` multiplies by fp32(0.1): the coefficient of a score must not be fp16(0.1)."""
    for dtype in HALVES:
        x = scaled(aten.mul.Tensor, just(Score(), dtype), 0.1, dtype)
        assert isinstance(x, Sum) and x.terms[0][1] == torch.tensor(0.1, dtype=torch.float32).item()
        assert torch.tensor(0.1, dtype=dtype).item() != x.terms[0][1]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["silu", "sigmoid", "relu", "exp", "tanh", "gelu"])
def test_limits_of_functions(dtype, name):
    """Where a function of score + c is said to be one number, it is that for every score."""
    op = getattr(aten, name).default
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(op, (x,))
    node.meta["val"] = torch.empty(3, dtype=dtype)
    scores, told = scores_of(dtype), 0
    ends = torch.tensor([-BOUND, -1.0, 0.0, 1.0, BOUND], dtype=dtype)
    for at, c in enumerate(every(dtype).tolist()):
        if not math.isfinite(c) or abs(c) < -LOW:
            continue
        leaf = Sum(((product(Score()), 1.0),), c, dtype)
        found = function(Evaluation(), Call(node, (), leaves={x: leaf}))  # type: ignore[arg-type]
        if isinstance(found, Number):
            told += 1
            assert (op((scores if at % 97 == 0 else ends) + torch.tensor(c, dtype=dtype)) == found.value).all(), c
    assert told


@pytest.mark.parametrize("dtype", HALVES)
def test_clamps_at_every_number(dtype):
    graph = fx.Graph()
    x = graph.placeholder("x")
    scores, told = scores_of(dtype), {"free": 0, "limit": 0}
    node = graph.call_function(aten.clamp.default, (x,))
    node.meta["val"] = torch.empty(3, dtype=dtype)
    leaf = just(Score(), dtype)
    for limit in every(dtype).tolist():
        if math.isnan(limit) or abs(limit) < BOUND:
            continue
        call = Call(node, (), leaves={x: leaf})
        found = _clamped(Evaluation(), call, leaf, limit, None)  # type: ignore[arg-type]
        sample = scores if abs(limit) < 2 * BOUND else scores[:: len(scores) // 7]
        if isinstance(found, Number):
            told["limit"] += 1
            assert (sample.clamp(min=limit) == found.value).all()
        else:
            told["free"] += 1
            assert torch.equal(sample.clamp(min=limit), sample)
    assert all(told.values())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_comparisons_of_every_value(dtype, name):
    """The test that a comparison becomes answers as the op does, for every value and NaN."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(3, dtype=dtype)
    x = every(dtype)
    for c in (0.0, 1.0, 0.1, -0.5, 1e-7, 65504.0, -1e4, math.inf, -math.inf):
        table = compared_data(Data(node, ()), name, c)
        (atom,) = table.atoms
        assert isinstance(atom, Test)
        answers = compared(x, atom)
        mine = answers if table.rows[(True,)].value else ~answers
        assert torch.equal(mine, getattr(torch, name)(x, c)), c


def test_a_number_between_two_of_a_tensors_is_not_rounded():
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(3, dtype=torch.float16)
    with pytest.raises(Unknown):
        compared_data(Data(node, ()), "gt", number(0.1, torch.float32))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32])
def test_whole_numbers_are_exact_up_to_the_bound(dtype):
    most = exact_up_to(dtype)
    near = torch.arange(max(0, most - 300), most + 1)
    assert torch.equal(near.to(dtype).long(), near)
    if dtype.is_floating_point:
        assert (near + 1).to(dtype).long()[-1] != most + 1


@pytest.mark.parametrize("dtype", HALVES)
def test_sums_of_constants(dtype):
    x = every(dtype)[::64]
    for c in (-1e4, 3.0, 0.1, -65504.0):
        other = number(c, dtype)
        got = [added(aten.add.Tensor, Number.of(v), other, dtype) for v in x]
        want = x + torch.full((1,), c, dtype=torch.float64).to(dtype)
        assert same(torch.tensor([g.value for g in got], dtype=torch.float64).to(dtype), want)  # type: ignore[union-attr]


# --- at random -----------------------------------------------------------------------------------------


def kernel_softmax(s: Tensor, visible: Tensor) -> Tensor:
    """What the kernel computes: softmax over visible keys, zero for a query that sees none."""
    blind = ~visible.any(-1, keepdim=True)
    w = torch.where(blind, torch.zeros_like(s), s.masked_fill(~visible, -math.inf)).softmax(-1)
    return torch.where(visible & ~blind, w, torch.zeros_like(w))


def example(seed: int, dtype: torch.dtype, size: float) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    s = (torch.randn(4, 6, generator=g, dtype=torch.float64) * size).clamp(-BOUND, BOUND).to(dtype)
    m = torch.rand(4, 6, generator=g) < 0.5
    m[torch.arange(4), torch.randint(0, 6, (4,), generator=g)] = True
    return s, m


def equal(f: Any, g: Any, s: Tensor) -> bool:
    found = []
    for program in (f, g):
        x = s.detach().clone().requires_grad_()
        y = program(x)
        slope = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
        found.append((y.detach(), *torch.autograd.grad((y * slope).sum(), x)))
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12}[s.dtype]
    return all(torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(*found, strict=True))


seeds, sizes = st.integers(0, 10**6), st.sampled_from([0.0, 1e-30, 1.0, 50.0, 1000.0, 4000.0])
lows = st.sampled_from([LOW, -1e4, -65504.0, -1e9, -1e30, -(2.0**32) + 1])
some = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("dtype", WIDE)
@some
@given(seeds, sizes, lows)
def test_low_numbers_filled_or_added(dtype, seed, size, low):
    s, m = example(seed, dtype, size)
    hide = (~m).to(dtype) * low
    for program in (lambda x: x.masked_fill(~m, low), lambda x: x + hide, lambda x: x.masked_fill(~m, -math.inf)):
        assert equal(lambda x, p=program: p(x).softmax(-1), lambda x: kernel_softmax(x, m), s)
    for f in (F.silu, torch.sigmoid, lambda x: torch.relu(x).square()):
        want = lambda x, f=f: torch.where(m, f(x), torch.zeros_like(x))  # noqa: E731
        assert equal(lambda x, f=f: f(x.masked_fill(~m, low)), want, s)
        assert equal(lambda x, f=f: f(x + hide), want, s)


@pytest.mark.parametrize("dtype", WIDE)
@some
@given(seeds, st.sampled_from([1.0, 1e4, 1e20, 1e29]))
def test_the_lowest_number_removes_scores_of_any_size(dtype, seed, size):
    s, m = example(seed, dtype, 1.0)
    low, s = torch.finfo(dtype).min, s * size / 4
    want = s.masked_fill(~m, -math.inf).softmax(-1)
    assert torch.equal(s.masked_fill(~m, low).softmax(-1), want)
    assert torch.equal((s + torch.zeros_like(s).masked_fill(~m, low)).softmax(-1), want)


def test_the_bound_is_tight_where_it_is_said_to_be():
    """LOW added to the highest score, against the lowest: nothing in fp64; 746 less is something."""
    s = torch.tensor([-BOUND, BOUND], dtype=torch.float64)
    hide = torch.tensor([0.0, LOW], dtype=torch.float64)
    assert (s + hide).softmax(-1)[1] == 0
    assert (s + hide / LOW * (LOW + 10)).softmax(-1)[1] > 0


@pytest.mark.parametrize("dtype", WIDE)
@some
@given(seeds, sizes)
def test_sinks_by_log_sum(dtype, seed, size):
    s, m = example(seed, dtype, min(size, 20.0))
    t = torch.randn(4, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

    def by_log_sum(x: Tensor) -> Tensor:
        log_sum = x.masked_fill(~m, -math.inf).logsumexp(-1, keepdim=True)
        return kernel_softmax(x, m) * torch.sigmoid(log_sum - t)

    assert equal(lambda x: torch.cat([x.masked_fill(~m, -math.inf), t], -1).softmax(-1)[:, :-1], by_log_sum, s)


def test_facts_that_conditions_rest_on():
    assert F.silu(torch.tensor(-math.inf)).isnan() and F.silu(torch.tensor(-50.0)) != 0
    assert torch.full((1,), torch.finfo(torch.float32).min).bfloat16().item() == -math.inf  # rounds over the edge
    assert (torch.zeros(1, dtype=torch.float16) + torch.tensor(-1e9)).item() == -math.inf  # 0-d does not promote
    assert (torch.zeros(1, dtype=torch.float16) + torch.tensor([-1e9])).item() == -1e9
    assert torch.allclose(((torch.tensor([0.0, 3.0]) - 1e9) + 1e9).softmax(-1), torch.tensor([0.5, 0.5]))
