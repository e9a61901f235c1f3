"""Sizes as polynomials in the sizes of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import sympy
import torch

# Of a size of inputs: no graph is entered with larger ones.
MOST = 1 << 40

Bounds = Mapping[sympy.Symbol, tuple[int, int]]


class Undecided(Exception):
    """Some batches would give one answer, others another one."""


@dataclass(frozen=True, eq=False)
class Size:
    """A polynomial; `bounds` are those of its symbols, none below zero. Compared for all batches at once."""

    expr: sympy.Expr
    bounds: Bounds

    def _with(self, other: Any, compute: Any) -> Any:
        return size_of(compute(self.expr, other.expr if isinstance(other, Size) else other), self.bounds)

    def __add__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: a * b)

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: b - a)

    __radd__, __rmul__ = __add__, __mul__

    def __floordiv__(self, other: Any) -> Any:
        """Without a remainder."""
        if isinstance(other, Size) or other < 1:
            raise Undecided
        quotient = sympy.expand(self.expr / other)
        if not all(factor.is_Integer for factor in quotient.as_coefficients_dict().values()):
            raise Undecided
        return size_of(quotient, self.bounds)

    def __mod__(self, other: Any) -> int:
        self // other
        return 0

    def __eq__(self, other: object) -> bool:
        low, high = self._less(other)
        if low <= 0 <= high and (low, high) != (0, 0):
            raise Undecided
        return low == high == 0

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: Any) -> bool:
        low, high = self._less(other)
        if low < 0 <= high:
            raise Undecided
        return high < 0

    def __le__(self, other: Any) -> bool:
        return self < other + 1

    def __gt__(self, other: Any) -> bool:
        return not self <= other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def __bool__(self) -> NoReturn:
        raise Undecided

    __hash__ = None  # type: ignore[assignment]

    def _less(self, other: Any) -> tuple[int, int]:
        """Bounds of the difference: each of its terms is monotone, since no symbol is negative."""
        difference = self._with(other, lambda a, b: a - b)
        if not isinstance(difference, Size):
            return difference, difference
        low = high = 0
        for term, factor in difference.expr.as_coefficients_dict().items():
            ends = [_value(term, difference.bounds, end) * int(factor) for end in (0, 1)]
            low, high = low + min(ends), high + max(ends)
        return low, high


def size_of(value: Any, bounds: Bounds) -> Any:
    """An int, a SymInt or an expression as a size: a number where it is one."""
    if type(value) is int:
        return value
    expr = sympy.expand(value.node.expr if isinstance(value, torch.SymInt) else value)
    if expr.is_Integer:
        return int(expr)
    if not is_polynomial(expr) or not expr.free_symbols <= bounds.keys():
        raise Undecided
    return Size(expr, bounds)


def is_polynomial(expr: sympy.Expr) -> bool:
    """Sums and products of integers and symbols, with powers that are numbers; as text, it is Python."""
    if expr.is_Symbol or expr.is_Integer:
        return True
    if expr.is_Pow:
        return bool(expr.exp.is_Integer and expr.exp > 0) and is_polynomial(expr.base)
    return bool(expr.is_Add or expr.is_Mul) and all(is_polynomial(part) for part in expr.args)


def _value(term: sympy.Expr, bounds: Bounds, end: int) -> int:
    return int(term.subs({symbol: bounds[symbol][end] for symbol in term.free_symbols}))
