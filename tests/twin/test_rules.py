"""Each rule of AscendC that the twin checks: broken in one small kernel, kept in its neighbour."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from turbogr_compile.kernels.cpu.call import Arguments, fields
from turbogr_compile.kernels.twin import device
from turbogr_compile.kernels.twin.build import TwinBuildError, kernels_from, library
from turbogr_compile.kernels.twin.launch import Report, TwinFault, launch

FOLDER = Path(__file__).parent / "kernels"

BROKEN = {
    "V after V": (1, "missing-sync"),
    "MTE3 after V": (3, "missing-sync"),
    "V after MTE2": (5, "missing-sync"),
    "MTE2 over what V reads": (6, "missing-sync"),
    "S after V": (7, "missing-sync"),
    "V after S": (9, "missing-sync"),
    "global memory read back": (11, "missing-sync"),
    "tail of a copy": (20, "copy-tail"),
    "misaligned copy": (21, "alignment"),
    "misaligned operand": (22, "alignment"),
    "copy past a buffer": (23, "out-of-bounds"),
    "copy past a tensor": (24, "out-of-bounds"),
    "copy past an allocation": (25, "out-of-bounds"),
    "too many blocks": (26, "copy-blocks"),
    "part of an element": (27, "copy-tail"),
    "too many lanes": (28, "mask"),
    "tensor never freed": (30, "queue-leak"),
    "no free buffer": (31, "queue-empty"),
    "queue too deep": (32, "queue-depth"),
    "dequeue of nothing": (33, "queue-order"),
    "tensor of another queue": (34, "queue-order"),
    "more than the unified buffer": (35, "ub-overflow"),
    "flag nobody waits for": (40, "unpaired-flag"),
    "wait nobody ends": (41, "unpaired-flag"),
    "flag set twice": (42, "unpaired-flag"),
    "event id out of range": (43, "event-id"),
    "atomic mode left on": (44, "atomic-left-on"),
    "atomic mode of another type": (45, "atomic-type"),
    "SyncAll in a vector-only kernel": (50, "sync-all-kernel-type"),
    "tail of a comparison": (51, "compare-tail"),
    "int32 compared by order": (52, "compare-mode"),
    "rounding left open": (53, "cast-mode"),
    "overlap in part": (54, "overlap"),
    "gather out of range": (55, "out-of-bounds"),
    "integer overflow": (62, "integer-overflow"),
    "chosen lane out of range": (64, "out-of-bounds"),
    "stale cache": (57, "stale-cache"),
    "other core's write": (100, "missing-sync"),
    "two cores write": (102, "missing-sync"),
    "sum read too early": (104, "missing-sync"),
    "a core that does not come": (105, "sync-all-missing"),
    "product read too early": (201, "missing-sync"),
    "tiling too large": (202, "matmul-tiling"),
    "product larger than its tiling": (203, "matmul-shape"),
    "transposed without saying": (204, "matmul-transpose"),
    "product nobody waits for": (205, "matmul-not-awaited"),
}
KEPT = (2, 4, 8, 10, 12, 58, 101, 103)


class Rules(Arguments):
    _fields_ = fields("", "which blocks mix")


def run(which: int, blocks: int = 3, x: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor, Report]:
    x = torch.arange(4096, dtype=torch.float32) if x is None else x
    y = torch.full((4096,), -7.0)
    with kernels_from(FOLDER):
        report = launch("rules", {}, [x, y], Rules(which, blocks, which >= 100), outputs=1)
    return x, y, report


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_reported_by_name(name: str):
    which, rule = BROKEN[name]
    with pytest.raises(TwinFault) as fault:
        run(which)
    assert fault.value.rule == rule, fault.value


@pytest.mark.parametrize("which", KEPT)
def test_the_same_kernel_with_the_rule_kept_runs(which: int):
    run(which, blocks=3 if which >= 100 else 1)


def test_a_kernel_that_keeps_all_rules_computes():
    x, y, _ = run(0)
    assert torch.equal(y[:768], (x[:256] + 1).repeat(3))
    assert (y[768:] == -7).all()


def test_what_is_not_written_is_poison():
    _, y, _ = run(56, blocks=1)
    assert y[:8].isnan().all()


def test_tails_of_padded_copies():
    _, y, _ = run(59, blocks=1)
    assert y[:16].tolist() == [5, 6, 7, 5, 5, 5, 5, 5, 5, 6, 7, -1, -1, -1, -1, -1]


def test_sums_do_not_wrap():
    _, y, _ = run(65, blocks=1)
    assert (y[:64].view(torch.int32) == 2**31 - 1).all()


def test_lanes_that_bits_choose():
    x, y, _ = run(63, blocks=1)
    lanes = torch.arange(128)
    others = torch.where(lanes % 8 >= 4, -2.0, -1.0)
    assert torch.equal(y[:128], torch.where(lanes % 2 == 0, x[:128], others))


@pytest.mark.parametrize(("which", "dtype"), [(60, torch.float16), (61, torch.bfloat16)])
def test_numbers_round_as_in_torch(which: int, dtype: torch.dtype):
    bits = torch.randint(-(2**31), 2**31, (16, 256), generator=torch.Generator().manual_seed(which))
    halfway = torch.arange(-512, 512) * 0x1000 + 0x38800000  # around the smallest normal half, ties included
    small = torch.arange(1024) * 0x800 + 0x33000000  # halves without a leading one
    bits = torch.cat([bits.flatten()[:2048], halfway, small]).to(torch.int32)
    x = bits.view(torch.float32)
    _, y, _ = run(which, 1, x)
    torch.testing.assert_close(y, x.to(dtype).float(), rtol=0, atol=0, equal_nan=True)


def test_additions_of_cores_meet():
    _, y, _ = run(103, blocks=5)
    assert (y[:64] == 6).all()


def test_products_and_their_cost():
    x, y, report = run(200, blocks=2)
    product = x[:256].view(16, 16).double() @ x[256:512].view(16, 16).double()
    for core in range(4):  # two vector cores of each block
        torch.testing.assert_close(y[core * 256 : (core + 1) * 256].view(16, 16).double(), product)
    totals = [core["totals"] for core in report.cores]
    assert len(totals) == 4
    assert all(t["macs"] == 16**3 and t["cube"] == 16**3 / 1024 for t in totals)


def test_pipes_overlap_unless_something_waits():
    """The time of a run is that of its longest chain, not the sum over pipes."""
    (core,) = run(0, blocks=1)[2].cores
    busy = core["busy"]
    # One row in, one addition, one row out: a chain, so their times add up.
    assert core["totals"]["finish"] >= busy["MTE2"] + busy["V"] + busy["MTE3"]
    assert busy["MTE2"] == pytest.approx(1024 / 110) and busy["V"] == 256 / 64 and busy["MTE3"] == 1024 / 64


# --- what AscendC does not have, or has not for these types, does not compile -----------------------------

NOT_THERE = {
    "arithmetic in bfloat16": ("Add(b, b, b, 64);", "does not take this type"),
    "conversion from half to bfloat16": ("Cast(b, h, RoundMode::CAST_NONE, 64);", "no conversion between these types"),
    "64-bit Duplicate": ("Duplicate(l, int64_t{0}, 8);", "16- and 32-bit types"),
    "a call that is not emulated": ("Sigmoid(f, f, 64);", "Sigmoid"),
    "a scalar of another type": ("Adds(h, h, 1.0, 64);", "no matching function"),
    "a barrier of the scalar pipe": ("PipeBarrier<PIPE_S>();", "no barrier of the scalar pipe"),
}


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_is_not_emulated_does_not_compile(name: str, tmp_path: Path):
    line, message = NOT_THERE[name]
    for part in ("common", "wrong/op_kernel", "wrong/test"):
        (tmp_path / part).mkdir(parents=True)
    (tmp_path / "wrong/test/wrong_main.cpp").write_text('#include "tikicpulib.h"\n')
    (tmp_path / "wrong/op_kernel/wrong.cpp").write_text(
        "using namespace AscendC;\n"
        "void wrong(LocalTensor<bfloat16_t> b, LocalTensor<half> h, LocalTensor<float> f, LocalTensor<int64_t> l) {\n"
        f"  {line}\n}}\n"
    )
    with pytest.raises(TwinBuildError, match=message), kernels_from(tmp_path):
        library("wrong", ())


def test_a_dtype_that_ascendc_lacks_is_named():
    with pytest.raises(ValueError, match=r"AscendC has no torch\.float64, which x is of"):
        library("gather_rows", [("X", torch.float64)])


def test_a_device_has_cores():
    with pytest.raises(ValueError, match="at least 1 vector core"), device(cores=0):
        pass
