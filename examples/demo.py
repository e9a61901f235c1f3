"""First contact: train a small recommender with `backend="turbogr"`, see what was rewritten and how fast it runs.

    python examples/demo.py [--steps 30] [--out out/report]

Writes pass dumps and the viewer page (index.html) into --out. Speed is measured in this run, interleaved with eager.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
from hstu import Recommender, histories

import turbogr_compile

BATCH, MAX_LEN, ITEMS = 32, 128, 2000


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--out", type=Path, default=Path("out/report"))
    options = arguments.parse_args()

    torch.manual_seed(0)
    model = Recommender(items=ITEMS, max_len=MAX_LEN)
    print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, batches of {BATCH} x {MAX_LEN}")

    report = turbogr_compile.explain(model.loss, batch(0), dump=options.out, codegen="aten")
    print("\nwhat was rewritten\n")
    print(report)

    runs = {"eager": trainer(model, None), "turbogr aten": trainer(model, "aten")}
    runs["turbogr inductor"] = trainer(model, "inductor")
    losses, seconds = train(runs, options.steps)

    print(f"training {options.steps} steps, the same batches for each; first and last loss, median ms a step, ratio")
    for name, curve in losses.items():
        ratio = seconds["eager"] / seconds[name]
        print(f"  {name:18} {curve[0]:.4f} → {curve[-1]:.4f}   {1e3 * seconds[name]:7.1f} ms   {ratio:.2f}x eager")
    worst = max(abs(a - b) for name in losses for a, b in zip(losses[name], losses["eager"], strict=True))
    print(f"  largest difference to eager's loss curve: {worst:.1e}")
    print(f"\nopen {options.out / 'index.html'} to step through the passes")


def batch(step: int) -> torch.Tensor:
    return histories(BATCH, MAX_LEN, ITEMS, seed=step)


def trainer(model: Recommender, codegen: str | None):
    """A training step of its own copy of the model; compiled on its first call."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_of = model.loss if codegen is None else turbogr_compile.compile(model.loss, codegen=codegen)

    def step(ids: torch.Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(ids)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def train(runs, steps: int):
    losses = {name: [] for name in runs}
    seconds = {name: [] for name in runs}
    for name, step in runs.items():
        began = time.perf_counter()
        losses[name].append(step(batch(0)))
        if name != "eager":
            print(f"  {name}: first step, with compilation, took {time.perf_counter() - began:.1f} s")
    for i in range(1, steps):
        for name, step in runs.items():
            ids = batch(i)
            began = time.perf_counter()
            losses[name].append(step(ids))
            seconds[name].append(time.perf_counter() - began)
    return losses, {name: statistics.median(s) for name, s in seconds.items()}


if __name__ == "__main__":
    main()
