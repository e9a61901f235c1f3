"""Calls that neither torchair nor turbogr's AscendC kernels take as they are, spelled in ops that GE has."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .exchanges import size_node, spell_exchanges

aten, turbogr = torch.ops.aten, torch.ops.turbogr
REAL = (torch.float16, torch.bfloat16, torch.float32)


def legalize(graph: fx.Graph) -> None:
    """Rows of ids and masks, gradients whose number of rows is known only when the graph runs, exchanges of rows."""
    for node in graph.find_nodes(op="call_function", target=turbogr.gather_rows.default):
        x, rows = node.args
        dtype = x.meta["val"].dtype
        if dtype == torch.bool:  # GE gathers bytes, and no bools
            with graph.inserting_before(node):
                wide = _call(graph, aten._to_copy.default, (x,), x.meta["val"].to(torch.uint8), dtype=torch.uint8)
                found = _call(graph, aten.index_select.default, (wide, 0, rows), node.meta["val"].to(torch.uint8))
            _replace(graph, node, aten._to_copy.default, (found,), dtype=dtype)
        elif dtype not in REAL:
            _replace(graph, node, aten.index_select.default, (x, 0, rows))
    for node in graph.find_nodes(op="call_function", target=turbogr.scatter_rows.default):
        x, rows, count = node.args
        if x.meta["val"].dtype in REAL and isinstance(count, int):
            continue
        with graph.inserting_before(node):
            zeros = _call(graph, aten.new_zeros.default, (x, [count, *x.meta["val"].shape[1:]]), node.meta["val"])
        _replace(graph, node, aten.index_add.default, (zeros, 0, rows, x))
    for node in graph.find_nodes(op="call_function", target=turbogr.embedding_backward.default):
        _add_rows(graph, node, *node.args)
    spell_exchanges(graph)


def _add_rows(graph: fx.Graph, node: fx.Node, slopes: fx.Node, ids: fx.Node, count: Any, padding: int) -> None:
    """The gradient of rows that came from other ranks: how many there are, only the run knows."""
    if isinstance(count, int):
        return
    value, rows = slopes.meta["val"].flatten(0, -2), ids.meta["val"].reshape(-1)
    with graph.inserting_before(node):
        width = size_node(graph, slopes, ids.meta["val"].dim())
        flat = _call(graph, aten.reshape.default, (ids, [-1]), rows)
        added = _call(graph, aten.reshape.default, (slopes, [-1, width]), value)
        if padding >= 0:
            mask = _call(graph, aten.eq.Scalar, (flat, padding), rows == padding)
            mask = _call(graph, aten.unsqueeze.default, (mask, 1), mask.meta["val"].unsqueeze(1))
            added = _call(graph, aten.masked_fill.Scalar, (added, mask, 0), added.meta["val"])
        zeros = _call(graph, aten.new_zeros.default, (slopes, [count, width]), node.meta["val"])
    _replace(graph, node, aten.index_add.default, (zeros, 0, flat, added))


def _call(graph: fx.Graph, target: Any, arguments: tuple[Any, ...], value: Any, **named: Any) -> fx.Node:
    node = graph.call_function(target, arguments, named)
    node.meta["val"] = value
    return node


def _replace(graph: fx.Graph, node: fx.Node, target: Any, arguments: tuple[Any, ...], **named: Any) -> None:
    with graph.inserting_before(node):
        new = _call(graph, target, arguments, node.meta["val"], **named)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
