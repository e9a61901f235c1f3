"""Which ops of a graph are settled by its inputs, and what is to be asked of these."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import BuiltinFunctionType
from typing import Any

import sympy
import torch
from torch import fx

from ... import _torch
from ...kernels.contract import Question
from ...kernels.declare import CONTRACTS, KERNELS, NAMESPACE
from .sizes import MOST, Bounds, Undecided, size_of

# Whose results have the sizes that were computed for them at compile time.
KNOWN = frozenset(("aten", "prims", NAMESPACE))
UNFORESEEN = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclass(frozen=True, eq=False)
class Known:
    """What is known of a tensor when a graph is compiled. `name` is that of an input."""

    name: str
    dtype: torch.dtype
    shape: tuple[Any, ...]
    device: torch.device
    layout: torch.layout = torch.strided

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> Any:
        return math.prod(self.shape)

    def element_size(self) -> int:
        return self.dtype.itemsize


@dataclass
class Proof:
    """Of one graph: `settled` has its ops, with all of their arguments, whose questions about entries are `asked`."""

    graph: fx.Graph
    settled: dict[fx.Node, tuple[Any, ...]] = field(default_factory=dict)
    asked: list[Question] = field(default_factory=list)

    def __post_init__(self) -> None:
        for node in self._foreseen():
            if _has_kernel(node) and (found := self._prove(node)) is not None:
                self.settled[node], questions = found
                self.asked += questions

    @cached_property
    def env(self) -> Any:
        return _torch.shape_env_of(self.graph)

    @cached_property
    def found(self) -> Mapping[sympy.Symbol, tuple[fx.Node, int | None]]:
        """Where each symbol is found: an input that is this number, or that has it for the size of a dim."""
        places: dict[sympy.Symbol, tuple[fx.Node, int | None]] = {}
        for node in self.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
            for dim, size in sizes:
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    places.setdefault(size.node.expr, (node, dim))
        return places

    @cached_property
    def bounds(self) -> Bounds:
        """Of the sizes of inputs; that they hold is asked in every call."""
        return {symbol: (_torch.least_of(self.env, symbol), MOST) for symbol in self.found}

    @cached_property
    def tensors(self) -> list[fx.Node]:
        """Inputs that tell sizes and dtypes of settled ops, and those in whose sizes symbols are found."""
        return [node for node in self._inputs if isinstance(node.meta.get("val"), torch.Tensor)]

    @cached_property
    def numbers(self) -> list[fx.Node]:
        """Inputs that are such sizes."""
        return [node for node in self._inputs if isinstance(node.meta.get("val"), (int, torch.SymInt))]

    @cached_property
    def _inputs(self) -> list[fx.Node]:
        seen: set[fx.Node] = {node for node, _ in self.found.values()}
        todo = list(self.settled)
        while todo:
            node = todo.pop()
            if node not in seen:
                seen.add(node)
                todo += node.all_input_nodes
        return [node for node in self.graph.find_nodes(op="placeholder") if node in seen]

    @property
    def operands(self) -> Iterator[fx.Node]:
        return (x for node in self.settled for x in node.all_input_nodes)

    def _foreseen(self) -> Iterator[fx.Node]:
        """Up to the first op of somebody else, or that writes, or whose sizes follow from entries."""
        for node in self.graph.nodes:
            if node.op == "call_function" and not _is_foreseen(node):
                return
            if node.op not in ("placeholder", "get_attr", "call_function"):
                return
            yield node

    def _prove(self, node: fx.Node) -> tuple[tuple[Any, ...], list[Question]] | None:
        contract = CONTRACTS[name_of(node)]
        try:
            given = _arguments(node)
            questions = contract.asked(*(self._known(x) for x in given))
        except (Undecided, ValueError, IndexError, TypeError, AttributeError):
            return None  # the op checks for itself, and says what is wrong
        parts: list[Any] = [part for question in questions for part in question]
        computed = any(isinstance(part, Known) and not part.name for part in parts)
        return None if computed else (given, questions)

    def _known(self, x: Any) -> Any:
        """An argument as its contract takes it."""
        if isinstance(x, (list, tuple)):
            return [self._known(part) for part in x]
        if not isinstance(x, fx.Node):
            return x
        value: Any = x.meta.get("val")
        if isinstance(value, (int, torch.SymInt)):
            return size_of(value, self.bounds)
        if not _is_plain(value):
            raise Undecided
        shape = tuple(size_of(size, self.bounds) for size in value.shape)
        return Known(x.name if x.op == "placeholder" else "", value.dtype, shape, value.device)


def name_of(node: fx.Node) -> str:
    """Of an op of turbogr."""
    assert isinstance(node.target, torch._ops.OpOverload)
    return str(node.target._schema.name).rpartition(":")[2]


def _has_kernel(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace == NAMESPACE
        and target._overloadname == "default"
        and name_of(node) in KERNELS
    )


def _is_foreseen(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return (
            target.namespace in KNOWN
            and _torch.is_functional(node)
            and not any(tag in target.tags for tag in UNFORESEEN)
        )
    return target is operator.getitem or (
        isinstance(target, BuiltinFunctionType) and isinstance(node.meta.get("val"), (int, torch.SymInt))
    )


def _is_plain(value: Any) -> bool:
    """A tensor in the memory of this process, its numbers as they are written there."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not value.is_neg()
        and not value.is_conj()
    )


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """All arguments of an op in the order of its schema, as torch hands them on."""
    assert isinstance(node.target, torch._ops.OpOverload)
    given = []
    for place, argument in enumerate(node.target._schema.arguments):
        if place < len(node.args):
            value: Any = node.args[place]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise Undecided
        if str(argument.type) == "float" and type(value) is int:
            value = float(value)
        given.append(value)
    return tuple(given)
