"""Tensors with one entry for each looked-up row (ids, factors), to be computed without the rows themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..common.cross_entropy import SIZE, value_of

aten = torch.ops.aten


@dataclass(frozen=True)
class Writer:
    """Where new nodes go."""

    graph: fx.Graph

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def size(self, x: fx.Node, dim: int) -> Any:
        """A number, or the node that computes it."""
        size = value_of(x).shape[dim]
        return size if isinstance(size, int) else self.call(SIZE, x, dim)

    def times(self, a: Any, b: Any) -> Any:
        """Of sizes: numbers, or nodes that compute them."""
        return a * b if isinstance(a, int) and isinstance(b, int) else self.call(operator.mul, a, b)

    def plus(self, a: Any, b: int) -> Any:
        return a + b if isinstance(a, int) else self.call(operator.add, a, b)

    def range(self, end: Any, device: torch.device) -> fx.Node:
        return self.call(aten.arange.default, end, dtype=torch.int64, device=device)

    def number(self, x: fx.Node, number: float) -> fx.Node:
        return x if number == 1.0 else self.call(aten.mul.Tensor, x, number)


@dataclass(frozen=True)
class Plan:
    """How to compute a tensor.

    `spread` has an entry for each dim: None, or, for a dim that is computed with size one and stands for more, the size
    it stands for (a number or a node). Shared ids are spread over positions; nobody has to repeat them.
    """

    build: Callable[[Writer], fx.Node]
    spread: tuple[Any, ...]

    @classmethod
    def of(cls, node: fx.Node) -> Plan:
        """The node itself, or what it repeats."""
        if node.target in (aten.expand.default, aten.repeat.default) and isinstance(node.args[0], fx.Node):
            inner, sizes = cls.of(node.args[0]), node.args[1]
            assert isinstance(sizes, (list, tuple))
            grown = inner.repeated(node) if node.target is aten.repeat.default else inner.expanded(sizes, node)
            if grown is not None:
                return grown
        if node.target is aten.unsqueeze.default:
            source, dim = node.args[:2]
            return cls.of(source).unsqueezed(dim)  # type: ignore[arg-type]
        return cls(lambda _: node, (None,) * value_of(node).dim())

    @property
    def rank(self) -> int:
        return len(self.spread)

    def real(self) -> Plan:
        """With every dim at its size."""
        if all(s is None for s in self.spread):
            return self
        sizes = [-1 if s is None else s for s in self.spread]
        return Plan(lambda w: w.call(aten.expand.default, self.build(w), sizes), (None,) * self.rank)

    def then(self, target: Any, *args: Any, rank: int | None = None) -> Plan:
        real = self.real()
        return Plan(lambda w: w.call(target, real.build(w), *args), (None,) * (self.rank if rank is None else rank))

    def unsqueezed(self, dim: int) -> Plan:
        spread = (*self.spread[:dim], None, *self.spread[dim:])
        return Plan(lambda w: w.call(aten.unsqueeze.default, self.build(w), dim), spread)

    def permuted(self, order: Sequence[int]) -> Plan:
        if list(order) == list(range(self.rank)):
            return self
        spread = tuple(self.spread[d] for d in order)
        return Plan(lambda w: w.call(aten.permute.default, self.build(w), list(order)), spread)

    def expanded(self, sizes: Sequence[Any], node: fx.Node, ones: Sequence[bool] | None = None) -> Plan:
        """`ones` says which dims have size one now; the node's own argument does where there is none."""
        plan = self
        for _ in range(len(sizes) - self.rank):
            plan = plan.unsqueezed(0)
        if ones is None:
            shape = value_of(node.args[0]).shape
            ones = [True] * (len(sizes) - len(shape)) + [isinstance(s, int) and s == 1 for s in shape]
        spread = [
            size if one and not (isinstance(size, int) and size in (-1, 1)) else old
            for old, size, one in zip(plan.spread, sizes, ones, strict=True)
        ]
        return replace(plan, spread=tuple(spread))

    def repeated(self, node: fx.Node) -> Plan | None:
        """Only dims of one: repeating those is the same as expanding them."""
        shape, repeats = value_of(node.args[0]).shape, node.args[1]
        assert isinstance(repeats, (list, tuple))
        ones = [True] * (len(repeats) - len(shape)) + [isinstance(s, int) and s == 1 for s in shape]
        if not all(one or (isinstance(r, int) and r == 1) for one, r in zip(ones, repeats, strict=True)):
            return None
        return self.expanded(repeats, node, ones)

    def flattened(self, kept: int, shape: Sequence[Any]) -> Plan:
        """Reshaped to `shape`, which keeps the last `kept` dims as they are."""
        lead = self.rank - kept
        if lead and all(s is not None for s in self.spread[:lead]) and len(shape) > kept:
            ones = Plan(lambda w: _reshape_ones(w, self.build(w), lead, len(shape) - kept), (None,) * len(shape))
            return replace(ones, spread=(*shape[: len(shape) - kept], *self.spread[lead:]))
        return self.then(aten.reshape.default, list(shape), rank=len(shape))


def _reshape_ones(w: Writer, x: fx.Node, before: int, after: int) -> fx.Node:
    """`before` leading dims of one become `after` of them."""
    for _ in range(before - 1):
        x = w.call(aten.squeeze.dim, x, 0)
    for _ in range(after - 1):
        x = w.call(aten.unsqueeze.default, x, 0)
    return x
