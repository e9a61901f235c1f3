"""Inputs whose influence cancels keep the gradient of zero that eager gives them.

A number added to all scores of a softmax changes nothing, and the packed graph leaves it out. Eager still hands back a
gradient, which an optimizer treats otherwise than none: it decays the parameter, and moves it by its momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ....graph.nodes import tensor
from ..calls import shape

aten = torch.ops.aten
Reach = list[set[fx.Node]]


def reach(graph: fx.Graph, trained: Callable[[fx.Node], bool]) -> Reach:
    """Of each output, the trained inputs that it is computed from."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and trained(node):
            found[node] = {node}
        elif not (isinstance(value, torch.Tensor) and not value.is_floating_point()) and node.target not in _ENDS:
            found[node] = {x for n in node.all_input_nodes for x in found.get(n, ())}
    return [found.get(x, set()) if isinstance(x, fx.Node) else set() for x in _outputs(graph)]


def tie(graph: fx.Graph, before: Reach, after: Reach) -> dict[fx.Node, fx.Node]:
    """Let outputs depend on inputs they lost, by numbers that are never chosen: what was added, on whose behalf."""
    (output,) = graph.find_nodes(op="output")
    results = _outputs(graph)
    added: dict[fx.Node, fx.Node] = {}
    with graph.inserting_before(output):
        for i, (had, has) in enumerate(zip(before, after, strict=True)):
            result = results[i]
            for x in sorted(had - has, key=lambda n: n.name):
                made = _chosen_never(graph, x, results[i]) if 0 not in shape(x) else [results[i]]
                results[i] = made[-1]
                added |= {n: result for n in made if n is not result}
    if added:
        output.args = (type(output.args[0])(results) if isinstance(output.args[0], (list, tuple)) else results[0],)
    return added


def _chosen_never(graph: fx.Graph, x: fx.Node, result: fx.Node) -> list[fx.Node]:
    value, wanted = tensor(x), tensor(result)
    assert value is not None and wanted is not None
    never = graph.call_function(aten.full.default, ([], False), {"dtype": torch.bool, "device": wanted.device})
    flat = graph.call_function(aten.reshape.default, (x, [-1]))
    some = graph.call_function(aten.select.int, (flat, 0, 0))
    cast = graph.call_function(aten._to_copy.default, (some,), {"dtype": wanted.dtype})
    return [never, flat, some, cast, graph.call_function(aten.where.self, (never, cast, result))]


_ENDS = (aten.detach.default,)


def _outputs(graph: fx.Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    given = output.args[0]
    return list(given) if isinstance(given, (list, tuple)) else [given]
