"""Results that a GE graph need not or cannot make: inputs handed through, numbers, None.

Graphs of AOTAutograd return what the backward will need, and much of that is inputs and sizes. torchair would describe
them in terms of symbols that must be inputs of their own, which the number of packed rows is not. So they are taken out
of the graph before it is converted, and put back around the compiled one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from ... import _torch

aten = torch.ops.aten


@dataclass(frozen=True)
class FromGraph:
    place: int


@dataclass(frozen=True)
class FromInput:
    place: int


@dataclass(frozen=True)
class Number:
    """A size, from the sizes of inputs."""

    expression: sympy.Expr


@dataclass(frozen=True)
class Constant:
    value: Any


Result = FromGraph | FromInput | Number | Constant


def without_inputs(module: fx.GraphModule) -> tuple[fx.GraphModule, Callable[..., Any]]:
    """The module with only the results that are its own work, and what turns those into all results.

    The second takes the inputs of a call and what the graph made of them.
    """
    graph = module.graph
    inputs = graph.find_nodes(op="placeholder")
    output = next(iter(graph.find_nodes(op="output")))
    made: list[fx.Node] = []
    single = isinstance(output.args[0], fx.Node)
    returned = [output.args[0]] if single else list(output.args[0])
    results = [_result(value, inputs, made) for value in returned]
    _own_memory(graph, output, made, inputs)
    output.args = (tuple(made),)
    module.recompile()
    known = sources(inputs) if any(isinstance(r, Number) for r in results) else {}

    def whole(given: Sequence[Any], of_graph: Sequence[Any]) -> Any:
        sizes = {symbol: size_of(given, *source) for symbol, source in known.items()}
        values = [_value(result, given, of_graph, sizes) for result in results]
        return values[0] if single else values

    return module, whole


def _result(value: Any, inputs: list[fx.Node], made: list[fx.Node]) -> Result:
    if not isinstance(value, fx.Node):
        return Constant(value)
    if value in inputs:
        return FromInput(inputs.index(value))
    known = value.meta.get("val")
    if isinstance(known, (torch.SymInt, int)):
        return Number(known.node.expr if isinstance(known, torch.SymInt) else sympy.Integer(known))
    if value not in made:
        made.append(value)
    return FromGraph(made.index(value))


def _own_memory(graph: fx.Graph, output: fx.Node, made: list[fx.Node], inputs: list[fx.Node]) -> None:
    """Views of inputs become copies: a GE graph writes its results to buffers of its own."""
    memory = [node.meta["val"] for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
    for place, node in enumerate(made):
        if any(_torch.is_alias(node.meta["val"], x) for x in memory):
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            made[place] = copy


def sources(inputs: list[fx.Node]) -> dict[sympy.Symbol, tuple[int, int]]:
    """For each symbol an input that shows it: its place, and the dim, or -1 for a number."""
    found: dict[sympy.Symbol, tuple[int, int]] = {}
    for place, node in enumerate(inputs):
        value = node.meta.get("val")
        sizes: list[tuple[int, Any]] = [(-1, value)] if isinstance(value, torch.SymInt) else []
        if isinstance(value, torch.Tensor):
            sizes = list(enumerate(value.shape))
        for dim, size in sizes:
            expression = size.node.expr if isinstance(size, torch.SymInt) else None
            if isinstance(expression, sympy.Symbol):
                found.setdefault(expression, (place, dim))
    return found


def size_of(given: Sequence[Any], place: int, dim: int) -> int:
    return int(given[place]) if dim < 0 else int(given[place].shape[dim])


def _value(result: Result, given: Sequence[Any], made: Sequence[Any], sizes: dict[sympy.Symbol, int]) -> Any:
    if isinstance(result, FromGraph):
        return made[result.place]
    if isinstance(result, FromInput):
        return given[result.place]
    return int(result.expression.subs(sizes)) if isinstance(result, Number) else result.value
