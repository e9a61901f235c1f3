"""What padding costs a training step, and what is left of it once rows are packed: memory, arithmetic, time.

    python benchmarks/packing.py [--model hstu|timed|sasrec] [--batch 8] [--length 1024] [--fill 0.3] [--json FILE]

A step is forward, loss and backward. Each way of running it is measured in processes of its own, after two steps that
compile and warm up:

  peak      of all tensors that torch's allocator had alive during the step, above what was alive before it (parameters,
            inputs); from the profiler's record of every allocation. Exact and repeatable: it knows nothing of pages
            that the C library keeps, so it is the figure to compare.
  resident  high-water mark of the process's memory during a step, above its memory before; what the machine sees.
            Freed memory is handed back at once (fixed mmap threshold), or peaks of compiling would hide the step's.
  FLOPs     by the formulas of torch.utils.flop_counter, where ops are dispatched one by one.
  time      in one process, ways taking turns, medians.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import Effort, take_turns
from models import Recommender, SASRec, TimedRecommender, ragged
from report import aligned
from watching import Attentions

import turbogr_compile
from turbogr_compile.testing import Flops

MODELS = {"hstu": Recommender, "timed": TimedRecommender, "sasrec": SASRec}
WAYS: dict[str, dict[str, str] | None] = {
    "padded eager": None,
    "packed eager": {"target": "eager"},
    "packed aten": {"codegen": "aten"},
    "packed inductor": {"codegen": "inductor"},
}
MEGA = 2.0**20


def step_of(way: str, options: argparse.Namespace) -> tuple[Callable[[], float], Attentions]:
    torch.manual_seed(0)
    seen = Attentions()
    model = MODELS[options.model](options.items, options.dim, options.heads, options.layers, options.length)
    ids, times = ragged(options.batch, options.length, options.items, options.fill)
    inputs = (ids, times) if options.model == "timed" else (ids,)
    settings = WAYS[way]
    loss_of: Any = model.loss
    if settings is not None:
        loss_of = turbogr_compile.compile(model.loss, on_error="raise", instruments=(seen,), **settings)

    def step() -> float:
        loss = loss_of(*inputs)
        loss.backward()
        model.zero_grad(set_to_none=True)  # here, so that a step begins and ends with the same tensors alive
        return loss.item()

    return step, seen


# --- one way, in a process of its own ----------------------------------------------------------------


def allocation_peak(step: Callable[[], float]) -> int:
    """Bytes of tensors alive at once, above those alive before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        alive += event["args"]["Bytes"]
        peak = max(peak, alive)
    return peak


def resident(what: str) -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields[what].split()[0]) * 1024


def resident_peak(step: Callable[[], float]) -> int | None:
    """None where there is no /proc to ask."""
    forget = Path("/proc/self/clear_refs")
    if not forget.exists():
        return None
    ctypes.CDLL(None).malloc_trim(0)
    forget.write_text("5")  # the high-water mark starts again from here
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    step, seen = step_of(way, options)
    step()
    loss = step()
    gc.collect()
    found: dict[str, Any] = {"loss": loss, "jagged": seen.jagged, "resident": resident_peak(step)}
    found["peak"] = allocation_peak(step)
    if "inductor" not in way:
        with Flops() as flops:
            step()
        found["flops"] = flops.total
    return found


def measured_apart(way: str, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, *sys.argv, "--measure", way]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    out = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(out.splitlines()[-1])


def memory(ways: list[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    runs: dict[str, list[dict[str, Any]]] = {w: [] for w in ways}
    for _ in range(options.rounds):
        for way in ways:
            runs[way].append(measured_apart(way, options))
            print(f"  {way}: {runs[way][-1]}", file=sys.stderr)
    return {
        w: {k: statistics.median(r[k] for r in rs) if rs[0][k] is not None else None for k in rs[0]}
        for w, rs in runs.items()
    }


# --- all ways, in turns ------------------------------------------------------------------------------


def step_times(ways: list[str], options: argparse.Namespace) -> dict[str, list[float]]:
    effort = Effort(options.steps, options.steps)
    taken = take_turns({way: step_of(way, options)[0] for way in ways}, effort, peak=False)
    return {way: samples["wall"] for way, samples in taken.items()}


def table(found: dict[str, dict[str, Any]], times: dict[str, list[float]]) -> str:
    base = found["padded eager"]
    head = ["", "peak MB", "saved", "resident MB", "saved", "GFLOPs", "ratio", "step s", "ratio", "loss"]
    lines = [head]
    for way, f in found.items():
        shown = [way, f"{f['peak'] / MEGA:.0f}", f"{1 - f['peak'] / base['peak']:.1%}"]
        kept = f["resident"] is not None and base["resident"]
        shown += [f"{f['resident'] / MEGA:.0f}", f"{1 - f['resident'] / base['resident']:.1%}"] if kept else ["-", "-"]
        shown += [f"{f['flops'] / 1e9:.2f}", f"{f['flops'] / base['flops']:.2f}"] if "flops" in f else ["-", "-"]
        took = times.get(way)
        ratios = [a / b for a, b in zip(took, times["padded eager"], strict=True)] if took else []
        shown += [f"{statistics.median(took):.3f}", f"{statistics.median(ratios):.2f}"] if took else ["-", "-"]
        lines.append([*shown, f"{f['loss']:.6f}"])
    return "\n".join(aligned(lines))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", choices=MODELS, default="hstu")
    arguments.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments.add_argument("--batch", type=int, default=8)
    arguments.add_argument("--length", type=int, default=1024)
    arguments.add_argument("--fill", type=float, default=0.3)
    arguments.add_argument("--dim", type=int, default=64)
    arguments.add_argument("--heads", type=int, default=2)
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--items", type=int, default=2000)
    arguments.add_argument("--rounds", type=int, default=3, help="processes per way")
    arguments.add_argument("--steps", type=int, default=7, help="timed steps per way; 0 for none")
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options)))
        return
    ways = ["padded eager", *[w for w in options.ways if w != "padded eager"]]
    found = memory(ways, options)
    times = step_times(ways, options) if options.steps else {}
    ids, _ = ragged(options.batch, options.length, options.items, options.fill)
    kept, rows = int((ids != 0).sum()), ids.numel()
    print(
        f"{options.model}: batch {options.batch}, length {options.length}, width {options.dim}, {options.heads} heads, "
        f"{options.layers} layers, {options.items} items; {kept} of {rows} rows hold an item ({kept / rows:.0%})"
    )
    print(table(found, times))
    for way, f in found.items():
        if way != "padded eager" and f["jagged"] != options.layers:
            print(f"{way}: {f['jagged']:.0f} of {options.layers} attentions are jagged; the others stay padded")
    if options.json:
        shape = {
            n: getattr(options, n) for n in ("model", "batch", "length", "fill", "dim", "heads", "layers", "items")
        }
        options.json.write_text(
            json.dumps({"shape": shape, "rows": [kept, rows], "ways": found, "times": times}, indent=1)
        )


if __name__ == "__main__":
    main()
