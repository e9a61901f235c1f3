"""What a launch would take on a device, projected from what the twin counted. Projected, not measured.

Each core has a timeline: an instruction starts when its pipe is free and all that it waits for is complete, and takes
what the documented rates say (include/twin/rates.h). The assumptions:

- No cost of starting an instruction or a copy; no bank conflicts; copies reach the documented rate.
- The two vector cores of a block share the cube core evenly.
- Cores read by way of L2, at its rate. What a kernel touches first comes from memory, which the cores share: a launch
  takes at least as long as those bytes do at the memory's bandwidth, or at 32 bytes per cycle of each core.
- The time to launch a kernel is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .launch import Report

FROM_MEMORY = ("memory to UB", "memory to L1", "first written")
MEMORY_BYTES = 32  # that a core gets from memory in a cycle
PIPES = {"V": "vector", "MTE2": "load", "MTE3": "store", "cube": "cube"}


@dataclass(frozen=True)
class Soc:
    """A device, by the figures of CANN's platform files; `bandwidth` of its memory in bytes per second."""

    name: str
    cubes: int
    vectors: int
    megahertz: float
    bandwidth: float

    @property
    def peak(self) -> float:
        """FLOPs per second of the cubes in fp16 and bf16: the denominator of MFU."""
        return self.cubes * 4096 * 2 * self.megahertz * 1e6


TEBIBYTE = 2.0**40
SOCS = {
    soc.name: soc
    for soc in (
        Soc("910B1", 24, 48, 1850, 1.6 * TEBIBYTE),
        Soc("910B2", 24, 48, 1800, 1.6 * TEBIBYTE),
        Soc("910B3", 20, 40, 1800, 1.6 * TEBIBYTE),
        Soc("910B4", 20, 40, 1500, 0.8 * TEBIBYTE),
    )
}


class Projection(NamedTuple):
    """A launch on a device."""

    op: str
    soc: str
    microseconds: float
    bound: str  # what the time is made of: a pipe, memory, or waiting
    busy: dict[str, float]  # cycles of the busiest core, by pipe
    cycles: float  # of the core that ends last
    imbalance: float  # how much later than the average core the last one ends
    mfu: float
    memory_bytes: float
    macs: float


def project(report: Report, soc: Soc, flops: float = 0.0) -> Projection:
    """`flops` are those the result needs, without what a kernel computes twice or masks away."""
    if len(report.cores) > soc.vectors:
        raise ValueError(f"{report.op} ran on {len(report.cores)} vector cores, and {soc.name} has {soc.vectors}")
    finish = [core["totals"]["finish"] for core in report.cores]
    busy = {name: max(core["busy"][pipe] for core in report.cores) for pipe, name in PIPES.items()}
    cycles = max(finish)
    memory = sum(core["bytes"].get(path, 0.0) for core in report.cores for path in FROM_MEMORY)
    hertz = soc.megahertz * 1e6
    memory_seconds = memory / min(soc.bandwidth, MEMORY_BYTES * len(report.cores) * hertz)
    seconds = max(cycles / hertz, memory_seconds)
    return Projection(
        op=report.op,
        soc=soc.name,
        microseconds=seconds * 1e6,
        bound=_bound(busy, cycles, memory_seconds * hertz),
        busy=busy,
        cycles=cycles,
        imbalance=imbalance(report),
        mfu=flops / seconds / soc.peak if seconds else 0.0,
        memory_bytes=memory,
        macs=sum(core["totals"]["macs"] for core in report.cores),
    )


def _bound(busy: Mapping[str, float], cycles: float, memory_cycles: float) -> str:
    """The busiest part, or 'waiting' where no part is busy for most of the time."""
    parts = {**busy, "memory": memory_cycles}
    most = max(parts, key=lambda name: parts[name])
    return most if parts[most] >= 0.6 * max(cycles, memory_cycles) else "waiting"


def imbalance(report: Report) -> float:
    """How much more the core with most work has than the average one, by cycles of its busiest pipe."""
    work = [max(core["busy"][pipe] for pipe in PIPES) for core in report.cores]
    mean = sum(work) / len(work)
    return max(work) / mean - 1.0 if mean else 0.0
