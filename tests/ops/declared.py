"""What the compiler says about the ops of a graph: the one place here that knows how it says it.

For each node of a captured graph and each axis of its operands: is the op computed row by row along it, and where is
the axis in the result? And does the op keep zeros?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from turbogr_compile.passes.rows import axes, rowwise, spaces
from turbogr_compile.passes.rows.declaration import declared
from turbogr_compile.passes.rows.zeros import Zeros
from turbogr_compile.testing import trace_graph


@dataclass(frozen=True)
class Claim:
    """The op is row-wise along one axis, which stands at these dims of its operands and at `out` of its result."""

    node: fx.Node
    operands: tuple[tuple[int, int], ...]  # (leaf, dim)
    out: int


class Declarations:
    """Of one graph."""

    def __init__(self, fn: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
        self.module = trace_graph(fn, tensors)
        self._typing = axes.Typing(self.module.graph)
        self._rowwise = rowwise.Rowwise(self._typing, lambda node: None)

    @property
    def nodes(self) -> list[fx.Node]:
        found = [n for n in self.module.graph.nodes if n.op == "call_function"]
        return [n for n in found if isinstance(n.target, torch._ops.OpOverload)]

    def claims(self, node: fx.Node, leaves: Sequence[Any]) -> Iterator[Claim]:
        """Axes along which the op is said to be row-wise; `leaves` are its arguments, nodes among them."""
        results = self._results(node)
        if not results:
            return
        for axis, where in self._axes(leaves).items():
            if len({i for i, _ in where}) != len(where):
                continue  # a tensor of pairs
            places = [[d for d, atoms in enumerate(result) if axis in atoms] for result in results]
            at = places[0]
            whole = len(at) == 1 and all(p == at and r[at[0]] == [axis] for p, r in zip(places, results, strict=True))
            if whole and self._rowwise.why_mixed(node, spaces.Space((axis,), ())) is None:
                yield Claim(node, tuple(where), at[0])

    def _results(self, node: fx.Node) -> list[axes.Dims]:
        """Dims of the result, or of each of several; nothing where they are not known."""
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return [self._typing.atoms(node)]
        parts = self._typing._parts.get(node, [])
        known = [[self._typing.axes.atoms(d) for d in part] for part in parts if part is not None]
        return known if isinstance(value, (list, tuple)) and len(known) == len(value) else []

    def _axes(self, leaves: Sequence[Any]) -> dict[Any, list[tuple[int, int]]]:
        found: dict[Any, list[tuple[int, int]]] = {}
        for i, leaf in enumerate(leaves):
            if (
                isinstance(leaf, fx.Node)
                and isinstance(leaf.meta.get("val"), torch.Tensor)
                and leaf in self._typing._dims
            ):
                for d, atoms in enumerate(self._typing.atoms(leaf)):
                    if len(atoms) == 1:
                        found.setdefault(atoms[0], []).append((i, d))
        return found

    def keeps_zero(self, node: fx.Node) -> bool:
        """Is the result said to be zero where the first operand is?"""
        found = declared(node)
        if found is None or found.zeros is None or node in self._typing.untyped or not node.args:
            return False
        return bool(found.zeros(_FirstIsZero(self._typing, node.args[0]), node))


class _FirstIsZero(Zeros):
    """Of one operand it is known where it is zero, of the others nothing."""

    def __init__(self, typing: axes.Typing, zero: Any) -> None:
        self.typing, self._zero, self.meanings = typing, zero, _NoMeanings()

    def support(self, node: Any) -> Any:
        return frozenset({"zero"} if node is self._zero else ())

    def support_beside(self, node: Any, *dims: int) -> Any:
        return self.support(node)

    def factor(self, node: Any) -> Any:
        return self.support(node)


class _NoMeanings:
    def constant(self, value: Any) -> Any:
        return value if isinstance(value, (bool, int, float)) else None

    def two(self, node: Any) -> None:
        return None

    def describes_rows(self, node: Any) -> bool:
        return False
