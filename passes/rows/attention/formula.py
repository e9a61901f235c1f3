"""Indices as formulas over axes, and the questions that are asked of their sizes.

The index of each dim of a tensor is a sum of axes times strides: `b0`, `4*b0o + b0i`, `q - k + 11`, `0`. A view
changes the formula and nothing else, so that "the same axis" is never mistaken for "the same element". Sizes may be
symbolic; a question about one is answered from what the compiler knows, and never adds a guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from ....graph.shapes import known

Size: TypeAlias = "int | sympy.Expr"

QUERY, KEY, MORE_KEYS = "q", "k", "k+"  # MORE_KEYS: the keys, and columns of a softmax behind them
DEPTH, WIDTH = "d", "e"  # contracted by the QK product; the width of values


def size_of(value: Any) -> Size:
    """A number, a symbolic size or an expression, in normal form."""
    if isinstance(value, int):
        return int(value)
    expression = sympy.expand(value.node.expr if isinstance(value, torch.SymInt) else value)
    return int(expression) if expression.is_Integer else expression


@dataclass(frozen=True)
class Formula:
    coefs: tuple[tuple[str, Size], ...] = ()
    const: Size = 0

    @staticmethod
    def of(coefs: Mapping[str, Size], const: Size = 0) -> Formula:
        kept = ((axis, size_of(c)) for axis, c in coefs.items())
        return Formula(tuple(sorted((axis, c) for axis, c in kept if c != 0)), size_of(const))

    @staticmethod
    def axis(name: str) -> Formula:
        return Formula(((name, 1),))

    def __add__(self, other: Formula | Size) -> Formula:
        if not isinstance(other, Formula):
            return Formula(self.coefs, size_of(self.const + other))
        coefs = dict(self.coefs)
        for axis, c in other.coefs:
            coefs[axis] = coefs.get(axis, 0) + c
        return Formula.of(coefs, self.const + other.const)

    def times(self, factor: Size) -> Formula:
        return Formula.of({axis: c * factor for axis, c in self.coefs}, self.const * factor)

    def __sub__(self, other: Formula | Size) -> Formula:
        return self + (other.times(-1) if isinstance(other, Formula) else -other)

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axis, _ in self.coefs)

    def renamed(self, names: Mapping[str, str]) -> Formula:
        return Formula.of({names.get(axis, axis): c for axis, c in self.coefs}, self.const)

    def __str__(self) -> str:
        parts = [_part(axis, c) for axis, c in self.coefs]
        if self.const != 0 or not parts:
            parts.append(str(self.const))
        return "+".join(parts).replace("+-", "-")


Index: TypeAlias = tuple[Formula, ...]
ZERO = Formula()


def _part(axis: str, c: Size) -> str:
    if not isinstance(c, int):
        return f"({c})*{axis}"
    return {1: axis, -1: f"-{axis}"}.get(c, f"{c}*{axis}")


def axes_of(index: Iterable[Formula]) -> frozenset[str]:
    return frozenset().union(*(i.axes for i in index))


def written(index: Iterable[Formula]) -> str:
    return f"[{', '.join(map(str, index))}]"


class Sizes:
    """Of axes, and what is provable about formulas over them.

    An axis without elements makes every statement about its elements true, so each is taken to have one at least.
    """

    def __init__(self, of: Mapping[str, Size], env: Any = None) -> None:
        self.of = dict(of)
        self.env = env

    def __getitem__(self, axis: str) -> Size:
        return self.of[axis]

    def at_least(self, a: Size, b: Size = 0) -> bool:
        """Is a >= b provable?"""
        gap = size_of(a - b)
        if isinstance(gap, int):
            return gap >= 0
        return self._known(sympy.Ge(gap, 0))

    def same(self, a: Size, b: Size) -> bool:
        gap = size_of(a - b)
        return gap == 0 if isinstance(gap, int) else self._known(sympy.Eq(gap, 0))

    def _known(self, claim: Any) -> bool:
        if isinstance(claim, (bool, sympy.logic.boolalg.BooleanAtom)):
            return bool(claim)
        # Sizes of our own, such as how many rows a mask keeps, are unknown to torch.
        foreign = self.env is None or not all(s in self.env.var_to_range for s in claim.free_symbols)
        return not foreign and known(self.env.create_symboolnode(claim))

    def range(self, formula: Formula) -> tuple[Size, Size] | None:
        """Least and greatest value; None where the direction of an axis is not known."""
        low = high = formula.const
        for axis, c in formula.coefs:
            far = c * (self.of[axis] - 1)
            if self.at_least(c):
                high = high + far
            elif self.at_least(-c):
                low = low + far
            else:
                return None
        return size_of(low), size_of(high)

    def within(self, formula: Formula, low: Size | None, high: Size | None) -> bool:
        """Does low <= formula <= high hold for all elements?"""
        found = self.range(formula)
        if found is None:
            return False
        below = low is None or self.at_least(found[0], low)
        return below and (high is None or self.at_least(high, found[1]))

    def always(self, formula: Formula) -> bool | None:
        """Is formula >= 0 everywhere (True), nowhere (False), or neither as far as is known (None)?"""
        if self.within(formula, 0, None):
            return True
        return False if self.within(formula, None, -1) else None

    def divides(self, a: Size, b: Size) -> Size | None:
        """b / a where that is provably whole."""
        if isinstance(a, int) and isinstance(b, int):
            return b // a if a and b % a == 0 else None
        whole = sympy.cancel(sympy.sympify(b) / sympy.sympify(a))
        if sympy.denom(whole) != 1 or any(x.is_Pow and x.exp.is_negative for x in sympy.preorder_traversal(whole)):
            return None
        return size_of(whole)
