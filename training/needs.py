"""What a run will need, by part, before anything of it is allocated; what the machine has; and what to change.

Parameters, their state and checkpoints are counted. What a compiled step keeps for its backward was measured once for
each model, in numbers per position (PER_LAYER, and what is beside the layers); padded eager's is counted as in
compare_memory. All histories are taken to be full: a batch with padding needs less.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from . import build
from .compiled import compiles_evaluation
from .config import Config
from .memory import eager_activations

PER_LAYER = {"hstu": 12.1, "sasrec": 16.1, "fuxi": 29.1}  # widths kept by a packed layer for its backward
BESIDE = 6.0  # widths kept by what is not a layer
EVALUATED = 4.0  # numbers of padded eager for each pair of positions, without gradients
SLOPES = 3.0  # numbers kept for each negative
GIB = 2**30
CONTAINER = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Needs:
    """Bytes of one process; `always` stays, of `moments` the largest is there at a time."""

    always: Mapping[str, float]
    moments: Mapping[str, float]
    disk: float  # of checkpoints: those that are kept, and one in the making

    @property
    def memory(self) -> float:
        return sum(self.always.values()) + max(self.moments.values())

    @property
    def largest(self) -> str:
        every = {**self.always, max(self.moments, key=self.moments.__getitem__): max(self.moments.values())}
        return max(every, key=every.__getitem__)


def needs(config: Config, catalogue: int, ranks: int = 1, keep: int = 2) -> Needs:
    with torch.device("meta"):
        count = build.parameters_of(build.recommender(config, catalogue))
    rows, width = -(-(catalogue + 1) // ranks), config.dim
    number = 2 if config.storage == "bf16" else 4
    positions = config.batch * config.max_len
    touched = min(catalogue, positions * (config.negatives + 2))
    kept = positions * ((config.layers * PER_LAYER[config.model] + BESIDE) * width + SLOPES * config.negatives) * 4.0
    always = {
        "item table": rows * width * 4.0,
        "a number for each of its rows": rows * 4.0,
        "dense parameters": count["dense"] * number,
        "their gradients and moments": count["dense"] * number * 3.0,
    }
    if "half" in config.features and ranks == 1:
        always["a copy of the table in FP16"] = rows * (width * 2.0 + 1)
    step = kept if config.backend == "turbogr" else eager_activations(config)
    moments = {"activations and gradients of rows": step + 2.0 * touched * width * 4}
    if config.evaluate_users:
        looked_at = config.batch * config.heads * config.max_len**2 * EVALUATED  # where it is not worth compiling
        encoding = 0.0 if compiles_evaluation(config) else looked_at * 4.0
        moments["an evaluation"] = encoding + 2 * config.evaluate_users * width * 4.0  # no scores are kept
    shared = (always["item table"] + always["a number for each of its rows"]) * ranks
    stored = shared + count["dense"] * number * 3  # which is alike on all ranks, and stored once
    return Needs(always, moments, stored * (keep + 1) if config.save_every else 0.0)


ADVICE = {
    "item table": "a smaller --dim, a larger --min-length, or several processes (torchrun), which share the table",
    "a copy of the table in FP16": "no feature half",
    "activations and gradients of rows": "a smaller --batch with --accumulate, a smaller --max-len, fewer --negatives",
    "an evaluation": "a smaller --batch, or --evaluate-users 0",
}
OTHERWISE = "--storage bf16, fewer --layers or a smaller --dim"


def available() -> float | None:
    """Bytes that this machine, or its container, can still give; None where nobody says."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable")))
        most = (CONTAINER / "memory.max").read_text().strip()
        if most != "max":
            # Files that were read are counted as used, and given up where memory is asked for.
            lines = (CONTAINER / "memory.stat").read_text().splitlines()
            files = next(float(line.split()[1]) for line in lines if line.startswith("inactive_file"))
            found.append(float(most) - float((CONTAINER / "memory.current").read_text()) + files)
    except (OSError, StopIteration, ValueError):
        pass
    return min(found) if found else None


def text_of(found: Needs, has: float | None, folder: Path, ranks: int = 1) -> str:
    """A line for each part, what it comes to, and what to change where it does not fit."""
    rows = [*found.always.items(), *found.moments.items()]
    lines = [f"{size / GIB:9.2f} GiB  {name}" for name, size in rows]
    each = f", for each of {ranks} processes," if ranks > 1 else ""
    there = "" if has is None else f" of {has / GIB:.2f} that there are"
    lines.append(f"{found.memory / GIB:9.2f} GiB  in memory{each}{there}")
    free = shutil.disk_usage(next(p for p in (folder, *folder.absolute().parents) if p.exists())).free
    if found.disk:
        lines.append(f"{found.disk / GIB:9.2f} GiB  of checkpoints, of {free / GIB:.2f} free")
    return "\n".join([*lines, *problems(found, has, free)])


def problems(found: Needs, has: float | None, free: float) -> list[str]:
    said = []
    if has is not None and found.memory > has:
        said.append(f"this does not fit: most is {found.largest}; try {ADVICE.get(found.largest, OTHERWISE)}")
    if found.disk > free:
        said.append("checkpoints do not fit: another --out, or --save-every 0")
    return said
