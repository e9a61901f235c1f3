"""`turbogr cost`: what AscendC kernels would take on a device, projected from a run in the twin."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import OptionError, TurbogrError, did_you_mean
from .common.output import show

SUMMARY = "what the AscendC kernels would take on an NPU, projected from a run in the twin"

DTYPES = ("float16", "bfloat16", "float32")
NOTE = """\
Projected, not measured: no NPU has run this. Kernels were functionally emulated; instructions were counted and take the
documented time of Ascend 910B. Assumed: no cost of starting an instruction, a copy or a kernel; no bank conflicts; two
vector cores share a cube evenly; cores read by way of L2, and bytes used for the first time take their time at the
memory's bandwidth besides. MFU counts FLOPs that the result needs (a backward: twice its forward; causal pairs only),
over the fp16 peak of the cubes."""


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="which to run; all if none is named")
    command.add_argument("--soc", action="append", metavar="NAME", help="910B1 to 910B4; may be given several times")
    for name, kind, value, text in (
        ("sequences", int, 32, "sequences of the batch"),
        ("longest", int, 512, "most rows of a sequence; lengths have a heavy tail"),
        ("fill", float, 0.3, "share of the padded batch that is not padding"),
        ("heads", int, 4, "attention heads"),
        ("head-dim", int, 64, "width of a head; rows are heads times this wide"),
    ):
        command.add_argument(f"--{name}", type=kind, default=value, metavar="N", help=f"{text} (default {value})")
    command.add_argument("--dtype", default="float16", help=f"one of {', '.join(DTYPES)} (default float16)")


def run(options: argparse.Namespace) -> int:
    show(options, *_projected(options))
    return 0


def _projected(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Facts and figures, and the same as text."""
    import torch

    from ..kernels.cpu.toolchain import Unavailable
    from ..kernels.twin.cost import SOCS
    from ..kernels.twin.workloads import WORKLOADS, Batch, facts, projections

    names = _known(options.workloads, list(WORKLOADS), "workload") or list(WORKLOADS)
    socs = _known(options.soc or [], list(SOCS), "device") or list(SOCS)
    (dtype,) = _known([options.dtype], list(DTYPES), "dtype")
    for name in ("sequences", "longest", "heads", "head_dim"):
        if getattr(options, name) < 1:
            raise OptionError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}")
    if not 0.0 < options.fill <= 1.0:
        raise OptionError(f"--fill is a share, above 0 and at most 1, not {options.fill}")
    batch = Batch(
        options.sequences, options.longest, options.fill, options.heads, options.head_dim, getattr(torch, dtype)
    )
    try:
        found = list(projections(names, batch, socs))
    except Unavailable as error:
        raise TurbogrError(f"the twin compiles kernels, and {error}") from error
    data = {"batch": facts(batch), "projections": [{"workload": name, **p._asdict()} for name, p in found]}
    return data, _text(facts(batch), found)


def _known(asked: list[str], names: list[str], what: str) -> list[str]:
    for name in asked:
        if name not in names:
            raise OptionError(f"{name!r} is no {what}: {', '.join(names)}{did_you_mean(name, names)}")
    return asked


def _text(batch: dict[str, Any], found: list[Any]) -> str:
    from ..show.table import table

    head = (
        f"{batch['sequences']} sequences of up to {batch['longest']} rows, {batch['rows']} rows in all "
        f"(fill {batch['fill']:.2f}), {batch['heads']} heads of {batch['head_dim']}, {batch['dtype']}"
    )
    header = [
        "kernel",
        "device",
        "µs",
        "bound by",
        "vector",
        "load",
        "store",
        "cube",
        "imbalance",
        "MFU",
        "from memory",
    ]
    rows, last = [], ""
    for name, p in found:
        if name != last:
            rows.append([f"{name}:", *[""] * (len(header) - 1)])
            last = name
        share = [f"{p.busy[part] / p.cycles:.0%}" if p.cycles else "" for part in ("vector", "load", "store", "cube")]
        mfu = f"{p.mfu:.1%}" if p.mfu else "–"
        memory = f"{p.memory_bytes / 1e6:.1f} MB"
        rows.append([f"  {p.op}", p.soc, f"{p.microseconds:.1f}", p.bound, *share, f"{p.imbalance:.1%}", mfu, memory])
    return f"{head}\n\n{table(rows, header)}\n\n{NOTE}"
