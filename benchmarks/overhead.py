"""What turbogr's frame costs when no pass fires: step time and compile time against plain Inductor.

    python benchmarks/overhead.py [--rounds 5] [--steps 60] [--json FILE]

Compile time: each compile in a fresh process; cold with an empty cache directory, warm with a filled one; the two
backends take turns. Step time: both in one process, interleaved, medians. Ratios are turbogr / Inductor. Measured on
the machine at hand; small differences are noise, so the spread is printed too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from hstu import Recommender, histories

BACKENDS = ("inductor", "turbogr")


def step_of(backend: str):
    """A training step (forward, loss, backward) of the demo's model, passes in place but none of them firing."""
    torch.manual_seed(0)
    model = Recommender()
    options = {"codegen": "inductor"} if backend == "turbogr" else None
    # Every pass of the default pipeline runs over the graph, stopped before its first rewrite.
    if backend == "turbogr":
        options["pipeline"] = os.environ.get("OVERHEAD_PIPELINE", "")
    loss_of = torch.compile(model.loss, backend=backend, options=options)

    def step(seed: int) -> None:
        model.zero_grad(set_to_none=True)
        loss_of(histories(32, 128, 2000, seed)).backward()

    return step


def compile_once(backend: str) -> None:
    """In a process of its own: time of the first step less the time of a later one."""
    step = step_of(backend)
    began = time.perf_counter()
    step(0)
    first = time.perf_counter() - began
    later = []
    for i in range(3):
        began = time.perf_counter()
        step(i)
        later.append(time.perf_counter() - began)
    print(json.dumps(first - min(later)))


def compile_times(rounds: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {"cold": {b: [] for b in BACKENDS}, "warm": {b: [] for b in BACKENDS}}
    for i in range(rounds):
        for backend in BACKENDS if i % 2 == 0 else BACKENDS[::-1]:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                    command = [sys.executable, __file__, "--compile-once", backend]
                    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                    found[state][backend].append(float(out.splitlines()[-1]))
                    print(f"  {state} {backend}: {found[state][backend][-1]:.2f} s", file=sys.stderr)
    return found


def step_times(steps: int) -> dict[str, list[float]]:
    runs = {b: step_of(b) for b in BACKENDS}
    for run in runs.values():
        run(0), run(1)
    found: dict[str, list[float]] = {b: [] for b in BACKENDS}
    for i in range(steps):
        for backend in BACKENDS if i % 2 == 0 else BACKENDS[::-1]:
            began = time.perf_counter()
            runs[backend](i)
            found[backend].append(time.perf_counter() - began)
    return found


def line(what: str, times: dict[str, list[float]], unit: float, name: str) -> str:
    medians = {b: statistics.median(t) for b, t in times.items()}
    ratios = sorted(a / b for a, b in zip(times["turbogr"], times["inductor"], strict=True))
    spread = f"{ratios[len(ratios) // 4]:.3f}..{ratios[-1 - len(ratios) // 4]:.3f}"
    ratio = medians["turbogr"] / medians["inductor"]
    shown = "   ".join(f"{b} {medians[b] * unit:8.2f} {name}" for b in BACKENDS)
    return f"{what:14} {shown}   ratio {ratio:.3f}   (quartiles of single ratios {spread})"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=5, help="compiles of each backend")
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--compile-once", choices=BACKENDS, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.compile_once:
        return compile_once(options.compile_once)
    compiled, stepped = compile_times(options.rounds), step_times(options.steps)
    print(line("step", stepped, 1e3, "ms"))
    print(line("compile, cold", compiled["cold"], 1, "s"))
    print(line("compile, warm", compiled["warm"], 1, "s"))
    if options.json:
        options.json.write_text(json.dumps({"step": stepped, **compiled}, indent=1))
    return None


if __name__ == "__main__":
    main()
