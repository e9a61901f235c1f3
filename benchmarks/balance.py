"""How even ranks become, and what planning costs: synthetic heavy-tailed lengths, 8 to 512 ranks.

    python benchmarks/balance.py [--draws 5] [--window 8] [--json FILE]

Lengths are log-normal (sigma 1.2, mean 11.8k before the cut: the mean of KuaiRand-27K, whose distribution was not
available) or Zipf 1.2. Costs are L + L²/2560, or L² alone, the hardest case. 32 sequences a rank.

  given     as drawn, dealt out in order; figures are max / mean - 1 over ranks, means over draws
  best      one step at a time, as many sequences per rank as given
  floor     what no assignment of a single step gets below: the longest sequence alone
  window    several steps pooled (opt-in): the mean over its steps
  tokens    max / mean - 1 of tokens with the best plan: memory follows tokens, not costs
  ms        processor time of planning, which does not count the neighbours: the median and the worst of one step; then
            the window's, per step. Plans carry the time by the clock on the wall.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from report import aligned

from turbogr_compile.runtime.balance import ALGORITHMS, Balancer, Cost

PER_RANK = 32
WORLDS = (8, 64, 512)
COSTS = {"L + L²/2560": Cost(0, 1, 1 / 2560), "L²": Cost(0, 0, 1)}


def log_normal(random: np.random.Generator, count: int, cap: int) -> np.ndarray:
    sigma = 1.2
    return np.clip(random.lognormal(np.log(11_812) - sigma**2 / 2, sigma, count), 16, cap).astype(np.int64)


def zipf(random: np.random.Generator, count: int, cap: int) -> np.ndarray:
    values = np.arange(1, cap + 1)
    share = values**-1.2
    return random.choice(values, count, p=share / share.sum())


LENGTHS = {"log-normal, 4096": (log_normal, 4096), "log-normal, 16384": (log_normal, 16384), "Zipf, 4096": (zipf, 4096)}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.thread_time()
    return call(), time.thread_time() - began


def measure(lengths: str, cost: str, world: int, draws: int, window: int) -> dict[str, Any]:
    draw, cap = LENGTHS[lengths]
    random = np.random.default_rng(world)
    balancer = Balancer()
    plans, windows, times, window_times = [], [], [], []
    for _ in range(draws):
        pool = draw(random, world * PER_RANK * window, cap)
        step = pool[: world * PER_RANK]
        plan, seconds = timed(lambda step=step: balancer.plan(COSTS[cost](step), world, PER_RANK, step))
        plans.append(plan)
        times.append(seconds)
        pooled, seconds = timed(lambda pool=pool: balancer.plan_window(COSTS[cost](pool), world, window, pool))
        windows.append(pooled)
        window_times.append(seconds)
    return {
        "lengths": lengths,
        "cost": cost,
        "world": world,
        "given": statistics.mean(p.before.over_mean for p in plans),
        "spread": statistics.mean(p.before.spread for p in plans),
        "best": statistics.mean(p.imbalance.over_mean for p in plans),
        "floor": statistics.mean(p.floor for p in plans),
        "tokens": statistics.mean(p.imbalance.tokens for p in plans),
        "window": statistics.mean(w.imbalance.over_mean for w in windows),
        "window_tokens": max(int(step.tokens.max()) for w in windows for step in w.steps),
        "algorithm": statistics.mode(p.algorithm for p in plans),
        "seconds": statistics.median(times),
        "worst_seconds": max(times),
        "window_seconds": statistics.median(window_times) / window,
    }


def algorithms(draws: int) -> list[list[str]]:
    """Each way by itself on the largest batch."""
    rows = [["lengths", *(f"{name}: %, ms" for name in ALGORITHMS)]]
    for name, (draw, cap) in LENGTHS.items():
        random = np.random.default_rng(1)
        cells = [name]
        samples = [draw(random, 512 * PER_RANK, cap) for _ in range(draws)]
        for algorithm in ALGORITHMS:
            balancer = Balancer(algorithm)
            found = [
                timed(lambda n=n, balancer=balancer: balancer.plan(COSTS["L + L²/2560"](n), 512, PER_RANK, n))
                for n in samples
            ]
            share = statistics.mean(plan.imbalance.over_mean for plan, _ in found)
            cells.append(f"{share * 100:.2f}, {statistics.median(seconds for _, seconds in found) * 1e3:.1f}")
        rows.append(cells)
    return rows


def text(found: list[dict[str, Any]], window: int) -> list[str]:
    head = [
        "lengths, cut",
        "cost",
        "ranks",
        "given",
        "best",
        "floor",
        f"window {window}",
        "tokens",
        "by",
        "ms",
        "worst",
        "ms",
    ]
    rows = [head]
    for f in found:
        shares = [f"{f[key]:.1%}" for key in ("given", "best", "floor", "window", "tokens")]
        times = [f"{f[key] * 1e3:.1f}" for key in ("seconds", "worst_seconds", "window_seconds")]
        rows.append([f["lengths"], f["cost"], str(f["world"]), *shares, f["algorithm"], *times])
    return aligned(rows, labels=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--window", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = [
        measure(lengths, cost, world, options.draws, options.window)
        for lengths in LENGTHS
        for cost in COSTS
        for world in WORLDS
    ]
    lines = text(found, options.window)
    lines += ["", "each algorithm alone, 16,384 sequences on 512 ranks", *aligned(algorithms(options.draws))]
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
