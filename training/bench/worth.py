"""The prices of option `worth` on the machine at hand: `turbogr bench --worth`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import turbogr_compile as turbogr

ROUNDS = 30
SIDE = 512  # of products
ELEMENTS = 1 << 22  # of a tensor that no cache holds
ROW = 64  # elements of a row that is moved
LINKS = 100  # ops of a step that does next to nothing in each
ROWS, DIM, ITEMS = 16, 8, 20  # of a step that is nothing but overhead


class Tiny(nn.Module):
    """Table, layer and loss: one set of rows, no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.layer = nn.Embedding(ITEMS, DIM, padding_idx=0), nn.Linear(DIM, ITEMS)

    def forward(self, ids: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(self.items(ids)).flatten(0, 1), ids.flatten(), ignore_index=0)


def measured() -> str:
    """The best of several runs each, which a busy machine disturbs least."""
    packed, padded = (_seconds(_tiny(**options)) for options in ({"worth": "always"}, {"without": ["pack-rows"]}))
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    x = torch.randn(ELEMENTS)
    wide, some = x.view(-1, ROW).clone().requires_grad_(), torch.randperm(ELEMENTS // ROW)[: ELEMENTS // ROW // 2]
    slope = torch.ones(len(some), ROW)
    few = torch.randn(DIM, requires_grad=True)
    rows = torch.randn(ROWS, DIM, requires_grad=True)
    index = torch.arange(ROWS)
    call = _seconds(lambda: torch.ops.turbogr.gather_rows(rows, index).sum().backward())
    call -= _seconds(lambda: rows.sum().backward())
    prices = {
        "flops": 2 * SIDE**3 / _seconds(lambda: a @ b),
        "bytes": 2 * 4 * ELEMENTS / _seconds(lambda: x + 1),
        "moved": 3 * 4 * ELEMENTS / _seconds(lambda: torch.ops.turbogr.gather_rows(wide, some).backward(slope)),
        "op": max(_seconds(lambda: _chain(few).backward()) / LINKS / 3, 1e-7),
        "call": max(call / 2, 1e-7),
        "step": max(packed - padded, 1e-6),
    }
    return ",".join(f"{name}={price:.3g}" for name, price in prices.items())


def _chain(x: Tensor) -> Tensor:
    for _ in range(LINKS):
        x = x * 0.5
    return x.sum()


def _tiny(**options: Any) -> Callable[[], None]:
    model, ids = Tiny(), torch.randint(1, ITEMS, (4, ROWS // 4))
    ids[:, 2:] = 0
    step = turbogr.compile(model, verify="off", **options)
    return lambda: step(ids).backward()


def _seconds(run: Callable[[], Any]) -> float:
    """Of the fastest run."""
    for _ in range(3):
        run()
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return min(taken)
