"""Inputs whose influence cancels keep the gradient of zero that eager gives them.

A number added to all scores of a softmax changes nothing, and the packed graph leaves it out. Eager still hands back a
gradient, which an optimizer treats otherwise than none: it decays the parameter, and moves it by its momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .... import _torch
from ....graph.nodes import tensor
from ..calls import shape

aten = torch.ops.aten
Reach = list[set[fx.Node]]


def reach(graph: fx.Graph, outputs: Sequence[Any], trained: Callable[[fx.Node], bool], surely: bool = False) -> Reach:
    """Of each output, the trained inputs that it is computed from; `surely`: those that gradients come back to."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and trained(node):
            found[node] = {node}
        elif node.op == "call_function" and _may_have_gradient(node):
            sources = [n for n in node.all_input_nodes if found.get(n)]
            found[node] = {x for n in sources if not surely or _torch.carries_gradient(node, n) for x in found[n]}
    return [found.get(x, set()) if isinstance(x, fx.Node) else set() for x in outputs]


def _may_have_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex()


def tie(graph: fx.Graph, before: Callable[[bool], Reach], after: Reach) -> dict[fx.Node, fx.Node]:
    """Let outputs depend on inputs they lost, by numbers that are never chosen: what was added, on whose behalf."""
    (output,) = graph.find_nodes(op="output")
    results = outputs_of(graph)
    added: dict[fx.Node, fx.Node] = {}
    if all(had <= has for had, has in zip(before(False), after, strict=True)):
        return added
    with graph.inserting_before(output):
        for i, (had, has) in enumerate(zip(before(True), after, strict=True)):
            result = results[i]
            for x in sorted(had - has, key=lambda n: n.name):
                made = _chosen_never(graph, x, results[i], tensor(result)) if 0 not in shape(x) else [results[i]]
                results[i] = made[-1]
                added |= {n: result for n in made if n is not result}
    if added:
        output.args = (type(output.args[0])(results) if isinstance(output.args[0], (list, tuple)) else results[0],)
    return added


def _chosen_never(graph: fx.Graph, x: fx.Node, result: fx.Node, wanted: torch.Tensor | None) -> list[fx.Node]:
    assert wanted is not None
    never = graph.call_function(aten.full.default, ([], False), {"dtype": torch.bool, "device": wanted.device})
    flat = graph.call_function(aten.reshape.default, (x, [-1]))
    some = graph.call_function(aten.select.int, (flat, 0, 0))
    cast = graph.call_function(aten._to_copy.default, (some,), {"dtype": wanted.dtype})
    return [never, flat, some, cast, graph.call_function(aten.where.self, (never, cast, result))]


def outputs_of(graph: fx.Graph) -> list[Any]:
    (output,) = graph.find_nodes(op="output")
    given = output.args[0]
    return list(given) if isinstance(given, (list, tuple)) else [given]
