"""What turbogr's frame costs when no pass fires: step time and compile time against plain Inductor.

    python benchmarks/overhead.py [--rounds 5] [--steps 60] [--layers 2] [--json FILE]

Compile time: each compile in a fresh process; cold with an empty cache directory, warm with a filled one; the two
backends take turns. Step time: both in one process, interleaved, medians. Ratios are turbogr / Inductor. Measured on
the machine at hand; small differences are noise, so the spread is printed too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import Effort, take_turns
from torch import Tensor, nn

import turbogr_compile

BACKENDS = ("inductor", "turbogr")
# They find something to do in any model with a table and a loss; what is left is the frame.
LEFT_OUT = ["pack-rows", "fuse-embedding", "fuse-loss"]


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tower(nn.Module):
    """A recommender in which the other passes of the default pipeline find nothing to do."""

    def __init__(self, layers: int, items: int = 1000, dim: int = 64, heads: int = 2, length: int = 64) -> None:
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.positions = nn.Parameter(torch.randn(length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def loss(self, ids: Tensor, target: Tensor) -> Tensor:
        x = self.items(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy((x @ self.items.weight.T).flatten(0, 1), target.flatten())


def batch(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 1000, (32, 64), generator=g) for _ in range(2))


def step_of(backend: str, layers: int):
    """A training step: forward, loss, backward."""
    torch.manual_seed(0)
    model = Tower(layers)
    options = {"codegen": "inductor", "without": LEFT_OUT} if backend == "turbogr" else None
    loss_of = torch.compile(model.loss, backend=backend, options=options)

    def step(seed: int) -> None:
        model.zero_grad(set_to_none=True)
        loss_of(*batch(seed)).backward()

    return step


def fired(layers: int) -> list[str]:
    """Passes that changed the graph; must be none for the comparison to mean anything."""
    report = turbogr_compile.explain(Tower(layers).loss, *batch(0), codegen="aten", without=LEFT_OUT)
    return [s["name"] for r in report.records for s in r["steps"] if s["status"] == "changed"]


def compile_once(backend: str, layers: int) -> None:
    """In a process of its own: time of the first step less the time of a later one."""
    step = step_of(backend, layers)
    began = time.perf_counter()
    step(0)
    first = time.perf_counter() - began
    later = []
    for i in range(3):
        began = time.perf_counter()
        step(i)
        later.append(time.perf_counter() - began)
    print(json.dumps(first - min(later)))


def compile_times(rounds: int, layers: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {"cold": {b: [] for b in BACKENDS}, "warm": {b: [] for b in BACKENDS}}
    for i in range(rounds):
        for backend in BACKENDS if i % 2 == 0 else BACKENDS[::-1]:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                    command = [sys.executable, __file__, "--compile-once", backend, "--layers", str(layers)]
                    out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                    found[state][backend].append(float(out.splitlines()[-1]))
                    print(f"  {state} {backend}: {found[state][backend][-1]:.2f} s", file=sys.stderr)
    return found


def step_times(steps: int, layers: int) -> dict[str, list[float]]:
    def on_new_batches(backend: str) -> Callable[[], None]:
        step, seeds = step_of(backend, layers), itertools.count()
        return lambda: step(next(seeds))

    taken = take_turns({b: on_new_batches(b) for b in BACKENDS}, Effort(steps, steps), peak=False)
    return {backend: samples["wall"] for backend, samples in taken.items()}


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
    arguments.add_argument("--layers", type=int, default=2)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--compile-once", choices=BACKENDS, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.compile_once:
        return compile_once(options.compile_once, options.layers)
    if found := fired(options.layers):
        sys.exit(f"these passes fire on the model, so this would not measure overhead alone: {', '.join(found)}")
    compiled, stepped = compile_times(options.rounds, options.layers), step_times(options.steps, options.layers)
    print(line("step", stepped, 1e3, "ms"))
    print(line("compile, cold", compiled["cold"], 1, "s"))
    print(line("compile, warm", compiled["warm"], 1, "s"))
    if options.json:
        options.json.write_text(json.dumps({"step": stepped, **compiled}, indent=1))
    return None


if __name__ == "__main__":
    main()
