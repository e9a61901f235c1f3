"""Compute equal expressions once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..graph.nodes import is_collective, regions, returned, sizes_from
from ..graph.phases import Phase
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass


@register
@dataclass(frozen=True)
class EliminateCommon(Pass):
    """Compute equal expressions once."""

    name = "eliminate-common"
    phase = Phase.PRE_GRAD
    after = ("remove-noops", "fold-views")

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        first: dict[Any, fx.Node] = {}
        visible, region = returned(graph), regions(graph)
        for node in list(graph.nodes):
            if not _mergeable(node):
                continue
            key = (node.target, _hashable(node.args), _hashable(node.kwargs), region[node])
            twin = first.setdefault(key, node)
            # Results the caller gets to see must not begin to share memory.
            if twin is node or node in visible:
                continue
            with ctx.rewrite("same expression", twin, node):
                node.replace_all_uses_with(twin)
                graph.erase_node(node)


def _mergeable(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if _torch.is_random(node) or node.is_impure() or not _torch.is_functional(node):
        return False
    # Another rank may not find its two calls equal, and would wait for the second for ever.
    if is_collective(node):
        return False
    # One arange may index the batch and another the positions where the sizes coincide: kept apart, so that what an
    # axis means can be told from where it is used.
    if node.target.overloadpacket is torch.ops.aten.arange:
        return False
    # Each run of a data-dependent op defines sizes of its own.
    return not node.meta.get("unbacked_bindings") and not sizes_from(node)


def _hashable(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_hashable(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _hashable(v)) for k, v in sorted(value.items()))
    # 1, 1.0 and True are equal in Python and different to an op.
    return value if isinstance(value, fx.Node) else repr(value)
