"""AscendC kernels of norm_gate in the twin, forward and backward, against F.layer_norm times the gate."""

from __future__ import annotations

import shutil
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr_compile.kernels.twin import TwinFault, device, norm_gate
from turbogr_compile.kernels.twin.build import KERNELS, kernels_from
from turbogr_compile.kernels.twin.launch import reports

ops = torch.ops.turbogr
CORES = [1, 2, 20, 40, 48]
LENGTHS = [0, 1, 15, 16, 17, 255, 256, 257]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# Half a unit in the last place and a little, of what rounds once at the end; of the magnitudes that add up.
TOLERANCE = {F16: 5.5e-4, BF16: 4.3e-3, F32: 1e-6}
ALL = [True] * 4
EPS = 1e-5


def numbers(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(*shape: int, dtype: torch.dtype = F32, parts=(True, True), vectors: torch.dtype | None = None):
    """x, gate, weight, bias."""
    own = vectors or dtype
    pairs = enumerate(parts, 2)
    given = [numbers(shape[-1], dtype=own, seed=seed) if part else None for seed, part in pairs]
    return [(numbers(*shape) + 1).to(dtype), numbers(*shape, dtype=dtype, seed=1), *given]


def doubles(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.double() for x in tensors]


def assert_near(found: Tensor, exact: Tensor, size: Tensor | float, dtype: torch.dtype) -> None:
    """Within the tolerance of the value and of `size`, which bounds what was added up in float32."""
    assert found.dtype == dtype and found.shape == exact.shape
    info = torch.finfo(dtype)
    bound = TOLERANCE[dtype] * exact.abs() + TOLERANCE[F32] * size + info.smallest_normal * info.eps
    assert ((found.double() - exact).abs() <= bound).all()


def forward_and_backward(a: list, cores: int, wanted: list[bool] = ALL) -> list[Tensor]:
    """Three results and four gradients, of kernels; the gradient of the result is that of `numbers`."""
    forward = norm_gate.norm_gate(*a, EPS, cores=cores)
    grad = numbers(*a[0].shape, dtype=a[0].dtype, seed=9)
    backward = norm_gate.norm_gate_backward(grad, *a, *forward[1:], wanted, cores=cores)
    return [*forward, *backward]


def check(a: list, cores: int, wanted: list[bool] = ALL) -> None:
    """All that the kernels return, against float64 on the same numbers."""
    result, mean, rstd, *slopes = forward_and_backward(a, cores, wanted)
    x, gate, weight, bias = (None if v is None else v.requires_grad_() for v in doubles(*a))
    width, dtype = x.shape[-1], a[0].dtype
    layer = F.layer_norm(x, (width,), weight, bias, EPS)
    grad = numbers(*x.shape, dtype=dtype, seed=9).double()
    given = [v for v in (x, gate, weight, bias) if v is not None]
    exact = iter(torch.autograd.grad(layer * gate, given, grad))

    with torch.no_grad():
        deviation = (x.var(-1, unbiased=False) + EPS).sqrt() if x.numel() else x.sum(-1)
        assert_near(mean, x.mean(-1), x.abs().mean(-1), F32)
        assert_near(rstd, 1 / deviation, 4 / deviation, F32)
        large = 1 if weight is None else weight.abs().max()
        stretch = (x.abs().amax(-1, keepdim=True) if x.numel() else 1) / deviation[..., None]  # what a row's mean costs
        normal = 1 + F.layer_norm(x, (width,), None, None, EPS).abs() + stretch
        assert_near(result, layer * gate, 4 * large * normal * gate.abs(), dtype)
        slope = grad.abs() * gate.abs()
        inner = slope * large
        most = inner.amax(-1, keepdim=True) if inner.numel() else 1
        sizes = [
            4 * (inner + most * normal * stretch) / deviation[..., None],
            4 * large * normal * grad.abs(),
            4 * (slope * normal).reshape(-1, width).sum(0),
            4 * slope.reshape(-1, width).sum(0),
        ]
    for tensor, found, size, want in zip(a, slopes, sizes, wanted, strict=True):
        value = None if tensor is None else next(exact)
        if tensor is None or not want:
            assert found.numel() == 0
        else:
            assert_near(found, value, size, tensor.dtype)


# --- equal to eager ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, width, dtype, cores",
    [
        *((rows, 64, F16, cores) for rows, cores in zip(LENGTHS, CORES * 2, strict=False)),
        *((rows, 48, BF16, cores) for rows, cores in zip(LENGTHS, CORES[2:] * 4, strict=False)),
        *((rows, 16, F32, cores) for rows, cores in zip(LENGTHS, CORES[::-1] * 2, strict=False)),
        (257, 128, F16, 48),
        (257, 128, F32, 1),
        (256, 32, BF16, 20),
        (1000, 96, F16, 40),
    ],
)
def test_equals_eager(rows, width, dtype, cores):
    check(inputs(rows, width, dtype=dtype), cores)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("width", [1, 2, 7, 15, 17, 63, 65, 127, 129, 191, 200, 511, 1000])
def test_any_width(width, dtype):
    check(inputs(19, width, dtype=dtype), 2)


@pytest.mark.parametrize(
    "width, dtype",
    # 2040 is the last that an instruction spans; wider rows go in blocks.
    [
        (2040, F16),
        (2040, F32),
        (2041, F16),
        (2048, F32),
        (2056, BF16),
        (4099, F16),
        (8191, BF16),
        (8192, F16),
        (8192, F32),
    ],
)
def test_rows_in_blocks_of_columns(width, dtype):
    check(inputs(5, width, dtype=dtype), 2)


@pytest.mark.parametrize("parts", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("width, dtype", [(70, F16), (70, F32), (2100, F32), (2100, F16)])
def test_without_weight_or_bias(parts, width, dtype):
    check(inputs(9, width, dtype=dtype, parts=parts), 3)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("width", [24, 100, 2100, 8192])
def test_weights_in_float32(width, dtype):
    check(inputs(6, width, dtype=dtype, vectors=F32), 2)


def test_weight_and_bias_of_two_dtypes():
    x, gate, weight, bias = inputs(6, 24, dtype=F16)
    check([x, gate, weight, bias.float()], 2)


@pytest.mark.parametrize("shape", [(40,), (2, 3, 40), (0, 3, 40)])
def test_leading_dims(shape):
    check(inputs(*shape), 20)


def test_what_is_not_contiguous():
    a = inputs(40, 30)
    a[:2] = (x.t().contiguous().t() for x in a[:2])
    check(a, 2)


def test_a_large_mean_does_not_drown_the_deviation():
    x = numbers(3, 256) + 1e4
    one = torch.ones_like(x)
    found = norm_gate.norm_gate(x, one, None, None, EPS, cores=1)[0]
    exact = F.layer_norm(x.double(), (256,), eps=EPS)
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)


def test_nan_and_infinity_stay_in_their_row():
    a = inputs(4, 70)
    a[0][1, 3], a[0][2, 69] = float("nan"), float("inf")
    result, mean, rstd = norm_gate.norm_gate(*a, EPS, cores=1)
    assert result[1:3].isnan().all() and not result[::3].isnan().any()
    slopes = norm_gate.norm_gate_backward(a[1], *a, mean, rstd, ALL, cores=1)
    assert slopes[0][1:3].isnan().all() and not slopes[0][::3].isnan().any()


# --- gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [list(bits) for bits in product([True, False], repeat=4) if any(bits)])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_only_what_is_wanted(wanted, dtype):
    check(inputs(9, 70, dtype=dtype), 3, wanted)
    check(inputs(3, 2070, dtype=dtype, parts=(False, True)), 3, wanted)


def test_work_that_nobody_wants_is_not_done():
    a = inputs(64, 64, dtype=F16)
    _, mean, rstd = norm_gate.norm_gate(*a, EPS, cores=1)

    def moved_and_done(*wanted: bool) -> tuple[float, float]:
        with reports() as seen:
            norm_gate.norm_gate_backward(a[1], *a, mean, rstd, list(wanted), cores=1)
        (core,) = seen[0].cores
        return core["bytes"]["memory to UB"], core["busy"]["V"]

    size = 64 * 64 * 2
    everything, gate, bias = (moved_and_done(*w) for w in (ALL, (False, True, False, False), (False,) * 3 + (True,)))
    assert everything[0] > 3 * size and 2 * size < gate[0] < 2.2 * size and 2 * size <= bias[0] < 2.2 * size
    assert everything[1] > 2 * gate[1] > 2 * bias[1]


def test_nothing_wanted_is_nothing():
    a = inputs(9, 16)
    assert all(x.numel() == 0 for x in forward_and_backward(a, 2, [False] * 4)[3:])


def test_no_rows_have_no_slope():
    _, _, weight, bias = forward_and_backward(inputs(0, 100, dtype=F16), 40)[3:]
    assert weight.tolist() == bias.tolist() == [0.0] * 100


def test_many_rows_add_up_exactly():
    """Sums over rows go through tiles and chunks: none is lost, and none counted twice."""
    rows = 6001
    x = torch.tensor([1.0, -1.0]).repeat(rows, 1)
    gate, one = torch.ones(rows, 2), torch.ones(2)
    _, mean, rstd = norm_gate.norm_gate(x, gate, one, one, 0.0, cores=3)
    _, _, weight, bias = norm_gate.norm_gate_backward(gate, x, gate, one, one, mean, rstd, ALL, cores=3)
    assert weight.tolist() == [rows, -rows] and bias.tolist() == [rows, rows]


@pytest.mark.parametrize("parts", [(True, True), (False, False)])
def test_autograd_through_the_twin(parts):
    a = [None if x is None else x.requires_grad_() for x in inputs(2, 37, 50, parts=parts)]
    given = [x for x in a if x is not None]
    with device(cores=20) as twin:
        result, *_ = ops.norm_gate(*a, EPS)
        found = torch.autograd.grad(result.square().sum(), given)
    assert twin.ran == ["norm_gate", "norm_gate_backward"]
    exact = [None if x is None else x.detach().double().requires_grad_() for x in a]
    x, gate, weight, bias = exact
    wanted = F.layer_norm(x, (50,), weight, bias, EPS) * gate
    slopes = torch.autograd.grad(wanted.square().sum(), [x for x in exact if x is not None])
    for one, other in zip([result, *found], [wanted, *slopes], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5 * float(other.detach().abs().max()))


# --- cores and time ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, width, dtype", [(257, 80, F16), (300, 33, F32), (50, 2100, BF16)])
def test_cores_change_no_bit(rows, width, dtype):
    a = inputs(rows, width, dtype=dtype)
    first, *others = (forward_and_backward(a, cores) for cores in CORES)
    for other in others:
        assert all(torch.equal(x, y) for x, y in zip(first, other, strict=True))


def test_vector_cycles_are_those_that_the_readmes_count():
    """Passes of 64 numbers per cycle, at a width where nothing is left over; a tenth is for numbers of rows."""
    rows, width, cores = 960, 512, 4
    a = inputs(rows, width, dtype=F16)
    with reports() as seen:
        forward_and_backward(a, cores)
    for report, passes in zip(seen, (11, 22), strict=True):
        cycles = sum(core["busy"]["V"] for core in report.cores) * 64 / (rows * width)
        assert 0.95 * passes < cycles < 1.1 * passes


# --- faults ------------------------------------------------------------------------------------------


def test_too_wide_is_said():
    a = inputs(1, 8193)
    with pytest.raises(ValueError, match="rows of 8193 numbers, and the AscendC kernel takes 1 to 8192"):
        norm_gate.norm_gate(*a, EPS, cores=1)


def test_double_is_said():
    with pytest.raises(ValueError, match="there is no AscendC kernel for torch"):
        norm_gate.norm_gate(*doubles(*inputs(1, 8)), EPS, cores=1)


BROKEN = {
    "no barrier": ("common/row_norm_panel.h", "AscendC::PipeBarrier<PIPE_V>();", "", "missing-sync"),
    "no SyncAll": (
        "norm_gate_backward/op_kernel/norm_gate_backward_kernel.h",
        "AscendC::SyncAll();",
        "",
        "missing-sync",
    ),
    "copies of whole blocks": ("common/row_norm_panel.h", "panel.pitch == width", "true", "out-of-bounds"),
    "statistics never freed": (
        "norm_gate/op_kernel/norm_gate_kernel.h",
        "statQueue_.FreeTensor(stats);",
        "",
        "queue-leak",
    ),
}


@pytest.mark.parametrize("path, old, new, rule", BROKEN.values(), ids=BROKEN)
def test_broken_copies_are_caught(tmp_path, path, old, new, rule):
    for part in ("common", "norm_gate", "norm_gate_backward"):
        shutil.copytree(KERNELS / part, tmp_path / part)
    source = (tmp_path / path).read_text()
    assert old in source
    (tmp_path / path).write_text(source.replace(old, new))
    with pytest.raises(TwinFault) as caught, kernels_from(tmp_path):
        forward_and_backward(inputs(300, 67), 3)
    assert caught.value.rule == rule
