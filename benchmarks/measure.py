"""Timing on a machine that is never quite quiet.

Ways of doing one thing take turns, and their order rotates from round to round, so that whatever else the machine does
hits all of them alike; a product of two matrices takes its turn too, and its best speed is the peak that the others are
measured against. Medians are what to read. On one thread the time is the processor time of the process, which does not
count the neighbours; on several threads it is the clock on the wall.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Ways = Mapping[str, Callable[[], Any]]
Samples = dict[str, Any]  # seconds per call, one entry a round: wall, user, system; or {"failed": why}

PEAK = "GEMM"
PEAK_SIZE = 768
SHORTEST = 0.02  # seconds that a sample should take at least; shorter calls are repeated

# glibc gives large blocks back to the system and takes them anew, page by page, in every step. Tuned, it keeps them.
MALLOC = {
    "tuned": {
        "MALLOC_MMAP_THRESHOLD_": str(2**33),
        "MALLOC_TRIM_THRESHOLD_": str(2**34),
        "MALLOC_TOP_PAD_": str(2**26),
    },
    "default": {},
}


@dataclass(frozen=True)
class Effort:
    """How often to measure: at least `rounds`, and on to `most` while `seconds` are not used up."""

    rounds: int = 5
    most: int = 15
    seconds: float = 3.0


# --- taking turns ------------------------------------------------------------------------------------


def take_turns(ways: Ways, effort: Effort, peak: bool = True, called_before: bool = False) -> dict[str, Samples]:
    """Samples of every way, the peak among them; a way that cannot run says why.

    A way that was never called before would compile, or find cold caches, in its first round: it gets a call ahead.
    """
    every = {PEAK: gemm(), **ways} if peak else dict(ways)
    found: dict[str, Samples] = {}
    for name, way in every.items():
        try:
            if not called_before:
                way()
            found[name] = first_sample(way)
        except Exception as error:
            found[name] = {"failed": first_line(error)}
    names = [name for name, samples in found.items() if "wall" in samples]
    gc.collect()
    began = time.perf_counter()
    for turn in range(1, effort.most):
        if turn >= effort.rounds and time.perf_counter() - began > effort.seconds:
            break
        for name in rotated(names, turn):
            for clock, seconds in sample(every[name], found[name]["calls"]).items():
                found[name][clock].append(seconds)
    return found


def first_sample(way: Callable[[], Any]) -> Samples:
    """Decides how many calls a sample of this way has."""
    once = sample(way, 1)
    calls = max(1, math.ceil(SHORTEST / once["wall"]))
    taken = once if calls == 1 else sample(way, calls)
    return {"calls": calls, **{clock: [seconds] for clock, seconds in taken.items()}}


def rotated(names: list[str], turn: int) -> list[str]:
    start = turn % len(names) if names else 0
    return names[start:] + names[:start]


def sample(way: Callable[[], Any], calls: int) -> dict[str, float]:
    """Seconds per call, by three clocks."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(calls):
        way()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    spent = {"wall": wall, "user": after.ru_utime - before.ru_utime, "system": after.ru_stime - before.ru_stime}
    return {clock: seconds / calls for clock, seconds in spent.items()}


def first_line(error: Exception) -> str:
    """What an error says, in a line for a table."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:200]


def gemm() -> Callable[[], Any]:
    a, b, c = (torch.randn(PEAK_SIZE, PEAK_SIZE) for _ in range(3))
    return lambda: torch.mm(a, b, out=c)


# --- reading samples ---------------------------------------------------------------------------------


def seconds(samples: Samples, threads: int) -> float | None:
    """The median; None for a way that did not run."""
    return statistics.median(each_round(samples, threads)) if "wall" in samples else None


def each_round(samples: Samples, threads: int) -> list[float]:
    if threads == 1:
        return [user + system for user, system in zip(samples["user"], samples["system"], strict=True)]
    return samples["wall"]


def system_share(samples: Samples) -> float:
    """Of processor time, how much the system took; most of it for pages that come and go."""
    user, system = statistics.median(samples["user"]), statistics.median(samples["system"])
    return system / max(user + system, 1e-12)


def peak_speed(ways: Mapping[str, Samples], threads: int) -> float:
    """FLOPs per second of the matrix product, in its best round: what disturbs it must not flatter the others."""
    return 2 * PEAK_SIZE**3 / min(each_round(ways[PEAK], threads))


# --- the machine -------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures, and nothing that names the machine."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()).strip() or "not glibc: the malloc settings have no effect",
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


class Neighbours:
    """Processor time that other processes take while this one measures."""

    def __init__(self) -> None:
        self._began = self._clocks()

    @staticmethod
    def _clocks() -> tuple[float, float] | None:
        """Seconds that all processors spent on somebody else, and seconds they had."""
        try:
            ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        except OSError:
            return None
        every, idle = sum(ticks) / os.sysconf("SC_CLK_TCK"), sum(ticks[3:5]) / os.sysconf("SC_CLK_TCK")
        return every - idle - processor_seconds(), every

    def share(self) -> float | None:
        """Of all processors; None where there is no /proc to ask."""
        now = self._clocks()
        if now is None or self._began is None:
            return None
        return max(0.0, (now[0] - self._began[0]) / max(now[1] - self._began[1], 1e-9))


def say(line: str) -> None:
    """Progress, apart from the results."""
    print(line, file=sys.stderr, flush=True)


# --- processor time of compiling ---------------------------------------------------------------------


def processor_seconds() -> float:
    """Of this process and all its descendants, alive or waited for: compilers run in both kinds."""
    try:
        return sum(_spent(pid) for pid in _family(os.getpid()))
    except OSError:  # no /proc to ask
        usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(u.ru_utime + u.ru_stime for u in usages)


def _stat(pid: int) -> list[str]:
    """Fields of /proc/pid/stat that follow the name of the command."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _family(root: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int(_stat(int(entry.name))[1])
            except OSError:  # gone meanwhile
                continue
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _spent(pid: int) -> float:
    try:
        own_and_waited_for = _stat(pid)[11:15]
    except OSError:
        return 0.0
    return sum(map(int, own_and_waited_for)) / os.sysconf("SC_CLK_TCK")
