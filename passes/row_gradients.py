"""Take gradients of whole tables out of the backward where only looked-up rows have one.

The gradient of a table is a sum over its lookups. Each of them names rows and gives them values, and these go into the
table's journal (runtime/sharding/own.py) instead of into a tensor as large as the table. The forward reads the weight
itself where `own_table` stood for it. A part of the sum that no rule knows stays dense, and is told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from ..graph.phases import Phase
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from ..rules.pattern import arguments
from ..runtime.sharding.table import table_of

aten, ops = torch.ops.aten, torch.ops.turbogr
WHOLE, DENSE = ops.own_table.default, ops.own_keep_dense.default


@register
@dataclass(frozen=True)
class RowGradients(Pass):
    """Take gradients of whole tables out of the backward where only looked-up rows have one."""

    name = "row-gradients"
    phase = Phase.POST_GRAD
    before = ("bucket-collectives", "overlap")

    def concerns(self, graph: fx.Graph) -> bool:
        return any(n.target in (WHOLE, DENSE) for n in graph.nodes)

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for node in graph.find_nodes(op="call_function", target=DENSE):
            _keep_rows(graph, node, ctx)
        for node in graph.find_nodes(op="call_function", target=WHOLE):
            weight: Any = node.args[0]
            with ctx.rewrite("weight itself", weight, node):
                node.replace_all_uses_with(weight)
                graph.erase_node(node)


def _keep_rows(graph: fx.Graph, node: fx.Node, ctx: Context) -> None:
    given: Any = node.args
    total, number = given
    sums: list[fx.Node] = []
    parts = list(_parts(total, sums))
    kept = [_rows(part) for part in parts]
    for part, found in zip(parts, kept, strict=True):
        if found is None:
            text = f"%{part.name} is a gradient of all of table {table_of(number).name!r}"
            ctx.missed("dense-gradient", text, part, "look rows up in the model, and do nothing else with the table")
    if not any(kept):
        return
    with ctx.rewrite("rows", node, *parts):
        with graph.inserting_before(node):
            receipts = [_call(graph, found, part, number) for part, found in zip(parts, kept, strict=True)]
            result = reduce(lambda a, b: graph.call_function(aten.add.Tensor, (a, b)), receipts)
        node.replace_all_uses_with(result)
        for old in (node, *sums, *parts):
            if not old.users:
                graph.erase_node(old)


def _call(graph: fx.Graph, found: tuple[Any, tuple[Any, ...]] | None, part: fx.Node, number: Any) -> fx.Node:
    target, given = found or (DENSE, (part,))
    return graph.call_function(target, (*given, number))


def _parts(node: Any, sums: list[fx.Node]) -> Iterator[fx.Node]:
    """What is added up, in the order in which it is; `sums` gets the additions, last first."""
    if node.target is aten.add.Tensor and not node.kwargs and len(node.users) == 1:
        sums.append(node)
        for operand in node.args:
            yield from _parts(operand, sums)
    else:
        yield node


def _rows(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The op that keeps rows of this gradient, and what it takes but for the table."""
    if len(node.users) != 1:
        return None
    a = arguments(node) if node.op == "call_function" else {}
    if node.target is ops.embedding_backward.default:
        return ops.own_keep.default, (a["grad"], a["ids"])
    if node.target is aten.embedding_dense_backward.default and not a["scale_grad_by_freq"]:
        return ops.own_keep.default, (a["grad_output"], a["indices"])
    if node.target is ops.lookup_table_gradient.default:
        return ops.own_keep_scores.default, tuple(node.args)
    return None
