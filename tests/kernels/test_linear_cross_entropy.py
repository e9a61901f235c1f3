"""linear_cross_entropy against F.cross_entropy of whole logits: results, gradients, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from turbogr_compile import _torch
from turbogr_compile.kernels import linear_cross_entropy as kernel

ops = torch.ops.turbogr
NAN, INF = torch.nan, torch.inf


@dataclass(frozen=True)
class Case:
    rows: int = 9
    width: int = 4
    classes: int = 21
    bias: bool = True
    scale: float = 1.0
    ignore: int = -100
    ignored: float = 0.0  # share of rows
    smoothing: float = 0.0
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def inputs(self) -> tuple[Any, ...]:
        """Arguments of the op; random, and the same for the same case."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=random, dtype=torch.float64).to(self.dtype).requires_grad_()

        x, weight, bias = normal(self.rows, self.width), normal(self.classes, self.width), normal(self.classes)
        target = torch.randint(self.classes, (self.rows,), generator=random)
        target[torch.rand(self.rows, generator=random) < self.ignored] = self.ignore
        return x, weight, bias if self.bias else None, target, self.scale, self.ignore, self.smoothing


CASES = st.builds(
    Case,
    rows=st.integers(0, 70),
    width=st.integers(1, 5),
    classes=st.integers(1, 70),
    bias=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, -2.0]),
    ignore=st.sampled_from([-100, 0]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 3),
)


@pytest.fixture(params=["a tile at a time", "in one tile"])
def tiles(request, monkeypatch):
    """Tiles so small that few rows and classes make many of them."""
    if request.param == "a tile at a time":
        for name, size in (("TILE", 16), ("WHOLE", 1024), ("LEAST_ROWS", 16), ("MOST_CLASSES", 48)):
            monkeypatch.setattr(kernel, name, size)


def logits_of(x, weight, bias, scale):
    logits = scale * (x @ weight.T)
    return logits if bias is None else logits + bias


def eager(x, weight, bias, target, scale, ignore, smoothing, reduction="none"):
    logits = logits_of(x, weight, bias, scale)
    return F.cross_entropy(logits, target, reduction=reduction, ignore_index=ignore, label_smoothing=smoothing)


def gradients(result, inputs, slope=None):
    asked = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.autograd.grad(result, asked, slope)


close = partial(torch.testing.assert_close, equal_nan=True)
PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@PROPERTY
@given(CASES)
def test_losses_and_gradients_of_rows(tiles, case):
    inputs = case.inputs()
    found, wanted = ops.linear_cross_entropy(*inputs)[0], eager(*inputs)
    close(found, wanted)
    slope = torch.randn_like(wanted)
    for a, b in zip(gradients(found, inputs, slope), gradients(wanted, inputs, slope), strict=True):
        close(a, b)


@PROPERTY
@given(CASES, st.sampled_from(["mean", "sum"]))
def test_totals_and_their_gradients(tiles, case, reduction):
    x, weight, bias, target, *attributes = inputs = case.inputs()
    found = ops.linear_cross_entropy_total(x, weight, bias, target, None, *attributes, reduction == "mean")
    wanted = eager(*inputs, reduction)
    close(found, wanted)
    for a, b in zip(gradients(3.0 * found, inputs), gradients(3.0 * wanted, inputs), strict=True):
        close(a, b)


@PROPERTY
@given(CASES)
def test_totals_with_a_share_of_each_row(tiles, case):
    x, weight, bias, target, *attributes = inputs = case.inputs()
    share = torch.rand(case.rows, dtype=torch.float64).requires_grad_()
    found = ops.linear_cross_entropy_total(x, weight, bias, target, share, *attributes, False)
    wanted = (eager(*inputs) * share).sum()
    close(found, wanted)
    for a, b in zip(gradients(found, (*inputs, share)), gradients(wanted, (*inputs, share)), strict=True):
        close(a, b)


@PROPERTY
@given(CASES, st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_reference_and_kernel_agree(tiles, case, wanted):
    with torch.no_grad():
        x, weight, bias, target, *attributes = inputs = case.inputs()
        loss, log_sum = kernel.loss(*inputs)
        close(ops.linear_cross_entropy(*inputs), (loss, log_sum))
        rest = (torch.randn_like(loss), x, weight, bias, target, log_sum, *attributes, list(wanted))
        close(tuple(ops.linear_cross_entropy_backward(*rest)), kernel.loss_backward(*rest))
        rest = (x, weight, bias, target, None, *attributes, True, list(wanted))
        close(tuple(ops.linear_cross_entropy_ahead(*rest)), kernel.ahead(*rest))


@pytest.mark.parametrize("classes", [50, 3000, 70_000])
def test_sizes_that_take_tiles_as_they_are(classes):
    inputs = Case(rows=1100 if classes == 3000 else 40, classes=classes, smoothing=0.1, ignored=0.2).inputs()
    found, wanted = ops.linear_cross_entropy(*inputs)[0], eager(*inputs)
    close(found, wanted)
    for a, b in zip(gradients(found.mean(), inputs), gradients(wanted.mean(), inputs), strict=True):
        close(a, b)
    x, weight, bias, target, *attributes = inputs
    found = ops.linear_cross_entropy_total(x, weight, bias, target, None, *attributes, True)
    for a, b in zip(gradients(found, inputs), gradients(eager(*inputs, "mean"), inputs), strict=True):
        close(a, b)


# --- numbers that are not ordinary -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "bias",
    [
        [NAN, 0.0], [INF, 0.0], [-INF, 0.0], [INF, -INF], [NAN, INF], [-INF] * 40, [-INF] * 39 + [NAN],
        [-INF] * 20, [-INF] * 19 + [NAN], [300.0, -300.0], [1e30], [0.0] * 20 + [1e30],
    ],
)  # fmt: skip
def test_nan_and_infinity_flow_as_in_eager(tiles, dtype, bias):
    case = Case(rows=40, classes=40, dtype=dtype)
    x, weight, _, target, *attributes = case.inputs()
    target = torch.arange(40)
    values = torch.cat([torch.tensor(bias), torch.zeros(40 - len(bias))]).to(dtype).requires_grad_()
    inputs = (x, weight, values, target, *attributes)
    found, wanted = ops.linear_cross_entropy(*inputs)[0], eager(*inputs)
    close(found, wanted)
    whole = ops.linear_cross_entropy_total(x, weight, values, target, None, *attributes, False)
    close(whole, wanted.sum())
    slopes = gradients(wanted.sum(), inputs)
    for result in (found.sum(), whole):
        for a, b in zip(gradients(result, inputs), slopes, strict=True):
            close(a, b)


def test_one_bad_row_stays_alone():
    x, *rest = Case(rows=20).inputs()
    spoilt = x.detach().clone()
    spoilt[7] = NAN
    found, _ = ops.linear_cross_entropy(spoilt, *rest)
    assert found.isnan().nonzero().tolist() == [[7]]


def test_ignored_rows_are_not_looked_at():
    x, weight, bias, target, *attributes = Case(rows=20, ignored=0.5).inputs()
    spoilt = torch.where((target == -100)[:, None], NAN, x.detach()).requires_grad_()
    results = []
    for rows in (x, spoilt):
        found, _ = ops.linear_cross_entropy(rows, weight, bias, target, *attributes)
        results.append((found, *torch.autograd.grad(found.sum(), [rows, weight, bias])))
    close(*results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_rounds_only_at_the_end(dtype):
    inputs = Case(rows=200, width=16, classes=3000, ignored=0.1, smoothing=0.1, dtype=dtype).inputs()
    wide = tuple(
        t.detach().double().requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs
    )
    found, log_sum = ops.linear_cross_entropy(*inputs)
    assert found.dtype == log_sum.dtype == torch.float32
    close(found.double(), eager(*wide), rtol=1e-5, atol=1e-5)
    x, weight, bias, target, *attributes = inputs
    mean = ops.linear_cross_entropy_total(x, weight, bias, target, None, *attributes, True)
    assert mean.dtype == torch.float32
    eps = torch.finfo(dtype).eps
    slopes = gradients(1000.0 * eager(*wide, "mean"), wide)
    for result in (1000.0 * found.sum() / (target != -100).sum(), 1000.0 * mean):
        for a, b in zip(gradients(result, inputs), slopes, strict=True):
            assert a.dtype == dtype
            close(a.double(), b, rtol=eps, atol=2e-6)


def test_gradients_too_small_for_half_precision_survive_until_they_are_scaled():
    x, weight, bias, target, *attributes = inputs = Case(rows=4000, dtype=torch.float16, classes=300).inputs()
    mean = ops.linear_cross_entropy_total(x, weight, bias, target, None, *attributes, True)
    slope, *_ = gradients(2.0**16 * mean, inputs)
    wide = tuple(
        t.detach().double().requires_grad_() if torch.is_tensor(t) and t.is_floating_point() else t for t in inputs
    )
    close(slope.double(), gradients(2.0**16 * eager(*wide, "mean"), wide)[0], rtol=1e-3, atol=1e-5)


# --- what it costs -----------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [t for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return result


def test_logits_never_exist_whole():
    case = Case(rows=600, classes=700)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch, Largest() as seen:
        for name, size in (("TILE", 64), ("WHOLE", 16 * 700), ("LEAST_ROWS", 16)):
            patch.setattr(kernel, name, size)
        x, weight, bias, target, *attributes = inputs = case.inputs()
        loss, log_sum = kernel.loss(*inputs)
        kernel.loss_backward(loss, x, weight, bias, target, log_sum, *attributes, [True] * 3)
        kernel.ahead(x, weight, bias, target, None, *attributes, True, [True] * 3)
    assert seen.elements <= 16 * 700 < 600 * 700


class Asked(TorchDispatchMode):
    """What `wanted` was."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ops.linear_cross_entropy_ahead.default:
            self.wanted = args[-1]
        return func(*args, **(kwargs or {}))


def test_gradients_are_computed_along_only_where_somebody_may_ask():
    x, weight, bias, target, *attributes = Case().inputs()

    def asked(*tensors):
        with Asked() as seen:
            ops.linear_cross_entropy_total(*tensors, target, None, *attributes, True)
        return seen.wanted

    assert asked(x, weight, bias) == [True, True, True]
    assert asked(x, weight, None) == [True, True, False]
    assert asked(x.detach(), weight, bias.detach()) == [False, True, False]
    with torch.no_grad():
        assert asked(x, weight, bias) == [False, False, False]


def test_flops():
    x, weight, bias, target, *attributes = inputs = Case(rows=6, width=4, classes=10).inputs()

    def counted(fn):
        with FlopCounterMode(display=False) as counter:
            fn()
        return counter.get_total_flops()

    product = 2 * 6 * 4 * 10
    assert counted(lambda: ops.linear_cross_entropy(*inputs)) == product
    assert counted(lambda: ops.linear_cross_entropy(*inputs)[0].sum().backward()) == 3 * product
    total = partial(ops.linear_cross_entropy_total, x, weight, bias, target, None, *attributes, True)
    assert counted(lambda: total().backward()) == 3 * product
    with torch.no_grad():
        assert counted(total) == product


def test_threads_change_nothing():
    case = Case(rows=600, width=32, classes=2100, dtype=torch.float32, ignored=0.1)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            x, weight, bias, target, *attributes = inputs = case.inputs()
            loss, _ = ops.linear_cross_entropy(*inputs)
            mean = ops.linear_cross_entropy_total(x, weight, bias, target, None, *attributes, True)
            results.append([loss, mean, *gradients(loss.sum(), inputs), *gradients(mean, inputs)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


# --- as an op ----------------------------------------------------------------------------------------


def test_gradcheck_and_opcheck():
    x, weight, bias, target, *attributes = inputs = Case(rows=4, classes=5, smoothing=0.1, ignored=0.3).inputs()
    assert torch.autograd.gradcheck(lambda *t: ops.linear_cross_entropy(*t, target, *attributes)[0], (x, weight, bias))
    torch.library.opcheck(ops.linear_cross_entropy.default, inputs)
    with torch.no_grad():
        loss, log_sum = ops.linear_cross_entropy(*inputs)
    plain = [t.detach() for t in (x, weight, bias)]
    share = torch.rand(4, dtype=torch.float64)
    for wanted in ([True, False, True], [False] * 3):
        rest = (loss, *plain, target, log_sum, *attributes, wanted)
        torch.library.opcheck(ops.linear_cross_entropy_backward.default, rest)
        for some, mean in ((share, False), (None, True)):
            rest = (*plain, target, some, *attributes, mean, wanted)
            torch.library.opcheck(ops.linear_cross_entropy_ahead.default, rest)
    rest = (x, weight, bias, target, share, *attributes, False, [True] * 3)
    torch.library.opcheck(ops.linear_cross_entropy_ahead.default, rest)


def test_layout_does_not_matter():
    x, weight, bias, target, *attributes = inputs = Case(rows=8, width=6, classes=30).inputs()
    wanted = ops.linear_cross_entropy(*inputs)[0]
    slopes = gradients(wanted.sum(), inputs)
    spread = [torch.stack([t, t], -1)[..., 0] for t in (x.detach(), weight.detach(), bias.detach(), target)]
    turned = [x.detach().t().contiguous().t(), weight.detach().t().contiguous().t(), bias.detach(), target]
    for *tensors, ids in (spread, turned):
        again = (*(t.requires_grad_() for t in tensors), ids, *attributes)
        found = ops.linear_cross_entropy(*again)[0]
        close(found, wanted)
        close(gradients(found.sum(), again), slopes)


def test_unbacked_rows_are_not_guarded_on():
    x, weight, bias, target, *attributes = Case(rows=7).inputs()
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()

    def step(x, weight, bias, target, mask):
        x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
        rows = mask.nonzero()[:, 0]
        loss, _ = ops.linear_cross_entropy(x[rows], weight, bias, target[rows], *attributes)
        mean = ops.linear_cross_entropy_total(x[rows], weight, bias, target[rows], None, *attributes, True)
        return torch.autograd.grad(loss.sum() + mean, [x, weight, bias])

    arguments = tuple(t.detach() for t in (x, weight, bias, target, mask))
    module = _torch.make_fx(step, tracing_mode="symbolic")(*arguments)
    env = _torch.shape_env_of(module.graph)
    assert not env.deferred_runtime_asserts and not [g for g in _torch.new_guards(env, 0) if "u" in g]
    close(module(*arguments), step(*arguments))


# --- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [21, -1, 2**40])
def test_targets_out_of_range_raise(wrong):
    *tensors, target, scale, ignore, smoothing = Case().inputs()
    target[3] = wrong
    with pytest.raises(IndexError, match=f"row {wrong}, entry 3 of target, is out of range: there are 21"):
        ops.linear_cross_entropy(*tensors, target, scale, ignore, smoothing)
    with pytest.raises(IndexError, match=f"row {wrong}, entry 3 of target"):
        ops.linear_cross_entropy_total(*tensors, target, None, scale, ignore, smoothing, True)


X, W, B, T = torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(5), torch.zeros(3).long()


@pytest.mark.parametrize(
    "tensors",
    [
        (X.long(), W, B, T), (X[0], W, B, T), (X, W.double(), B, T), (X, W[:, :3], B, T), (X, W, B[:4], T),
        (X, W, B.half(), T), (X, W, W, T), (X, W, B, T.int()), (X, W, B, T[:2]), (X, W, B, T[None]),
        (X, W.to("meta"), B, T),
    ],
)  # fmt: skip
def test_bad_shapes_and_dtypes_raise_real_and_fake(tensors):
    for given_ in (tensors, _torch.fake_inputs(list(tensors))):
        with pytest.raises((ValueError, RuntimeError), match=r"linear_cross_entropy: |device"):
            ops.linear_cross_entropy(*given_, 1.0, -100, 0.0)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, NAN])
def test_smoothing_is_a_share(smoothing):
    with pytest.raises(ValueError, match="label_smoothing"):
        ops.linear_cross_entropy(X, W, B, T, 1.0, -100, smoothing)


def test_other_arguments_are_checked():
    with pytest.raises(ValueError, match="a mean is of losses without a share"):
        ops.linear_cross_entropy_total(X, W, B, T, torch.ones(3), 1.0, -100, 0.0, True)
    with pytest.raises(ValueError, match=r"share.shape\[0\]"):
        ops.linear_cross_entropy_total(X, W, B, T, torch.ones(2), 1.0, -100, 0.0, False)
    with pytest.raises(ValueError, match="one entry for each"):
        ops.linear_cross_entropy_ahead(X, W, B, T, None, 1.0, -100, 0.0, False, [True])
    with pytest.raises(ValueError, match=r"grad.shape\[0\]"):
        ops.linear_cross_entropy_backward(torch.ones(2), X, W, B, T, torch.ones(3), 1.0, -100, 0.0, [True] * 3)
    with pytest.raises(ValueError, match="`wanted` does not name"):
        x = X.clone().requires_grad_()
        ops.linear_cross_entropy_ahead(x, W, B, T, None, 1.0, -100, 0.0, False, [False] * 3)[0].backward()


def test_second_derivatives_are_refused():
    inputs = Case().inputs()
    loss = ops.linear_cross_entropy(*inputs)[0]
    (slope,) = torch.autograd.grad(loss.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        slope.sum().backward()


def test_any_number_of_threads_gives_the_same_bits_as_far_as_the_products_do():
    """Products are torch's own, and another number of threads may round them otherwise; here every one is exact."""
    size = 600
    x, weight = torch.eye(size).roll(3, 0) * 5, torch.eye(size).roll(1, 1) * 3
    bias, grad = (torch.randn(size, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    target = torch.arange(size) * 7 % size
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 7, 13):
            torch.set_num_threads(count)
            losses, log_sum = ops.linear_cross_entropy(x, weight, bias, target, 0.5, 3, 0.1)
            wanted = [True, True, False]
            back = ops.linear_cross_entropy_backward(grad, x, weight, bias, target, log_sum, 0.5, 3, 0.1, wanted)
            found.append([losses, log_sum, *back[:2]])
    finally:
        torch.set_num_threads(threads)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))
