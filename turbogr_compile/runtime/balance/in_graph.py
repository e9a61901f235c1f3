"""Balancing inside of a compiled step: rows of tokens change ranks between two layers, and their gradients come back.

    exchange = RowExchange()
    way = exchange.way(plan)                           # outside of the graph: three tensors
    ...
    x = exchange(x, *way)                              # inside: rows that the plan gives this rank, in batch order

Where `exchange` of exchange.py moves what was loaded, this one moves what was computed: a cheap part of the model can
run where the batch is, and the costly part balanced. How many rows go where is read from tensors in the graph, so
another plan needs no other graph.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import OptionError
from .exchange import _rows, _splits
from .plan import Plan


class Way(NamedTuple):
    """Of one step: which rows of this rank go out, in which order, and how many go to and come from each rank."""

    order: Tensor
    sent: Tensor
    received: Tensor


class RowExchange:
    """Moves rows between the ranks of a group, as a plan says; differentiable. All ranks call it together."""

    def __init__(self, group: Any = None) -> None:
        chosen: Any = group or dist.group.WORLD
        self.group, self.name = chosen, str(chosen.group_name)

    def way(self, plan: Plan, device: torch.device | str = "cpu") -> Way:
        rank, world = dist.get_rank(self.group), dist.get_world_size(self.group)
        if world != plan.world:
            raise OptionError(f"the plan is for {plan.world} ranks, and the group has {world}")
        here, coming = plan.given == rank, plan.ranks == rank
        lengths, target = plan.lengths[here], plan.ranks[here]
        order = np.argsort(target, kind="stable")
        rows = _rows(np.concatenate([[0], lengths.cumsum()])[:-1][order], lengths[order])
        counts = _splits(target, lengths, world), _splits(plan.given[coming], plan.lengths[coming], world)
        return Way(*(torch.as_tensor(x, dtype=torch.int64, device=device) for x in (rows, *counts)))

    def __call__(self, x: Tensor, order: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        """Rows of `x`, of which there is one per token, on the ranks where the plan wants them."""
        send, receive = _sizes(sent), _sizes(received)
        rows = x.index_select(0, order)
        torch._check(sum(send) == rows.shape[0], lambda: "the way was made for another number of rows")
        moved = torch.ops._c10d_functional.all_to_all_single(rows, receive, send, self.name)
        return torch.ops._c10d_functional.wait_tensor(moved)


def _sizes(counts: Tensor) -> list[Any]:
    found = counts.tolist()
    for size in found:
        torch._check(size >= 0)
    return found
