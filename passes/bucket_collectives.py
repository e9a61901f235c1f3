"""Send small collectives that follow each other as one: each costs a latency, whatever its size.

Whether they may depends on the graph and on fixed sizes alone, so that every rank comes to the same result. Tensors
are laid one after another; sums over more than two ranks may be added in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from ..graph.nodes import is_collective, is_wait, tensor
from ..graph.phases import Phase
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from .schedule.costs import static_bytes

aten, functional = torch.ops.aten, torch.ops._c10d_functional
REDUCE, GATHER, SCATTER = (
    functional.all_reduce.default, functional.all_gather_into_tensor.default, functional.reduce_scatter_tensor.default,
)  # fmt: skip


@dataclass(frozen=True)
class Small:
    start: fx.Node
    wait: fx.Node
    bytes: int

    @property
    def like(self) -> tuple[Any, ...]:
        """Equal for those that may become one: op, dtype, and all settings, the group among them."""
        return (self.start.target, tensor(self.start.args[0]).dtype, *self.start.args[1:])  # type: ignore[union-attr]


@register
@dataclass(frozen=True)
class BucketCollectives(Pass):
    """Send small collectives that follow each other as one."""

    name = "bucket-collectives"
    phase = Phase.POST_GRAD
    before = ("overlap",)

    kib: int = 1024  # of one bucket; what is larger than half of it goes alone

    def concerns(self, graph: fx.Graph) -> bool:
        return any(is_collective(n) for n in graph.nodes)

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for bucket in list(_buckets(graph, ctx, self.kib * 1024)):
            if len(bucket) > 1:
                text = f"{len(bucket)} collectives of {sum(one.bytes for one in bucket)} bytes together are sent as one"
                ctx.applied("bucketed", text, bucket[-1].start)
                with ctx.rewrite("bucket", *(node for one in bucket for node in (one.start, one.wait))):
                    _merge(graph, bucket)


def _buckets(graph: fx.Graph, ctx: Context, limit: int) -> Iterator[list[Small]]:
    bucket: list[Small] = []
    for node in (n for n in graph.nodes if is_collective(n)):
        small = _small(node, limit)
        if bucket and small is not None and bucket[0].like == small.like:
            reader = min((r for one in bucket for r in one.wait.users), default=None)
            if reader is not None and reader < node:
                text = f"%{bucket[-1].start.name} and %{node.name} stay apart: {reader.name} reads the first in between"
                ctx.missed("not-bucketed", text, node, "start both before reading either")
            elif sum(one.bytes for one in bucket) + small.bytes <= limit:
                bucket.append(small)
                continue
        yield bucket
        bucket = [small] if small is not None else []
    yield bucket


def _small(node: fx.Node, limit: int) -> Small | None:
    given, made = tensor(node.args[0]) if node.args else None, tensor(node)
    if node.target not in (REDUCE, GATHER, SCATTER) or given is None or made is None or len(node.users) != 1:
        return None
    (wait,) = node.users
    sizes = static_bytes(given), static_bytes(made)
    if not is_wait(wait) or None in sizes or max(sizes) > limit / 2 or not made.is_contiguous():  # type: ignore[type-var,operator]
        return None
    return Small(node, wait, max(sizes))  # type: ignore[type-var,arg-type]


def _merge(graph: fx.Graph, bucket: Sequence[Small]) -> None:
    last = bucket[-1].start
    target: Any = last.target
    settings: Any = last.args[1:]
    ranks = {REDUCE: 1, GATHER: settings[0], SCATTER: settings[-2]}[target]
    sent = ranks if target is SCATTER else 1  # rows of the laid-out input, one for each rank that gets a part
    got = ranks if target is GATHER else 1
    with graph.inserting_before(last.next):
        flat = [graph.call_function(aten.reshape.default, (one.start.args[0], [sent, -1])) for one in bucket]
        laid = graph.call_function(aten.cat.default, (flat, 1))
        laid = graph.call_function(aten.reshape.default, (laid, [-1]))
        start = graph.call_function(target, (laid, *settings))
        wait = graph.call_function(functional.wait_tensor.default, (start,))
        rows = graph.call_function(aten.reshape.default, (wait, [got, -1]))
        shapes = [list(tensor(one.start).shape) for one in bucket]  # type: ignore[union-attr]
        sizes = [math.prod(shape) // got for shape in shapes]
        parts = graph.call_function(aten.split_with_sizes.default, (rows, sizes, 1))
        for i, (one, shape) in enumerate(zip(bucket, shapes, strict=True)):
            part = graph.call_function(getitem, (parts, i))
            whole = graph.call_function(aten.reshape.default, (part, shape))
            one.wait.replace_all_uses_with(whole)
    for one in bucket:
        graph.erase_node(one.wait)
        graph.erase_node(one.start)
