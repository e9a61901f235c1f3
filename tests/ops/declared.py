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

from turbogr_compile.passes.rows import axes, ops, rowwise, spaces, zeros
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
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return
        for axis, where in self._axes(leaves).items():
            if len({i for i, _ in where}) != len(where):
                continue  # a tensor of pairs
            result = self._typing.atoms(node)
            at = [d for d, atoms in enumerate(result) if axis in atoms]
            whole = len(at) == 1 and result[at[0]] == [axis]
            if whole and self._rowwise.why_mixed(node, spaces.Space((axis,), ())) is None:
                yield Claim(node, tuple(where), at[0])

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
        return ops.op(node) in zeros._KEEPS_ZERO or ops.op(node) in zeros._LINEAR_IN_ROWS
