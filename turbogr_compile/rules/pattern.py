"""Patterns: a traced function, and how its arguments are read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import fx

from .._torch import without_autocast
from ..capture import trace as tracing
from ..graph.phases import Vocabulary

Path = tuple[Any, ...]  # argument name, then positions inside nested lists
_SCALARS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)


def is_value(argument: Any) -> bool:
    """A node that computes tensors; sizes and numbers computed in the graph count as literals."""
    return isinstance(argument, fx.Node) and not isinstance(argument.meta.get("val"), _SCALARS)


def holds_values(argument: Any) -> bool:
    if isinstance(argument, (list, tuple)):
        return any(holds_values(a) for a in argument)
    return is_value(argument)


@lru_cache(maxsize=1024)
def _parameters(target: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((a.name, a.default_value) for a in target._schema.arguments)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Every argument by name, defaults filled in from the schema."""
    if not hasattr(node.target, "_schema"):
        return {str(i): a for i, a in enumerate(node.args)} | dict(node.kwargs)
    parameters = _parameters(node.target)
    given = {name: value for (name, _), value in zip(parameters, node.args, strict=False)} | dict(node.kwargs)
    return {name: given.get(name, default) for name, default in parameters}


def literals(node: fx.Node) -> Iterator[tuple[Path, Any]]:
    """The arguments that are not tensors, with where they are."""

    def walk(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
        if isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                yield from walk((*path, i), v)
        elif not is_value(value):
            yield path, value

    for name, value in arguments(node).items():
        yield from walk((name,), value)


@dataclass(frozen=True, eq=False)
class Pattern:
    """A traced function: what to look for.

    `positions` says where literal holes sit. A strict pattern, traced on the tensors of one place, compares every
    literal; a generic one only binds the holes.
    """

    module: fx.GraphModule
    positions: dict[tuple[fx.Node, Path], str] = field(default_factory=dict)
    strict: bool = False
    example: dict[str, Any] = field(default_factory=dict)  # values of the literals it was traced with

    @cached_property
    def inputs(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.module.graph.nodes if n.op == "placeholder")

    @cached_property
    def outputs(self) -> tuple[Any, ...]:
        result = self.module.graph.output_node().args[0]
        return tuple(result) if isinstance(result, (list, tuple)) else (result,)

    @cached_property
    def cones(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """For each op, itself and every op it is computed from."""
        cones: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.module.graph.nodes:
            if node.op == "call_function" and is_value(node):
                below = (cones[n] for n in node.all_input_nodes if n in cones)
                cones[node] = frozenset({node}).union(*below)
        return cones

    @cached_property
    def ops(self) -> frozenset[fx.Node]:
        return frozenset().union(*(self.cones.get(o, ()) for o in self.outputs))

    @cached_property
    def required(self) -> frozenset[Any]:
        return frozenset(n.target for n in self.ops)

    @cached_property
    def sinks(self) -> tuple[fx.Node, ...]:
        """Outputs that no other output is computed from; the largest first, from which matching starts."""
        outputs = [o for o in dict.fromkeys(self.outputs) if o in self.cones]
        top = [o for o in outputs if not any(o in self.cones[p] for p in outputs if p is not o)]
        return tuple(sorted(top, key=lambda o: -len(self.cones[o])))

    def skeleton(self) -> list[Any]:
        """What the generic step compares; equal skeletons find the same places."""
        place = {n: i for i, n in enumerate(self.module.graph.nodes)}
        named = {(place[n], path): name for (n, path), name in self.positions.items()}
        ops = sorted(self.ops)
        nodes = [(place[n], n.target, [place[a] for a in n.all_input_nodes]) for n in ops]
        return [nodes, sorted(named.items(), key=str), [place.get(o) for o in self.outputs]]


def trace_holes(
    fn: Callable[..., Any], values: list[torch.Tensor], which: Sequence[int], bound: dict[str, Any], words: Vocabulary
) -> fx.GraphModule:
    """Trace `fn`, whose tensor hole i is `values[which[i]]`; one tensor may fill several holes."""
    seen: set[int] = set()
    distinct = []
    for value in values:
        # Two nodes may share one fake tensor; a tracer tells its inputs apart by identity.
        distinct.append(value.detach() if id(value) in seen else value)
        seen.add(id(value))
    with without_autocast():  # of the code that is being compiled; a rule says its own casts
        whole = lambda *tensors: fn(*(tensors[i] for i in which), **bound)  # noqa: E731
        module = tracing.trace(whole, distinct, words.phase, words.decompositions)
    holes = [p.name for p in inspect.signature(fn).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        node._rename(holes[list(which).index(i)])
        node.target = node.name
    return module


def literal_of(argument: Any) -> Any:
    """A literal argument as a number; sizes computed by nodes are read from their metadata."""
    if isinstance(argument, (list, tuple)):
        return [literal_of(a) for a in argument]
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument
