"""What recognition may ask about a graph beyond its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import fx

from ...._torch import outside_compilation
from ....graph.nodes import TRAINABLE
from ..calls import called, is_tensor, op, rank_of, value_of
from .calls import is_random, shape
from .formula import ZERO, Formula, Index, Sizes
from .indexing import broadcast, follow
from .language import NeedsSplit


class Facts(Protocol):
    """Answers of the engine."""

    def is_sequence(self, node: fx.Node, dim: int) -> bool:
        """Does this dim run over sequences of the batch (and not over heads, say)?"""

    def gradients_reach(self, node: fx.Node) -> bool:
        """May a gradient flow into this value? Nothing is speculated about it then."""

    def example(self, node: fx.Node) -> torch.Tensor | None:
        """Its value in the call that is being compiled; None where that is not known."""

    def is_constant(self, node: fx.Node) -> bool:
        """Made from nothing but numbers, so that `example` holds for every batch?"""


class Constants:
    """Nodes of a graph that are made from nothing but numbers, and their values."""

    def __init__(self, graph: fx.Graph) -> None:
        self._owner = graph.owning_module
        self._made: set[fx.Node] = set()
        self._values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            made = node.op == "get_attr" and not node.meta.get(TRAINABLE) and not self._requires_grad(node)
            made = made or (node.op == "call_function" and not is_random(node))
            if made and all(n in self._made for n in node.all_input_nodes):
                self._made.add(node)

    def _requires_grad(self, node: fx.Node) -> bool:
        return bool(getattr(getattr(self._owner, str(node.target), None), "requires_grad", False))

    def __contains__(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        fixed = isinstance(value, torch.Tensor) and all(isinstance(s, int) for s in value.shape)
        return fixed and node in self._made

    def value(self, node: fx.Node) -> torch.Tensor | None:
        """From its operands, which are constants too; None where that does not give what the graph holds."""
        try:
            with outside_compilation(), torch.no_grad():
                found = self._value(node)
        except (RuntimeError, TypeError, ValueError):
            return None  # another default dtype than the graph was captured with, say
        return found if isinstance(found, torch.Tensor) and found.dtype == value_of(node).dtype else None

    def _value(self, node: fx.Node) -> Any:
        todo = [node]
        while todo:
            at = todo[-1]
            waiting = [n for n in at.all_input_nodes if n not in self._values]
            if waiting:
                todo += waiting
                continue
            todo.pop()
            if at.op == "get_attr":
                self._values[at] = getattr(self._owner, str(at.target))
            elif at not in self._values:
                args, kwargs = fx.map_arg((at.args, at.kwargs), self._values.__getitem__)
                self._values[at] = called(at)(*args, **kwargs)
        return self._values[node]


class GraphFacts:
    """Answers from a graph alone and, where there are inputs, from running it on them without gradients."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any] | None = None, sequence_dim: int = 0) -> None:
        self.module, self.inputs, self.sequence_dim = module, inputs, sequence_dim
        self._reached: set[fx.Node] = set()
        for node in module.graph.nodes:
            if node.meta.get(TRAINABLE) or any(n in self._reached for n in node.all_input_nodes):
                self._reached.add(node)
        self._constants = Constants(module.graph)
        self._values: dict[fx.Node, Any] | None = None

    def is_sequence(self, node: fx.Node, dim: int) -> bool:
        """Does it come from the dim of an input that runs over sequences?"""
        axis = Formula.axis("b")
        sizes = Sizes({"b": shape(node)[dim]})
        todo = [(node, tuple(axis if d == dim else ZERO for d in range(rank_of(node))))]
        while todo:
            try:
                at, index = follow(sizes, *todo.pop())
            except NeedsSplit:
                continue
            if at.op == "placeholder" and len(index) > self.sequence_dim and index[self.sequence_dim] == axis:
                return True
            todo += [(x, i) for x, i in _row_by_row(at, index) if axis in i]
        return False

    def gradients_reach(self, node: fx.Node) -> bool:
        return node in self._reached

    def is_constant(self, node: fx.Node) -> bool:
        return node in self._constants

    def example(self, node: fx.Node) -> torch.Tensor | None:
        if node in self._constants:
            return self._constants.value(node)
        if self._values is None and self.inputs is not None:
            with outside_compilation(), torch.no_grad():
                self._values = values_of(self.module, self.inputs)
        found = self._values.get(node) if self._values is not None else None
        return found if isinstance(found, torch.Tensor) else None


def _row_by_row(node: fx.Node, index: Index) -> list[tuple[fx.Node, Index]]:
    """Operands from which a row of a result is computed, with the index of that row."""
    match op(node):
        case "linear" | "layer_norm":
            return [(node.all_input_nodes[0], (*index[:-1], ZERO))]
        case "embedding":
            return [(node.all_input_nodes[1], index[:-1])]
        case "dropout" | "_to_copy":
            return [(node.all_input_nodes[0], index)]
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return []
    return [(n, broadcast(n, index)) for n in node.all_input_nodes if is_tensor(n)]


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def values_of(module: fx.GraphModule, inputs: Sequence[Any]) -> dict[fx.Node, Any]:
    """Every node's value for some inputs, with gradients where these have them."""
    recorder = _Recorder(module)
    recorder.run(*inputs)
    return recorder.values
