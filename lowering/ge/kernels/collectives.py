"""Collectives, carried out on the process group that torchair names: gloo here, where HCCL would be."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .... import _torch
from ..graph import GraphError, Node
from .registry import Tensor, integers, kernel

_OPERATIONS = {"sum": "SUM", "max": "MAX", "min": "MIN", "prod": "PRODUCT"}


def group_of(node: Node) -> dist.ProcessGroup:
    """From 'tag=…;rank_list=0,1', which is how torchair writes down a group of CPU processes."""
    if not dist.is_initialized():
        raise GraphError(f"{node} needs a process group\n  try: torch.distributed.init_process_group('gloo') first")
    name = node.attribute("group", "")
    parts = dict(part.split("=", 1) for part in name.split(";") if "=" in part)
    if "rank_list" not in parts:
        raise GraphError(f"{node}: {name!r} names no group of processes that can be found here")
    ranks = [int(rank) for rank in parts["rank_list"].split(",")]
    group = _torch.group_of(parts.get("tag", ""), ranks)
    if group is None:
        raise GraphError(f"{node}: there is no process group of ranks {ranks} with tag {parts.get('tag', '')!r}")
    return group


def _operation(node: Node) -> dist.ReduceOp.RedOpType:
    return getattr(dist.ReduceOp, _OPERATIONS[node.attribute("reduction")])


def _gathered(x: Tensor, counts: list[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Each rank's elements; gloo wants equal sizes, so all are padded to the largest."""
    largest = max(counts)
    mine = torch.zeros(largest, dtype=x.dtype)
    mine[: x.numel()] = x.reshape(-1)
    parts = [torch.empty_like(mine) for _ in counts]
    dist.all_gather(parts, mine, group=group)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


@kernel("HcomAllReduce")
def all_reduce(node: Node, x: Tensor) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, _operation(node), group=group_of(node))
    return total


@kernel("HcomAllGather")
def all_gather(node: Node, x: Tensor) -> Tensor:
    group = group_of(node)
    parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat([part.reshape(1) for part in parts] if x.dim() == 0 else parts)


@kernel("HcomAllGatherV")
def all_gather_uneven(
    node: Node, x: Tensor, send_count: Tensor, recv_counts: Tensor, displacements: Tensor | None = None
) -> Tensor:
    parts = _gathered(x, integers(recv_counts), group_of(node))
    return torch.cat(parts).reshape(-1, *x.shape[1:])


@kernel("HcomReduceScatter")
def reduce_scatter(node: Node, x: Tensor) -> Tensor:
    group = group_of(node)
    size = dist.get_world_size(group)
    if x.shape[0] % size:
        raise GraphError(f"{node}: {x.shape[0]} rows cannot be scattered evenly to {size} ranks")
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, _operation(node), group=group)
    return total.chunk(size)[dist.get_rank(group)].clone()


@kernel("HcomReduceScatterV")
def reduce_scatter_uneven(
    node: Node, x: Tensor, recv_count: Tensor, send_counts: Tensor, displacements: Tensor | None = None
) -> Tensor:
    group = group_of(node)
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, _operation(node), group=group)
    return total.reshape(-1).split(integers(send_counts))[dist.get_rank(group)].reshape(-1, *x.shape[1:]).clone()


@kernel("HcomBroadcast")
def broadcast(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    group = group_of(node)
    root = dist.get_global_rank(group, node.attribute("root_rank"))
    results = tuple(x.clone(memory_format=torch.contiguous_format) for x in inputs)
    for result in results:
        dist.broadcast(result, root, group=group)
    return results


@kernel("HcomAllToAll")
def all_to_all(node: Node, x: Tensor) -> Tensor:
    received = torch.empty(x.shape, dtype=x.dtype)
    dist.all_to_all_single(received, x.contiguous(), group=group_of(node))
    return received


@kernel("HcomAllToAllV")
def all_to_all_uneven(
    node: Node, data: Tensor, send_counts: Tensor, send_displacements: Tensor,
    recv_counts: Tensor, recv_displacements: Tensor,
) -> Tensor:  # fmt: skip
    """Counts and displacements are in elements."""
    flat, sent, wanted = data.reshape(-1), integers(send_counts), integers(recv_counts)
    parts = [flat[start : start + n] for n, start in zip(sent, integers(send_displacements), strict=True)]
    received = torch.empty(sum(wanted), dtype=data.dtype)
    dist.all_to_all_single(received, torch.cat(parts), wanted, sent, group=group_of(node))
    placed = torch.empty_like(received)
    for part, start in zip(received.split(wanted), integers(recv_displacements), strict=True):
        placed[start : start + len(part)] = part
    return placed.reshape(-1, *data.shape[1:])


@kernel("HcomSend")
def send(node: Node, x: Tensor) -> tuple[Tensor, ...]:
    group = group_of(node)
    target = dist.get_global_rank(group, node.attribute("dest_rank"))
    dist.send(x.contiguous(), target, group=group, tag=node.attribute("sr_tag", 0))
    return ()


@kernel("HcomReceive")
def receive(node: Node, *unused: Tensor) -> Tensor:
    group = group_of(node)
    received = torch.empty(node.attribute("shape"), dtype=node.attribute("dtype"))
    source = dist.get_global_rank(group, node.attribute("src_rank"))
    dist.recv(received, source, group=group, tag=node.attribute("sr_tag", 0))
    return received
