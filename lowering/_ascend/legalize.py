"""Calls of turbogr's ops that their AscendC kernels do not take, spelled in ATen ops that GE has."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten, turbogr = torch.ops.aten, torch.ops.turbogr
REAL = (torch.float16, torch.bfloat16, torch.float32)


def legalize(graph: fx.Graph) -> None:
    """Rows of ids and masks, and gradients whose number of rows is known only when the graph runs."""
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
