"""Evaluate mask arithmetic that depends on no input once, at compile time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..catalogue import register
from ..context import Context
from ..graphs import regions, returned, tensor
from ..pass_base import Pass, Phase
from ..prologue import add_input


@register
@dataclass(frozen=True)
class FoldMasks(Pass):
    """Evaluate mask arithmetic that depends on no input (causal masks, position grids) once, at compile time."""

    name = "fold-masks"
    phase = Phase.PRE_GRAD
    after = ("remove-noops", "fold-views")
    before = ("eliminate-common",)

    max_elements: int = 1 << 20  # a larger constant costs more memory than it saves time
    min_ops: int = 2  # a lone `arange` is as cheap as reading it from memory

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        constant = self._constants(graph)
        visible = returned(graph)
        made: list[tuple[torch.Tensor, fx.Node]] = []
        for node in list(graph.nodes):
            depth = constant.get(node, 0)
            frontier = [u for u in node.users if u not in constant]
            if depth < self.min_ops or not frontier or node in visible:
                continue
            value = tensor(node)
            if value is None or value.numel() > self.max_elements:
                text = f"%{node.name} is constant, but larger than {self.max_elements} elements"
                ctx.missed("constant-too-large", text, node, "raise fold-masks{max_elements=...} if that is worth it")
                continue
            with ctx.rewrite("constant", *_cone(node, constant)):
                node.replace_all_uses_with(_input_for(graph, node, made))
                _erase_unused(graph, node)

    def _constants(self, graph: fx.Graph) -> dict[fx.Node, int]:
        """Nodes whose value is known now, with the number of ops it takes to make them."""
        region = regions(graph)
        found: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if not _foldable(node) or region[node] != 0:
                continue
            if all(n in found for n in node.all_input_nodes):
                found[node] = 1 + sum(found[n] for n in node.all_input_nodes)
        return found


def _input_for(graph: fx.Graph, node: fx.Node, made: list[tuple[torch.Tensor, fx.Node]]) -> fx.Node:
    """An input that holds the node's value; layers that build the same mask share one."""
    value = _evaluate(node)
    for other, source in made:
        if other.dtype == value.dtype and torch.equal(other, value):
            return source
    source = add_input(graph, "folded", node.meta["val"], lambda _: value)
    made.append((value, source))
    return source


def _foldable(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace != "aten" or _torch.is_random(node) or not _torch.is_functional(node) or node.is_impure():
        return False
    value = tensor(node)
    # Masks and index grids; real-valued constants such as position encodings are the model's, not ours to move.
    return value is not None and value.device.type == "cpu" and all(isinstance(s, int) for s in value.shape)


def _evaluate(node: fx.Node) -> torch.Tensor:
    values: dict[fx.Node, Any] = {}
    todo = [node]
    while todo:
        at = todo[-1]
        waiting = [n for n in at.all_input_nodes if n not in values]
        if waiting:
            todo += waiting
            continue
        args = fx.map_arg(at.args, lambda n: values[n])
        kwargs = fx.map_arg(at.kwargs, lambda n: values[n])
        with torch.no_grad():
            values[at] = at.target(*args, **kwargs)  # type: ignore[operator]
        todo.pop()
    return values[node].clone().contiguous()


def _cone(node: fx.Node, constant: dict[fx.Node, int]) -> list[fx.Node]:
    seen, todo = [], [node]
    while todo:
        at = todo.pop()
        if at not in seen:
            seen.append(at)
            todo += [n for n in at.all_input_nodes if n in constant]
    return seen


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    todo = [node]
    while todo:
        at = todo.pop()
        if not at.users and at.op == "call_function" and at in graph.nodes:
            sources = at.all_input_nodes
            graph.erase_node(at)
            todo += sources
