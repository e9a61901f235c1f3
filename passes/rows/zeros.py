"""What pads contain: for each value, predicates outside of which it is exactly zero.

A value that is zero outside of some rows need not be computed there: scattering those rows into zeros is the value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from ...graph.nodes import tensor
from .axes import Typing
from .calls import arg, is_tensor, op, operand, shape
from .declaration import declared
from .meaning import Holds, Iota, Predicate, Two, Within
from .meanings import Meanings

Support = frozenset[Predicate | Within]
NOWHERE_KNOWN: Support = frozenset()


class Zeros:
    arg = staticmethod(arg)

    def __init__(self, graph: fx.Graph, typing: Typing, meanings: Meanings) -> None:
        self.graph, self.typing, self.meanings = graph, typing, meanings
        self._declared: dict[fx.Node, Support] = {}
        self._support: dict[fx.Node, Support] = {}
        self.propagate()

    def propagate(self) -> None:
        for node in self.graph.nodes:
            if is_tensor(node) and 0 not in shape(node):
                flat = self.typing.flat(node)
                once = {a for a in flat if flat.count(a) == 1}  # a tensor of pairs has rows twice
                known = once - self.typing.crossed(operand(node) if op(node) == "getitem" else node)
                found = self._rule(node) | self._kept_by(node) | self._declared.get(node, NOWHERE_KNOWN)
                self._support[node] = frozenset(p for p in found if self.axes(p) <= known)

    def _rule(self, node: fx.Node) -> Support:
        source: Any = node.args[0] if op(node) == "getitem" else node
        found = declared(source)
        if found is None or found.zeros is None or node in self.typing.untyped:
            return NOWHERE_KNOWN
        zeros = found.zeros
        return self.typing.trying(source, lambda: zeros(self, source), NOWHERE_KNOWN)

    def support(self, node: Any) -> Support:
        """Predicates that all hold wherever the value is not zero."""
        return self._support.get(node, NOWHERE_KNOWN)

    def support_beside(self, node: Any, *dims: int) -> Support:
        """What is known about a value beside some of its dims: an op that moves elements along them has no more."""
        moved = {a for d in dims for a in self.typing.atoms(node)[d]}
        return frozenset(p for p in self.support(node) if not self.axes(p) & moved)

    def declare(self, node: fx.Node, support: Support) -> None:
        """Said by who knows more about an op than its operands tell; `propagate` tells the others."""
        self._declared[node] = support

    def inside(self, support: Support, axes: Iterable[int]) -> Support:
        """Predicates of some axes alone."""
        return frozenset(p for p in support if self.axes(p) <= set(axes))

    def axes(self, predicate: Predicate | Within) -> set[int]:
        if isinstance(predicate, Within):
            sequence, column, _ = self.typing.jagged[predicate.node]
            return {*self.typing.axes.atoms(sequence), *self.typing.axes.atoms(column)}
        return set(self.typing.flat(predicate.node))

    def factor(self, node: Any) -> Support:
        """Predicates outside of which a factor is zero."""
        found = self.support(node)
        if not is_tensor(node) or node in self.meanings.tainted:
            return found
        weight = self.weight(node) if not isinstance(self.meanings.of(node), Two) else None
        return found | {Predicate(weight, 0, False)} if weight is not None else found

    def _kept_by(self, node: fx.Node) -> Support:
        """A mask is zero where it is zero."""
        two = self.meanings.two(node) if node not in self.typing.untyped else None
        kept = two.with_yes(lambda yes, no: no == 0) if two is not None else None
        return (
            frozenset(k.predicate for k in kept.literals if isinstance(k, Holds)) if kept is not None else NOWHERE_KNOWN
        )

    def weight(self, node: Any) -> fx.Node | None:
        """The data behind a factor that may be zero on whole rows: an input, or integers made from inputs."""
        if not is_tensor(node) or not self.meanings.describes_rows(node):
            return None
        root = self.meanings.root(node)
        while op(root) in ("_to_copy", "to") and is_tensor(root.args[0]):
            root = self.meanings.root(operand(root))
        value = tensor(root)
        assert value is not None
        if isinstance(self.meanings.of(root), Iota):
            return None  # a position, which happens to be zero once
        if value.dtype.is_complex:
            return None  # an angle
        if not value.dtype.is_floating_point:
            return root
        # A floating-point input is a weight of rows, and not a feature, where it is zero here and there.
        seen = self.meanings.example(root) if root.op == "placeholder" else None
        return root if seen is not None and bool((seen == 0).any()) and bool((seen != 0).any()) else None
