"""What row analysis and packing cost while compiling, as models get deeper.

    python benchmarks/analysis_time.py [--models hstu sasrec] [--layers 1 2 4 8 16] [--profile LAYERS] [--json FILE]

Seconds per part of the pass, medians over repeated runs on one captured graph of a training step: `analyse` finds row
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import Recommender, SASRec, ragged
from torch import fx

import turbogr_compile
from turbogr_compile import GraphRun, Instrument, Role
from turbogr_compile.passes import pack_rows
from turbogr_compile.pipeline import manager

MODELS = {"hstu": Recommender, "sasrec": SASRec}
PARTS = ("analyse", "emit", "program", "refresh")


class Clock(Instrument):
    """Size of the captured graph and seconds of the pass."""

    def __init__(self) -> None:
        self.nodes, self.whole, self.jagged = 0, 0.0, 0

    def start(self, run: GraphRun) -> None:
        if run.role is Role.CAPTURED:
            self.nodes = len(run.graph.nodes)

    def finish(self, run: GraphRun) -> None:
        if run.role is Role.CAPTURED:
            self.whole = sum(s.seconds for s in run.steps if s.pass_.name == "pack-rows")
            op = torch.ops.turbogr.jagged_attention.default
            self.jagged = len(run.graph.find_nodes(op="call_function", target=op))


class Parts:
    """Seconds in the functions that the pass is made of."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._inside = False

    def timed(self, name: str, fn: Callable[..., Any], only_in_pass: bool = False) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                if self._inside or not only_in_pass:
                    self.seconds[name] += time.perf_counter() - began

        return run

    def __enter__(self) -> Parts:
        emitter, clean = pack_rows.Emitter, manager.Manager._apply
        parts = self

        def apply(self: Any, step: Any) -> None:
            parts._inside = step.pass_.name == "pack-rows"
            clean(self, step)
            parts._inside = False

        self._saved = [
            (pack_rows, "analyse", pack_rows.analyse), (emitter, "run", emitter.run),
            (emitter, "program", emitter.program), (manager.metadata, "refresh", manager.metadata.refresh),
            (manager.Manager, "_apply", clean),
        ]  # fmt: skip
        pack_rows.analyse = self.timed("analyse", pack_rows.analyse)  # type: ignore[assignment]
        emitter.run = self.timed("emit", emitter.run)  # type: ignore[method-assign]
        emitter.program = self.timed("program", emitter.program)  # type: ignore[method-assign]
        manager.metadata.refresh = self.timed("refresh", manager.metadata.refresh, only_in_pass=True)
        manager.Manager._apply = apply  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: Any) -> None:
        for owner, name, value in self._saved:
            setattr(owner, name, value)


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
        with Parts() as parts:
            compiled(model, layers, clock)
        runs.append({**parts.seconds, "whole": clock.whole, "nodes": clock.nodes, "jagged": clock.jagged})
    return {key: statistics.median(r[key] for r in runs) for key in runs[0]}


def profile(model: str, layers: int) -> None:
    """Where the pass spends its time, by what functions take themselves and with what they call."""
    recorded = cProfile.Profile()
    run = pack_rows.PackRows.run

    def recording(self: Any, graph: fx.Graph, ctx: Any) -> None:
        with recorded:
            run(self, graph, ctx)

    pack_rows.PackRows.run = recording  # type: ignore[method-assign]
    try:
        compiled(model, layers, Clock())
    finally:
        pack_rows.PackRows.run = run  # type: ignore[method-assign]
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
