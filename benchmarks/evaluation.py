"""What an evaluation of the job costs beside training: time, and memory above what is there before.

    python benchmarks/evaluation.py [--items 2000000] [--users 1000] [--plain]

One HSTU, histories of 8 to `max_len` items, all different. Seconds are of CPU time: of a step, by the least of some,
and of one evaluation, by its second run; the first of each compiles. `--plain` adds what an evaluation is without that:
padded eager histories, against the scores of a batch for all items.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import turbogr_compile as turbogr
from turbogr_compile.training import build
from turbogr_compile.training.compiled import Loss
from turbogr_compile.training.config import Config
from turbogr_compile.training.data import Batches, Histories
from turbogr_compile.training.evaluate import evaluate
from turbogr_compile.training.evaluation import Evaluation
from turbogr_compile.training.memory import keep_freed, status
from turbogr_compile.training.ranks import Ranks

MIB = 2**20


def made_up(users: int, longest: int, items: int) -> Histories:
    random = np.random.default_rng(0)
    lengths = random.permutation(np.linspace(8, longest, users).astype(np.int64))
    offsets = np.concatenate([[0], lengths.cumsum()])
    clicks = random.integers(1, items + 1, offsets[-1], dtype=np.int32)
    times = np.arange(offsets[-1]) * 60
    return Histories(clicks, times, offsets, np.arange(users), np.broadcast_to(np.int64(0), (items,)))


class Job:
    """A model, its steps and its evaluation, as the training loop has them."""

    def __init__(self, config: Config, items: int) -> None:
        torch.manual_seed(0)
        histories = made_up(config.users, config.max_len, items)
        self.batches = Batches(histories, config.batch, config.max_len, 0)
        self.model: Any = build.recommender(config, items, table="meta")
        build.place_tables(self.model, config, 1)
        rows = turbogr.RowWiseAdagrad(self.model, lr=2e-2)
        own = set(self.model.items.parameters())
        dense = torch.optim.AdamW([p for p in self.model.parameters() if p not in own], fused=True)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = (dense, rows)
        self.loss, self.config = Loss(self.model, config), config
        self.evaluation = Evaluation(self.model, config, self.batches, Ranks())
        self.stream = self.batches.forever()

    def step(self) -> None:
        self.loss(next(self.stream)).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    @torch.no_grad()
    def plain(self) -> Any:
        """Padded and whole: what `evaluate` is for."""
        rows = self.model.items.weight.detach()[1:]
        batches = self.batches.evaluation(self.config.evaluate_users)
        return evaluate(lambda ids, times: self.model.scores(ids, times, rows), batches)


def seconds(work: Callable[[], Any]) -> float:
    """Of CPU time."""
    began = time.process_time()
    work()
    return time.process_time() - began


def memory(work: Callable[[], Any]) -> tuple[float, Any]:
    """The most MiB above what was there, and what came of the work."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before counts as not there
    Path("/proc/self/clear_refs").write_text("5")
    there = status("VmRSS")
    found = work()
    return (status("VmHWM") - there) / MIB, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=2_000_000)
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--negatives", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed()
    sizes = {"max_len": given.max_len, "batch": given.batch, "negatives": given.negatives}
    people = {"users": given.users, "evaluate_users": given.users}
    config = Config.read({"dim": 64, "heads": 2, "layers": 2, **sizes, **people})
    job = Job(config, given.items)
    print(f"{given.items:,} items, {given.items * config.dim * 4 / MIB:,.0f} MiB of rows; {given.users:,} users")
    ways = {"step": job.step, "evaluation": job.evaluation} | ({"plain": job.plain} if given.plain else {})
    step = 0.0
    for name, work in ways.items():
        if name == "plain":
            job.model.eval()
        first = seconds(work)
        one = min(seconds(work) for _ in range(8 if name == "step" else 1))
        step = step or one
        most, found = memory(work)
        print(f"{name:10} {one:8.3f} s, {one / step:6.1f} steps, {most:7,.0f} MiB above; the first {first:.1f} s")
        if found is not None:
            print(f"{'':10} {found}")


if __name__ == "__main__":
    main()
