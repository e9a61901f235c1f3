"""Evaluate mask arithmetic that depends on no input once, at compile time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..graph.nodes import is_storage, is_view, regions, returned, sizes_from, tensor
from ..graph.phases import Phase
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from ..runtime.prologue import add_input, reading

aten = torch.ops.aten


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
        constant = _constants(graph)
        stored: list[tuple[torch.Tensor, fx.Node]] = []
        values: dict[fx.Node, torch.Tensor] = {}
        chosen = [n for n in _frontier(graph, constant) if constant[n] >= self.min_ops and self._affordable(n, ctx)]
        for node in chosen:
            _evaluate(node, values)
        for node in chosen:
            with ctx.rewrite("constant", *_made_from(node, constant)):
                node.replace_all_uses_with(_input_for(graph, node, values[node], stored))
                _erase_unused(graph, node)

    def _affordable(self, node: fx.Node, ctx: Context) -> bool:
        if node.meta["val"].numel() <= self.max_elements:
            return True
        text = f"%{node.name} is constant, but larger than {self.max_elements} elements"
        ctx.missed("constant-too-large", text, node, "raise fold-masks{max_elements=...} if that is worth it")
        return False


def _constants(graph: fx.Graph) -> dict[fx.Node, int]:
    """Nodes whose value is known now, with the number of ops, views aside, that it takes to make them."""
    region = regions(graph)
    found: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if _foldable(node) and region[node] == 0 and all(n in found for n in node.all_input_nodes):
            found[node] = (not is_view(node)) + sum(found[n] for n in node.all_input_nodes)
    return found


def _foldable(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace != "aten" or _torch.is_random(node) or node.is_impure() or not _torch.is_functional(node):
        return False
    value = tensor(node)
    if value is None or value.device.type != "cpu" or is_storage(value):
        return False
    return all(isinstance(s, int) for s in value.shape)


def _frontier(graph: fx.Graph, constant: dict[fx.Node, int]) -> Iterator[fx.Node]:
    """Constants that the rest of the graph reads; their views stay in the graph."""
    visible = returned(graph)
    for node in constant:
        if not is_view(node) and node not in visible and any(u not in constant for u in _readers(node, constant)):
            yield node


def _readers(node: fx.Node, constant: dict[fx.Node, int]) -> list[fx.Node]:
    """Users of the node, and of constant views of it."""
    found: list[fx.Node] = []
    for user in node.users:
        found += _readers(user, constant) if user in constant and is_view(user) else [user]
    return found


def _input_for(
    graph: fx.Graph, node: fx.Node, value: torch.Tensor, stored: list[tuple[torch.Tensor, fx.Node]]
) -> fx.Node:
    """An input that holds the value; layers that build the same mask share one."""
    kept = _without_repetition(value)
    shared = [] if sizes_from(node) else stored
    source = next((s for other, s in shared if _same(other, kept)), None)
    if source is None:
        fake = node.meta["val"].fake_mode.from_tensor(kept, static_shapes=True)
        source = add_input(graph, "folded", fake, reading(lambda _: kept))
        stored.append((kept, source))
    if kept.shape == value.shape:
        return source
    with graph.inserting_before(node):
        return graph.call_function(aten.expand.default, (source, list(value.shape)))


def _without_repetition(value: torch.Tensor) -> torch.Tensor:
    """One copy of what a mask repeats, for every sequence or head of the batch."""
    for dim in range(value.ndim):
        first = value.narrow(dim, 0, 1) if value.shape[dim] > 1 else value
        if _same(first.expand_as(value), value):
            value = first
    return value.contiguous()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit that arithmetic can see: 0.0 and -0.0 are different divisors."""
    if a.dtype != b.dtype or not torch.equal(a, b):
        return False
    return not a.dtype.is_floating_point or torch.equal(a.signbit(), b.signbit())


def _evaluate(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> None:
    todo = [node]
    while todo:
        at = todo[-1]
        waiting = [n for n in at.all_input_nodes if n not in values]
        if waiting:
            todo += waiting
            continue
        args: Any = fx.map_arg(at.args, lambda n: values[n])
        kwargs: Any = fx.map_arg(at.kwargs, lambda n: values[n])
        assert isinstance(at.target, torch._ops.OpOverload)
        with torch.no_grad():
            values[at] = at.target(*args, **kwargs)
        todo.pop()


def _made_from(node: fx.Node, constant: dict[fx.Node, int]) -> list[fx.Node]:
    seen: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        at = todo.pop()
        if at not in seen:
            seen[at] = None
            todo += [n for n in at.all_input_nodes if n in constant]
    return list(seen)


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    todo = [node]
    while todo:
        at = todo.pop()
        if not at.users and at.op == "call_function" and not _torch.is_erased(at):
            sources = at.all_input_nodes
            graph.erase_node(at)
            todo += sources
