"""What row analysis and packing cost while compiling, as models get deeper.

    python benchmarks/analysis_time.py [--models hstu sasrec] [--layers 1 2 4 8 16] [--profile LAYERS] [--json FILE]

CPU seconds per part of the pass, medians over repeated runs on one graph of a training step: `analyse` finds row
spaces and demand, `emit` builds the packed graph, `program` the prologue (and tries it on the batch), `refresh` gives
new nodes their shapes. `whole` is the step of the pass as the manager runs it, and more than its parts: remarks, copies
for fallbacks, lint. `per layer` of two depths agree where the cost is linear.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import time
from pathlib import Path

import torch
from models import Recommender, SASRec, ragged

import turbogr_compile
from turbogr_compile import GraphRun, Instrument, Role, Step

MODELS = {"hstu": Recommender, "sasrec": SASRec}
PARTS = ("analyse", "emit", "program", "refresh")


class Clock(Instrument):
    """Size of the captured graph, CPU seconds of the pass and of its parts; profiles the pass if asked to."""

    def __init__(self, profiler: cProfile.Profile | None = None) -> None:
        self.nodes, self.whole, self.jagged = 0, 0.0, 0
        self.parts = dict.fromkeys(PARTS, 0.0)
        self._profiler, self._began = profiler, 0.0

    def start(self, run: GraphRun) -> None:
        if run.role is Role.CAPTURED:
            self.nodes = len(run.graph.nodes)

    def before(self, run: GraphRun, step: Step) -> None:
        if step.pass_.name == "pack-rows":
            self._began = time.process_time()
            if self._profiler is not None:
                self._profiler.enable()

    def after(self, run: GraphRun, step: Step) -> None:
        if step.pass_.name == "pack-rows" and step.context is not None:
            if self._profiler is not None:
                self._profiler.disable()
            self.whole = time.process_time() - self._began
            self.parts |= {name: step.context.parts.get(name, 0.0) for name in PARTS}

    def finish(self, run: GraphRun) -> None:
        if run.role is Role.CAPTURED:
            op = torch.ops.turbogr.jagged_attention.default
            self.jagged = len(run.graph.find_nodes(op="call_function", target=op))


def compiled(model: str, layers: int, clock: Clock) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = MODELS[model](items=500, dim=32, heads=2, layers=layers, max_len=64)
    ids, _ = ragged(4, 64, 500, 0.3)
    turbogr_compile.compile(net.loss, target="eager", on_error="raise", verify="off", instruments=(clock,))(ids)


def measure(model: str, layers: int, rounds: int) -> dict[str, float]:
    runs = []
    for _ in range(rounds):
        clock = Clock()
        compiled(model, layers, clock)
        runs.append({**clock.parts, "whole": clock.whole, "nodes": clock.nodes, "jagged": clock.jagged})
    return {key: statistics.median(r[key] for r in runs) for key in runs[0]}


def profile(model: str, layers: int) -> None:
    """Where the pass spends its time, by what functions take themselves and with what they call."""
    recorded = cProfile.Profile()
    compiled(model, layers, Clock(recorded))
    stats = pstats.Stats(recorded).strip_dirs()
    stats.sort_stats("tottime").print_stats(18)
    stats.sort_stats("cumulative").print_stats(45)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    arguments.add_argument("--layers", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--profile", type=int, metavar="LAYERS", help="profile the pass on a model of this depth")
    arguments.add_argument("--json", type=Path)
    options = arguments.parse_args()
    if options.profile:
        for model in options.models:
            profile(model, options.profile)
        return
    found: dict[str, dict[int, dict[str, float]]] = {}
    for model in options.models:
        compiled(model, 1, Clock())  # imports and caches of torch are not ours to measure
        print(f"{model:8} nodes  " + "  ".join(f"{p:>8}" for p in (*PARTS, "whole")) + "   whole per layer")
        found[model] = {}
        for layers in options.layers:
            f = found[model][layers] = measure(model, layers, options.rounds)
            first = found[model][options.layers[0]]
            more = layers - options.layers[0]
            slope = f"{(f['whole'] - first['whole']) / more * 1e3:8.1f} ms" if more else ""
            shown = "  ".join(f"{f[p]:8.3f}" for p in (*PARTS, "whole"))
            kept = "" if f["jagged"] == layers else f"   only {f['jagged']:.0f} attentions are jagged"
            print(f"{layers:8} {f['nodes']:5.0f}  {shown}   {slope}{kept}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
