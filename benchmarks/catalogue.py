"""What a training step of one process costs as the catalogue grows: time and memory, with gradients of rows and dense.

    python benchmarks/catalogue.py [--items 100000,1000000,4000000,16000000] [--dense] [--half] [--malloc]

One HSTU, one batch shape, tables of several sizes in turns within one process; seconds are of CPU time, the least of
several. `--dense` adds the gradient that `nn.Embedding` has, with Adagrad on the rows in which it is not zero, up to
a million items; `--half` adds steps that multiply negatives in FP16. `--malloc` asks the C library to keep what is
freed, as the job does.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import turbogr_compile as turbogr
from turbogr_compile.training import build
from turbogr_compile.training.compiled import Loss
from turbogr_compile.training.config import Config
from turbogr_compile.training.memory import keep_freed, status

MIB = 2**20
DENSE_UP_TO = 1_000_000


class Dense:
    """Row-wise Adagrad by a gradient as large as the table."""

    def __init__(self, weight: nn.Parameter, lr: float = 2e-2) -> None:
        self.weight, self.lr, self.sums = weight, lr, weight.new_zeros(weight.shape[0])

    @torch.no_grad()
    def step(self) -> None:
        assert self.weight.grad is not None
        rows = (self.weight.grad != 0).any(1).nonzero().squeeze(1)
        gradient = self.weight.grad.index_select(0, rows)
        sums = self.sums.index_select(0, rows) + gradient.square().mean(1)
        self.sums.index_copy_(0, rows, sums)
        self.weight.index_add_(0, rows, gradient / (sums.sqrt() + 1e-10)[:, None], alpha=-self.lr)

    def zero_grad(self) -> None:
        self.weight.grad = None


def stepping(config: Config, items: int, dense: bool) -> Callable[[], None]:
    """One update of a model with so many items, on another batch each time."""
    torch.manual_seed(0)
    model = build.recommender(config, items)
    table: Any = model.items.weight
    if not dense:
        turbogr.row_gradients(model, ["items"])
    rows: Any = Dense(table) if dense else turbogr.RowWiseAdagrad(model, lr=2e-2)
    others = torch.optim.AdamW([p for p in model.parameters() if p is not table], fused=True)
    loss, generator = Loss(model, config), torch.Generator().manual_seed(1)

    def batch() -> dict[str, Tensor]:
        shape = config.batch, config.max_len
        lengths = torch.linspace(8, config.max_len, config.batch).long()[:, None]
        valid = torch.arange(config.max_len) < lengths
        ids = torch.randint(1, items + 1, shape, generator=generator) * valid
        return {"ids": ids, "times": torch.arange(config.max_len).expand(shape) * 60 * valid}

    def step() -> None:
        loss(batch()).backward()
        for optimizer in (others, rows):
            optimizer.step()
            optimizer.zero_grad()

    return step


def measured(config: Config, sizes: list[int], dense: bool, half: bool, repeats: int) -> list[dict[str, Any]]:
    """Seconds of CPU per step, in turns; bytes above the table that building and stepping took, one after the other."""
    found, steps = [], []
    for items in sizes:
        for way in ("rows", *["half"] * half, *["dense"] * (dense and items <= DENSE_UP_TO)):
            torch.compiler.reset()
            before = status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")
            step = stepping(replace(config, features=("half",) * (way == "half")), items, way == "dense")
            for _ in range(2):
                step()
            table = (items + 1) * config.dim * 4
            found.append({"items": items, "way": way, "table": table, "memory": status("VmHWM") - before,
                          "seconds": float("inf")})  # fmt: skip
            steps.append(step)
    for _ in range(repeats):
        for one, step in zip(found, steps, strict=True):
            began = time.process_time()
            step()
            one["seconds"] = min(one["seconds"], time.process_time() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", default="100000,1000000,4000000,16000000")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--malloc", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-len", type=int, default=512)
    parser.add_argument("--negatives", type=int, default=128)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.malloc:
        keep_freed()
    config = Config.read({"dim": given.dim, "heads": 2, "layers": 2, "max_len": given.max_len, "batch": given.batch,
                          "negatives": given.negatives})  # fmt: skip
    found = measured(config, [int(n) for n in given.items.split(",")], given.dense, given.half, given.repeats)
    for one in found:
        over = one["memory"] / one["table"]
        print(f"{one['items']:>12,} items  {one['way']:5}  {one['seconds'] * 1e3:8.1f} ms of CPU a step  "
              f"{one['memory'] / MIB:8.0f} MiB, {over:.2f} of the table")  # fmt: skip
    rows = [one["seconds"] for one in found if one["way"] == "rows"]
    print(f"largest of rows over smallest: {max(rows) / min(rows):.2f}")


if __name__ == "__main__":
    main()
