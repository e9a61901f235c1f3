"""Kernels broken on purpose, as people break them: the twin names what is wrong with each."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from turbogr_compile.kernels.twin import TwinFault, device
from turbogr_compile.kernels.twin.build import KERNELS, kernels_from

ops = torch.ops.turbogr


def gather() -> None:
    x = torch.arange(7 * 13, dtype=torch.float32).view(7, 13)
    rows = torch.tensor([3, 3, 0, 6, 1, 2, 5])
    assert torch.equal(ops.gather_rows(x, rows), x[rows])


def scatter() -> None:
    x = torch.ones(9, 13, dtype=torch.float16)
    assert ops.scatter_rows(x, torch.tensor([3, 3, 0, 6, 1, 2, 5, 3, 3]), 7)[3].eq(4).all()


def norm() -> None:
    x, gate = torch.randn(2, 5, 40).half()
    result, *_ = ops.norm_gate(x, gate, None, None, 1e-6)
    expected = torch.nn.functional.layer_norm(x.double(), (40,), eps=1e-6) * gate.double()
    torch.testing.assert_close(result.double(), expected, rtol=2e-3, atol=2e-3)


@dataclass(frozen=True)
class Fault:
    """In `file`, `old` becomes `new`; then `run` breaks `rule`."""

    run: Callable[[], None]
    file: str
    old: str
    new: str
    rule: str


GATHER, ROWS, SCATTER = "common/rows_gather.h", "common/rows_common.h", "common/rows_scatter.h"
FAULTS = {
    "a missing wait for the indices": Fault(
        gather, GATHER, "Fence<AscendC::HardEvent::MTE2_S>(pipe_);", "", "missing-sync"
    ),
    "a missing barrier of the vector pipe": Fault(
        scatter,
        SCATTER,
        "AscendC::PipeBarrier<PIPE_V>();\n    AscendC::Cast(rowFloat_, row_",
        "AscendC::Cast(rowFloat_, row_",
        "missing-sync",
    ),
    "a missing queue between load and store": Fault(
        gather,
        GATHER,
        "    queue_.EnQue(buffer);\n    buffer = queue_.template DeQue<T>();\n",
        "",
        "missing-sync",
    ),
    "a misaligned copy": Fault(gather, GATHER, "RoundUp(columns, kBlockBytes / sizeof(T));", "columns;", "alignment"),
    "an overflowing buffer": Fault(
        gather,
        GATHER,
        "InitBuffer(queue_, kGatherBuffers, kGatherBytes)",
        "InitBuffer(queue_, 4, 128)",
        "out-of-bounds",
    ),
    "more than there is": Fault(
        gather,
        GATHER,
        "InitBuffer(queue_, kGatherBuffers, kGatherBytes)",
        "InitBuffer(queue_, 4, 65536)",
        "ub-overflow",
    ),
    "a queue leak": Fault(gather, GATHER, "    queue_.FreeTensor(buffer);\n", "", "queue-leak"),
    "an unpaired flag": Fault(
        gather, ROWS, "AscendC::SetFlag<event>(id);\n", "AscendC::SetFlag<event>(id);\n" * 2, "unpaired-flag"
    ),
    "a flag nobody sets": Fault(gather, ROWS, "  AscendC::SetFlag<event>(id);\n", "", "unpaired-flag"),
    "a wrong tail": Fault(
        gather,
        GATHER,
        "AscendC::DataCopyPad(result_[(first + at) * tiling_.width + column], buffer,\n"
        "                         {static_cast<uint16_t>(rowCount), bytes, 0, 0, 0});",
        "AscendC::DataCopy(result_[(first + at) * tiling_.width + column], buffer,\n"
        "                      static_cast<uint32_t>(rowCount * columns));",
        "copy-tail",
    ),
    "a row too many": Fault(gather, ROWS, "{begin, begin + each + ", "{begin, begin + 1 + each + ", "out-of-bounds"),
}


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Path]:
    """A copy of the kernels, which the twin takes instead of the real ones."""
    copy = tmp_path / "ascendc"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("torch", "*.py", "__pycache__"))
    with kernels_from(copy):
        yield copy


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_copy_of_a_kernel_is_caught_by_name(name: str, sources: Path):
    fault = FAULTS[name]
    file = sources / fault.file
    text = file.read_text()
    assert fault.old in text, "the kernel has changed: break it in another place"
    file.write_text(text.replace(fault.old, fault.new))
    with pytest.raises(TwinFault) as caught, device(cores=2):
        fault.run()
    assert caught.value.rule == fault.rule, caught.value


@pytest.mark.parametrize("run", [gather, scatter, norm])
def test_the_unbroken_kernel_passes(run: Callable[[], None]):
    with device(cores=2) as twin:
        run()
    assert len(twin.ran) == 1
