"""Lookups in tables of one process whose gradients are rows, as other passes know lookups."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...pipeline.context import Context
from ...runtime.sharding.table import table_of

aten, ops = torch.ops.aten, torch.ops.turbogr
TARGETS = ("cpu",)  # whose graphs of the backward row-gradients sees; elsewhere a lookup stays one op


def own_lookups(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=ops.own_lookup.default))


def see_tables(graph: fx.Graph, ctx: Context) -> bool:
    """Whether there are lookups; they become embeddings, all of a table in the same value."""
    together: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in own_lookups(graph) if ctx.target in TARGETS else ():
        weight, receipts, _, number = node.args
        together.setdefault((weight, receipts, number), []).append(node)
    for given, nodes in together.items():
        table = table_of(given[2])
        with ctx.rewrite("see table", *nodes):
            with graph.inserting_before(nodes[0]):
                whole = graph.call_function(ops.own_table.default, given)
            for node in nodes:
                with graph.inserting_before(node):
                    found = graph.call_function(aten.embedding.default, (whole, node.args[2], table.padding))
                node.replace_all_uses_with(found)
                graph.erase_node(node)
        ctx.applied("own-table", f"{len(nodes)} lookups in {table.name!r}: gradients are of rows", nodes[0])
    return bool(own_lookups(graph)) or bool(together)
