"""Remove ops that return their argument unchanged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..capture.normal import memory_of
from ..graph import metadata
from ..graph.nodes import layout_sensitive, returned, sizes_from, tensor, written
from ..graph.phases import Phase
from ..graph.shapes import known
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass

aten = torch.ops.aten


@register
@dataclass(frozen=True)
class RemoveNoops(Pass):
    """Remove ops that return their argument unchanged: whole slices, casts to the same type, dropout of nothing."""

    name = "remove-noops"
    phase = Phase.PRE_GRAD

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        visible, sensitive = returned(graph), layout_sensitive(graph)
        changing = {memory for node in written(graph) for memory in memory_of(node)}
        for node in list(graph.nodes):
            unchanged = NOOPS.get(node.target)
            # A copy the caller gets to see keeps its own memory.
            if unchanged is None or node in visible or not unchanged(*node.args, **node.kwargs):
                continue
            source = node.args[0]
            # A copy of what is written to later keeps the old value.
            if sizes_from(node) or not changing.isdisjoint(memory_of(source)):
                continue
            if not metadata.same_tensor(tensor(source), tensor(node), strides=node in sensitive):
                continue
            with ctx.rewrite(node.target.overloadpacket.__name__, source, node):
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _always(*args: Any, **kwargs: Any) -> bool:
    """Equal shape and type, which the pass checks for every op, are enough."""
    return True


def _drops_nothing(x: fx.Node, p: float, train: bool) -> bool:
    return p == 0.0 or train is False


def _by_one(x: fx.Node, factor: Any, **kwargs: Any) -> bool:
    return isinstance(factor, (int, float)) and factor == 1 and not kwargs


def _whole(x: fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> bool:
    value = tensor(x)
    if value is None or step != 1 or start not in (None, 0) or isinstance(start, fx.Node):
        return False
    end = end.meta.get("val") if isinstance(end, fx.Node) else end
    return end is None or known(end >= value.shape[dim])


def _in_order(x: fx.Node, dims: Any) -> bool:
    return list(dims) == list(range(len(dims)))


NOOPS: dict[Any, Callable[..., bool]] = {
    aten.clone.default: _always,
    aten.contiguous.default: _always,
    aten._to_copy.default: _always,
    aten.to.dtype: _always,
    aten.reshape.default: _always,
    aten.expand.default: _always,
    aten.squeeze.dim: _always,
    aten.dropout.default: _drops_nothing,
    aten.feature_dropout.default: _drops_nothing,
    aten.alpha_dropout.default: _drops_nothing,
    aten.mul.Tensor: _by_one,
    aten.div.Tensor: _by_one,
    aten.slice.Tensor: _whole,
    aten.permute.default: _in_order,
}
