"""Everything but the sharded tables: parameters that every rank has, and the average of their gradients.

`DistributedDataParallel(model)` does the same, overlapped with the backward; it leaves sharded tables alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET = 25 * 2**20


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """What the optimizer of the dense part gets; sharded tables are no parameters."""
    return list(model.parameters())


@torch.no_grad()
def broadcast_parameters(model: nn.Module, group: Any = None) -> None:
    """Parameters of the group's first rank, on all ranks: begin equal."""
    for p in model.parameters():
        dist.broadcast(p, group_src=0, group=group or dist.group.WORLD)


@torch.no_grad()
def average_gradients(model: nn.Module | Iterable[Tensor], group: Any = None, *, mean: bool = True) -> None:
    """Average gradients over ranks, in buckets. A parameter without a gradient on all ranks has none afterwards."""
    group = group or dist.group.WORLD
    parameters = model.parameters() if isinstance(model, nn.Module) else model
    trained = [p for p in parameters if p.requires_grad]
    scale = 1.0 / dist.get_world_size(group) if mean else 1.0
    started = [_start(bucket, group) for bucket in _buckets(trained)]
    for bucket, flat, work in started:
        work.wait()
        sums, used = flat.split([flat.numel() - len(bucket), len(bucket)])
        for p, part, seen in zip(bucket, sums.split([p.numel() for p in bucket]), used.tolist(), strict=True):
            if seen:
                average = part.view(p.shape) * scale
                p.grad = average if p.grad is None else p.grad.copy_(average)


def _buckets(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Of one dtype and device each; the same on all ranks."""
    found: list[list[Tensor]] = []
    size: dict[Any, int] = {}
    current: dict[Any, list[Tensor]] = {}
    for p in parameters:
        key = (p.dtype, p.device)
        if key not in current or size[key] + p.nbytes > BUCKET:
            current[key], size[key] = [], 0
            found.append(current[key])
        current[key].append(p)
        size[key] += p.nbytes
    return found


def _start(bucket: list[Tensor], group: Any) -> tuple[list[Tensor], Tensor, Any]:
    """One sum of all gradients, and of who has one."""
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
    used = bucket[0].new_tensor([float(p.grad is not None) for p in bucket])
    flat = torch.cat([*(g.reshape(-1) for g in parts), used])
    return bucket, flat, dist.all_reduce(flat, group=group, async_op=True)
