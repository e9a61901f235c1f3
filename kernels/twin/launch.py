"""One launch of an AscendC kernel in the twin: tensors to global memory, tiling, run, results back."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cpu.call import Arguments
from .build import library

TILING_BYTES = 4096


WATCHED_BYTES = 16 << 20


class TwinFault(RuntimeError):
    """A rule of AscendC that a kernel broke; `rule` is its name."""

    def __init__(self, op: str, text: str) -> None:
        super().__init__(f"{op}: {text}")
        self.op, self.rule = op, text.partition(":")[0]


class Launch(ctypes.Structure):
    """What the tiling function says; see kernels/ascendc/common/launch.h."""

    _fields_ = [("blocks", ctypes.c_int64), ("workspace", ctypes.c_int64), ("tiling_bytes", ctypes.c_int64)]


class Report(NamedTuple):
    """What a launch did: one dict of counters for each vector core; see cost.py."""

    op: str
    blocks: int
    workspace: int
    cores: list[dict[str, dict[str, float]]]


_listening: list[list[Report]] = []


@contextmanager
def reports() -> Iterator[list[Report]]:
    """Reports of all launches in here, in order."""
    seen: list[Report] = []
    _listening.append(seen)
    try:
        yield seen
    finally:
        _listening.remove(seen)


def launch(
    op: str,
    dtypes: Mapping[str, torch.dtype],
    tensors: Sequence[Tensor | None],
    problem: Arguments,
    *,
    outputs: int | None = None,
    watched: bool | None = None,
) -> Report:
    """Runs kernels/ascendc/<op> over tensors in the order of its entry: inputs, then outputs, which are overwritten.

    The last `outputs` tensors are written back, all if it is None. `watched` keeps a record of who touches global
    memory, which finds missing synchronisation and costs twenty times the memory: unless said, where that is small.
    """
    if watched is None:
        watched = sum(x.numel() * x.element_size() for x in tensors if x is not None) <= WATCHED_BYTES
    compiled = library(op, dtypes.items())
    tiling = (ctypes.c_uint8 * TILING_BYTES)()
    plan = Launch()
    getattr(compiled, f"tile_{op}")(ctypes.byref(problem), ctypes.byref(tiling), ctypes.byref(plan))
    if not 0 < plan.tiling_bytes <= TILING_BYTES:
        raise ValueError(f"{op}: the tiling struct has {plan.tiling_bytes} bytes, and {TILING_BYTES} fit")
    back = len(tensors) if outputs is None else outputs
    with ExitStack() as stack:
        memory = Memory(op, compiled, stack, watched)
        addresses = [memory.take(x, copy=True) for x in tensors]
        for x in tensors[len(tensors) - back :]:
            if x is not None and not x.is_contiguous():
                raise ValueError(f"{op}: an output must be contiguous")
        workspace = memory.allocate(max(plan.workspace, 32))
        place = memory.allocate(plan.tiling_bytes)
        ctypes.memmove(place, tiling, plan.tiling_bytes)
        pointers = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        run = ctypes.cast(getattr(compiled, f"run_{op}"), ctypes.c_void_p)
        compiled.twin_run.restype = ctypes.c_char_p
        error = compiled.twin_run(
            run, pointers, ctypes.c_void_p(workspace), ctypes.c_void_p(place), ctypes.c_uint32(plan.blocks)
        )
        if error:
            raise TwinFault(op, error.decode())
        for x, address in list(zip(tensors, addresses, strict=True))[len(tensors) - back :]:
            if x is not None and address is not None and x.numel():
                ctypes.memmove(x.data_ptr(), address, x.numel() * x.element_size())
        compiled.twin_report.restype = ctypes.c_char_p
        cores = json.loads(compiled.twin_report().decode())
        memory.check()
    report = Report(op, plan.blocks, plan.workspace, cores)
    for seen in _listening:
        seen.append(report)
    return report


class Memory:
    """Global memory of one launch; freed, and its red zones looked at, when the launch ends."""

    def __init__(self, op: str, compiled: Any, stack: ExitStack, watched: bool) -> None:
        self.op, self.compiled, self.watched = op, compiled, watched
        compiled.twin_allocate.restype = ctypes.c_void_p
        compiled.twin_free.restype = ctypes.c_char_p
        self.live: list[int] = []
        stack.callback(self.release)

    def allocate(self, count: int) -> int:
        address = int(self.compiled.twin_allocate(ctypes.c_int64(count), ctypes.c_int64(self.watched)))
        self.live.append(address)
        return address

    def take(self, x: Tensor | None, copy: bool) -> int | None:
        """The address of a copy of a tensor; None for no tensor."""
        if x is None:
            return None
        x = x.detach().contiguous()
        address = self.allocate(x.numel() * x.element_size())
        if copy and x.numel():
            ctypes.memmove(address, x.data_ptr(), x.numel() * x.element_size())
        return address

    def check(self) -> None:
        while self.live:
            error = self.compiled.twin_free(ctypes.c_void_p(self.live.pop()))
            if error:
                raise TwinFault(self.op, error.decode())

    def release(self) -> None:
        while self.live:
            self.compiled.twin_free(ctypes.c_void_p(self.live.pop()))
