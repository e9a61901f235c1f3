"""AscendC kernels of sampled softmax in the twin: forward, backward, and how they are dealt to cores."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from turbogr_compile.kernels import sampled_softmax as kernel
from turbogr_compile.kernels.twin import TwinFault, device, sampled_softmax
from turbogr_compile.kernels.twin.build import KERNELS, kernels_from
from turbogr_compile.kernels.twin.launch import reports

ops = torch.ops.turbogr
F16, BF16, F32, I32, I64 = torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.int64
INDEX = {F16: I64, BF16: I32, F32: I64}  # each pair is one compilation
TOLERANCE = {F16: 2e-3, BF16: 2e-2, F32: 1e-5}  # of the sum of magnitudes
LENGTHS = [0, 1, 15, 16, 17, 255, 256, 257]
RAGGED = ((3, 17), (0, 40), (16, 0), (0, 0), (1, 257), (33, 64))


@dataclass(frozen=True)
class Case:
    groups: tuple[tuple[int, int], ...] = RAGGED  # rows and negatives of each
    width: int = 32
    dtype: torch.dtype = F16
    ids: int = 0  # so many different ones; 0 for none
    scaled: bool = False
    scale: float = 0.3
    around: int = 0  # rows and negatives before the first group, and behind the last
    spread: float = 1.0  # of the numbers
    seed: int = 0

    def inputs(self) -> tuple[Any, ...]:
        random = torch.Generator().manual_seed(self.seed)

        def normal(rows: int) -> Tensor:
            return (self.spread * torch.randn(rows, self.width, generator=random)).to(self.dtype)

        sizes = [[group[side] for group in self.groups] for side in (0, 1)]
        rows, negatives = (sum(each) + 2 * self.around for each in sizes)
        bounds = [torch.tensor([self.around, *each]).cumsum(0).to(INDEX[self.dtype]) for each in sizes]
        ids = [torch.randint(self.ids, (n,), generator=random) if self.ids else None for n in (rows, negatives)]
        scales = 2.0 ** torch.randint(-3, 4, (len(self.groups),), generator=random) if self.scaled else None
        return normal(rows), normal(rows), normal(negatives), *bounds, *ids, scales, self.scale

    def grad(self) -> Tensor:
        rows = sum(group[0] for group in self.groups) + 2 * self.around
        return torch.randn(rows, generator=torch.Generator().manual_seed(self.seed + 1))


def wide(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers for the reference: rows in float64."""
    offsets = [x.long() for x in inputs[3:5]]
    return *(x.double() for x in inputs[:3]), *offsets, *inputs[5:]


def magnitudes(grad: Tensor, inputs: tuple[Any, ...]) -> list[Tensor]:
    """For each gradient, the sum of the magnitudes of what is added up."""
    a = kernel.Inputs(*wide(inputs))
    _, log_sum = kernel.sampled_softmax(*a)
    query, positive, negative = (torch.zeros_like(x) for x in a[:3])
    for group in kernel._groups(a):
        slope = (grad[group.rows].double() * a.scale).abs()
        shares = (group.logits() - log_sum[group.rows, None]).exp() * slope[:, None]
        own = torch.expm1(group.positive_logits() - log_sum[group.rows]).abs() * slope
        # The share of the positive is rounded before one is taken from it.
        positive[group.rows] = (own + 1e-3 * slope)[:, None] * group.query.abs()
        query[group.rows] = (own + 1e-3 * slope)[:, None] * group.positive.abs() + shares @ group.negative.abs()
        scaled = 1.0 if a.negative_scales is None else float(a.negative_scales[group.index])
        negative[group.negatives] = shares.t() @ group.query.abs() * scaled
    return [query, positive, negative]


def check_forward(case: Case, cores: int) -> Tensor:
    inputs = case.inputs()
    found = sampled_softmax.sampled_softmax(*inputs, cores=cores)
    exact = kernel.sampled_softmax(*wide(inputs))
    # Products are exact and sums are of floats, whatever the dtype: the error is that of the logits.
    size = float(exact[1].abs().max()) + 1.0 if exact[1].numel() else 1.0
    for a, b in zip(found, exact, strict=True):
        assert a.dtype == F32
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6 * size)
    return found[1]


def check_backward(case: Case, cores: int, log_sum: Tensor) -> None:
    inputs, grad = case.inputs(), case.grad()
    found = sampled_softmax.sampled_softmax_backward(grad, log_sum, *inputs, [True] * 3, cores=cores)
    exact = wide(inputs)
    top = kernel.sampled_softmax(*exact)[1]
    wanted = kernel.sampled_softmax_backward(grad, top, *exact, [True] * 3)
    # An exponential has the relative error that its argument has in absolute terms.
    tolerance = TOLERANCE[case.dtype] + (1e-6 * float(top.abs().max()) if top.numel() else 0.0)
    floor = 1e-7 if case.dtype == F16 else 1e-12  # half of what the smallest halves are apart
    for a, b, size in zip(found, wanted, magnitudes(grad, inputs), strict=True):
        assert a.dtype == case.dtype
        assert ((a.double() - b).abs() <= tolerance * size + floor).all()


def check(case: Case, cores: int) -> None:
    check_backward(case, cores, check_forward(case, cores))


# --- against the reference ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize(
    "width, cores, ids, scaled",
    [(16, 1, 0, False), (32, 2, 40, False), (48, 20, 0, True), (64, 40, 40, True), (128, 48, 300, False)],
)
def test_ragged_groups(dtype, width, cores, ids, scaled):
    check(Case(RAGGED, width, dtype, ids, scaled, seed=width), cores)


@pytest.mark.parametrize("dtype, cores", [(F16, 20), (BF16, 2), (F32, 40)])
@pytest.mark.parametrize("reverse", [False, True])
def test_lengths(dtype, cores, reverse):
    """Empty groups first, in the middle and last."""
    lengths = [*LENGTHS, 0]
    groups = tuple(zip(lengths, lengths[3:] + lengths[:3], strict=True))
    check(Case(groups[::-1] if reverse else groups, 16, dtype, ids=500, scaled=True), cores)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("width", [80, 112, 512])
def test_other_widths(dtype, width):
    check(Case(((40, 70), (5, 9)), width, dtype, scale=0.1), 2)


@pytest.mark.parametrize("cores", [1, 4])
def test_blocks_and_tiles_of_all_sizes(cores):
    """One core takes blocks of 128 rows; negatives fill more than one tile, and so do rows for negatives."""
    check(Case(((300, 700), (131, 5), (2, 1100)), 16, F16, ids=900), cores)


@pytest.mark.parametrize("negatives", [1, 40])
def test_more_groups_than_are_looked_at_together(negatives):
    """A group for each row, as with negatives per position."""
    check(Case(((1, negatives),) * 300, 16, BF16, ids=9), 40)


@pytest.mark.parametrize("dtype", [F16, F32])
def test_rows_and_negatives_in_no_group(dtype):
    check(Case(RAGGED, 48, dtype, ids=20, around=37), 6)
    check(Case((), 16, dtype, around=3), 2)


def test_nothing_at_all():
    for groups in ((), ((0, 0),), ((0, 5),), ((5, 0),)):
        check(Case(groups, 16, F16), 40)


def test_without_negatives_there_is_nothing_to_lose():
    for groups, ids in ((((40, 0),), 0), (((40, 300),), 1)):  # none at all, or each a hit
        inputs = Case(groups, 64, F16, ids).inputs()
        loss, log_sum = sampled_softmax.sampled_softmax(*inputs, cores=3)
        assert (loss == 0).all()
        grads = sampled_softmax.sampled_softmax_backward(torch.ones(40), log_sum, *inputs, [True] * 3, cores=3)
        assert all((g == 0).all() for g in grads)


def test_large_ids_are_told_apart():
    """Above 2^24 a float would confuse neighbours."""
    inputs = list(Case(((5, 300),), 16, F32).inputs())
    inputs[5] = torch.arange(5) + 2**31 - 300
    inputs[6] = torch.arange(300) + 2**31 - 300
    found = sampled_softmax.sampled_softmax(*inputs, cores=2)[0]
    torch.testing.assert_close(found.double(), kernel.sampled_softmax(*wide(tuple(inputs)))[0], rtol=1e-5, atol=1e-5)


# --- numbers that are not ordinary -------------------------------------------------------------------


@pytest.mark.parametrize("dtype, spread", [(F16, 30.0), (F32, 100.0), (F16, 1e-3), (BF16, 1e-12)])
def test_logits_of_all_magnitudes(dtype, spread):
    check(Case(RAGGED, 32, dtype, ids=60, spread=spread, scale=1.0), 4)


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e6])
def test_small_gradients_do_not_fade_in_fp16(size):
    """As after a mean over many rows; what the result cannot hold is not the kernel's to lose."""
    case = Case(((60, 500),), 64, F16)
    inputs = case.inputs()
    scales = torch.tensor([2.0**7 if size < 1 else 2.0**-7])
    inputs = (*inputs[:7], scales, 2.0**-9 if size < 1 else 0.1)
    exact = wide(inputs)
    grad, log_sum = case.grad() * size, kernel.sampled_softmax(*exact)[1]
    found = sampled_softmax.sampled_softmax_backward(grad, log_sum.float(), *inputs, [False, False, True], cores=2)[2]
    wanted = kernel.sampled_softmax_backward(grad, log_sum, *exact, [False, False, True])[2]
    bound = TOLERANCE[F16] * magnitudes(grad, inputs)[2] + 1e-7
    assert ((found.double() - wanted).abs() <= bound)[wanted.abs() < 6e4].all()


def test_rows_divided_by_a_power_of_two_do_not_overflow():
    """Logits of fp32 rows beyond the range of fp16, from fp16 rows and one scale."""
    query, positive, negative, *rest = Case(((20, 90),), 32, F32, spread=1.0).inputs()
    negative = negative * 1e5
    positive = (positive / 64).half()
    divided = (negative / 2.0**9).half()
    inputs = (query.half(), positive, divided, *rest[:4], torch.tensor([2.0**9]), 1e-5)
    assert divided.isfinite().all() and not negative.half().isfinite().all()
    found = sampled_softmax.sampled_softmax(*inputs, cores=2)[0]
    exact = kernel.sampled_softmax(query.double(), positive.double(), negative.double(), *rest[:4], None, 1e-5)[0]
    torch.testing.assert_close(found.double(), exact, rtol=2e-3, atol=2e-3)


def test_bad_rows_spoil_their_own_group_only():
    case = Case(((4, 20), (5, 30)), 16, F16)
    inputs = case.inputs()
    inputs[0][2] = torch.nan
    loss, log_sum = sampled_softmax.sampled_softmax(*inputs, cores=2)
    assert loss.isnan().nonzero()[:, 0].tolist() == [2]
    query, positive, negative = sampled_softmax.sampled_softmax_backward(
        case.grad(), log_sum, *inputs, [True] * 3, cores=2
    )
    assert query.isnan().any(1).nonzero()[:, 0].tolist() == positive.isnan().any(1).nonzero()[:, 0].tolist() == [2]
    assert negative[:20].isnan().all() and negative[20:].isfinite().all()


# --- cores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_cores_change_no_bit(dtype):
    case = Case(((150, 600), (0, 9), (40, 0), (1, 300), (90, 70)), 32, dtype, ids=200, scaled=True, around=2)
    inputs, found = case.inputs(), []
    for cores in (1, 2, 20, 40, 48):
        loss, log_sum = sampled_softmax.sampled_softmax(*inputs, cores=cores)
        grads = sampled_softmax.sampled_softmax_backward(case.grad(), log_sum, *inputs, [True] * 3, cores=cores)
        found.append((loss, log_sum, *grads))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_cores_have_equal_shares_of_ragged_groups():
    """One group has most of the work: its rows are shared out, too."""
    random = torch.Generator().manual_seed(0)
    lengths = [int(x) + 1 for x in 12 * torch.randn(60, generator=random).exp()]
    groups = tuple((n, 4 * n) for n in (*lengths, 400))
    with reports() as seen:
        sampled_softmax.sampled_softmax(*Case(groups, 16).inputs(), cores=40)
    cycles = [core["busy"]["V"] for core in seen[0].cores]
    assert len(cycles) == 40 and max(cycles) < 1.1 * sum(cycles) / 40


@pytest.mark.parametrize("wanted", [[True, False, False], [False, True, False], [False, False, True], [False] * 3])
def test_only_wanted_gradients_are_made(wanted):
    case = Case(RAGGED, 48, F16, ids=30)
    inputs, grad = case.inputs(), case.grad()
    _, log_sum = sampled_softmax.sampled_softmax(*inputs, cores=2)
    every = sampled_softmax.sampled_softmax_backward(grad, log_sum, *inputs, [True] * 3, cores=2)
    some = sampled_softmax.sampled_softmax_backward(grad, log_sum, *inputs, wanted, cores=2)
    for a, b, want in zip(some, every, wanted, strict=True):
        assert torch.equal(a, b) if want else a.shape == (0,)


# --- as a device -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F16, F32])
def test_autograd_goes_through_the_kernels(dtype):
    case = Case(RAGGED, 32, dtype, ids=50, scaled=True)
    inputs = case.inputs()
    offsets = [x.long() for x in inputs[3:5]]
    grads = []
    for on_device in (True, False):
        leaves = [x.clone().requires_grad_() for x in inputs[:3]]
        if on_device:
            with device(cores=8) as twin:
                (ops.sampled_softmax(*leaves, *offsets, *inputs[5:])[0] * case.grad()).sum().backward()
            assert twin.ran == ["sampled_softmax", "sampled_softmax_backward"]
        else:
            (ops.sampled_softmax(*leaves, *offsets, *inputs[5:])[0] * case.grad()).sum().backward()
        grads.append([x.grad for x in leaves])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_strides_do_not_matter():
    inputs = Case(RAGGED, 32, F16, ids=50).inputs()
    wanted = sampled_softmax.sampled_softmax(*inputs, cores=2)
    spread = [torch.stack([x, x], -1)[..., 0] if isinstance(x, Tensor) else x for x in inputs]
    assert all(map(torch.equal, sampled_softmax.sampled_softmax(*spread, cores=2), wanted))


def test_what_the_kernel_does_not_take_is_said():
    for case, message in (
        (Case(width=24), "rows of 24, and the kernel takes multiples of 16 up to 512"),
        (Case(width=528), "rows of 528"),
    ):
        with pytest.raises(ValueError, match=message):
            sampled_softmax.sampled_softmax(*case.inputs(), cores=2)
    inputs = Case().inputs()
    with pytest.raises(ValueError, match=r"no AscendC kernel for torch\.float64"):
        sampled_softmax.sampled_softmax(*wide(inputs), cores=2)
    with pytest.raises(ValueError, match="offsets of"):
        sampled_softmax.sampled_softmax(*inputs[:4], inputs[4].int(), *inputs[5:], cores=2)


def changed(folder: Path, file: str, before: str, after: str) -> Path:
    """A copy of the kernels in which one text is another."""
    for part in ("common", "sampled_softmax"):
        shutil.copytree(KERNELS / part, folder / part)
    text = (folder / file).read_text()
    assert text.count(before) == 1
    (folder / file).write_text(text.replace(before, after))
    return folder


def test_a_slot_that_is_overwritten_too_early_is_found(tmp_path):
    """Without the flag before a product, the cube may overwrite logits that are still being loaded."""
    source = "sampled_softmax/op_kernel/sampled_softmax_kernel.h"
    broken = changed(tmp_path, source, "    Await<HardEvent::MTE2_MTE3>(pipe_);\n", "")
    inputs = Case(((8, 2000),), 16, F16).inputs()
    with kernels_from(broken), pytest.raises(TwinFault) as fault:
        sampled_softmax.sampled_softmax(*inputs, cores=2)
    assert fault.value.rule == "missing-sync"


def test_no_row_is_lost_where_sums_of_costs_are_rounded(tmp_path):
    """As with more rows than an emulation can have: the sum of a chunk of groups falls short of its rows' costs."""
    before, after = "static_cast<int64_t>(result.GetValue(0))", "static_cast<int64_t>(result.GetValue(0) * 0.97f)"
    with kernels_from(changed(tmp_path, "common/group_walk.h", before, after)):
        for cores in (2, 7, 40, 48):
            check_forward(Case(((1, 3), (2, 5), (0, 1)) * 150, 16, F16), cores)
