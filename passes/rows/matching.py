"""Axes of an evaluation, matched with the axes of the graph."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from .attention.formula import Formula, Index, Size, Sizes, size_of
from .axes import Axis, Typing
from .calls import quotient

Rows = dict[str, tuple[Axis, ...]]  # axes of the graph that make up an axis of the evaluation


def ordered(sizes: Sizes, formula: Formula) -> list[str] | None:
    """The axes that a formula flattens, outermost first; None where it does more. Its constant is not looked at."""
    left, stride, found = dict(formula.coefs), size_of(1), []
    while left:
        axis = next((a for a, c in left.items() if sizes.same(c, stride)), None)
        if axis is None:
            return None
        found.append(axis)
        del left[axis]
        stride = size_of(stride * sizes[axis])
    return found[::-1]


class Matching:
    """Axes of one evaluation in the graph."""

    def __init__(self, sizes: Sizes, typing: Typing) -> None:
        self.sizes, self.typing = sizes, typing

    def rows(self, node: fx.Node, index: Index, names: Iterable[str]) -> Rows | None:
        """What some axes are in a tensor; None where they are not whole dims, or parts that stand side by side."""
        wanted, found = set(names), {}
        for formula, atoms in zip(index, self.typing.atoms(node), strict=True):
            if not formula.axes & wanted:
                continue
            order = ordered(self.sizes, formula)
            blocks = self._blocks(order, atoms) if order is not None and formula.const == 0 else None
            if blocks is None:
                return None
            for mine, theirs in blocks:
                if not set(mine) & wanted:
                    continue
                if len(mine) != 1 or mine[0] in found:
                    return None
                found[mine[0]] = theirs
        return found

    def _blocks(self, names: list[str], atoms: list[Axis]) -> list[tuple[tuple[str, ...], tuple[Axis, ...]]] | None:
        """Two ways to cut a dim, as blocks of the same size."""
        left, right, out = list(names), list(atoms), []
        while left or right:
            if not left or not right:
                return None
            mine, theirs = [left.pop()], [right.pop()]
            while quotient(ours := self._size(mine), other := self.typing.size_of(theirs)) != 1:
                if left and quotient(other, ours) is not None:
                    mine.append(left.pop())
                elif right and quotient(ours, other) is not None:
                    theirs.append(right.pop())
                else:
                    return None
            out.append((tuple(mine[::-1]), tuple(theirs[::-1])))
        return out

    def _size(self, names: list[str]) -> Size:
        return size_of(math.prod(self.sizes[name] for name in names))
