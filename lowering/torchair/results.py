"""Results that a GE graph need not or cannot make: inputs handed through, views, numbers, None.

Graphs of AOTAutograd return what the backward will need, and much of that is inputs and sizes. torchair would describe
them in terms of symbols that must be inputs of their own, which the number of packed rows is not. So they are taken out
of the graph before it is converted, and put back around the compiled one.

A result that is a view of an input or of another result must really be one: AOTAutograd reads the strides of what it
gets, and makes the user's view with them. A GE graph writes each result to a buffer of its own, so such views are taken
afterwards.
"""

from __future__ import annotations

import operator
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


@dataclass(frozen=True)
class View:
    """What these ops make of another result, one after the other."""

    base: FromGraph | FromInput
    nodes: tuple[fx.Node, ...]
    calls: tuple[tuple[Any, Any], ...]  # their arguments, which a node forgets when it is erased


Result = FromGraph | FromInput | Number | Constant | View


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
    bases = {*inputs, *(value for value in returned if isinstance(value, fx.Node))}
    results = [_result(value, inputs, made, bases) for value in returned]
    _own_memory(graph, output, made, inputs)
    output.args = (tuple(made),)
    for result in results:
        _erase_unused(result.nodes if isinstance(result, View) else ())
    module.recompile()
    known = sources(inputs) if any(isinstance(r, (Number, View)) for r in results) else {}

    def whole(given: Sequence[Any], of_graph: Sequence[Any]) -> Any:
        sizes = {symbol: size_of(given, *source) for symbol, source in known.items()}
        values = [_value(result, given, of_graph, sizes) for result in results]
        return values[0] if single else values

    return module, whole


def _result(value: Any, inputs: list[fx.Node], made: list[fx.Node], bases: set[fx.Node]) -> Result:
    if not isinstance(value, fx.Node):
        return Constant(value)
    if value in inputs:
        return FromInput(inputs.index(value))
    known = value.meta.get("val")
    if isinstance(known, (torch.SymInt, int)):
        return Number(_expression(known))
    base, nodes = _view_of(value, bases)
    if nodes:
        found = _result(base, inputs, made, set())
        assert isinstance(found, (FromGraph, FromInput))
        return View(found, nodes, tuple((node.args, node.kwargs) for node in nodes))
    if value not in made:
        made.append(value)
    return FromGraph(made.index(value))


def _view_of(value: fx.Node, bases: set[fx.Node]) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The farthest of `bases` that a value is a view of, and the ops that lead from there."""
    base = value
    nodes: tuple[fx.Node, ...] = ()
    walked: list[fx.Node] = []
    while (source := _viewed(value)) is not None:
        walked.insert(0, value)
        value = source
        if value in bases:
            base, nodes = value, tuple(walked)
    return base, nodes


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a node is a view of; only sizes go into it besides."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    if node.target is operator.getitem:
        return node.args[0] if _viewed(node.args[0]) is not None else None
    schema = getattr(node.target, "_schema", None)
    alias = schema.arguments[0].alias_info if schema is not None and schema.arguments else None
    others = [n for n in node.all_input_nodes if n is not node.args[0]]
    sizes = all(isinstance(n.meta.get("val"), (torch.SymInt, int)) for n in others)
    return node.args[0] if alias is not None and not alias.is_write and sizes else None


def _erase_unused(nodes: Sequence[fx.Node]) -> None:
    """The ops of a view stay known by their arguments; the graph need not take it."""
    for node in reversed(nodes):
        if node.users or _torch.is_erased(node):
            return
        node.graph.erase_node(node)


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


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
    if isinstance(result, View):
        value = _value(result.base, given, made, sizes)
        for node, (args, kwargs) in zip(result.nodes, result.calls, strict=True):
            value = _replayed(node.target, value, args, kwargs, sizes)
        return value
    return int(result.expression.subs(sizes)) if isinstance(result, Number) else result.value


def _replayed(target: Any, x: Any, args: Any, kwargs: Any, sizes: dict[sympy.Symbol, int]) -> Any:
    def known(other: fx.Node) -> Any:
        return x if other is args[0] else int(_expression(other.meta["val"]).subs(sizes))

    # A GE graph makes results dense, whatever strides the op it converts would have left.
    target = aten.reshape.default if target is aten.view.default else target
    return target(*fx.map_arg(args, known), **fx.map_arg(kwargs, known))
