"""What a value can be: the language that attention is evaluated in.

    Table    assignment of atoms -> leaf          every assignment that can happen has one leaf (table.py)
    atom     AtLeast(formula >= c)                positions alone: triangles, bands, first columns
             Test(tensor at index, how, value)    data: ids == 0, a boolean tensor, a float > 0
             Blind(softmax)                       the query sees no key in that softmax
    leaf     Number(value, dtype)                 folded by the op itself
             Position(formula, dtype)             a whole number that is a formula of positions
             Sum(coef · factors + … + const)      linear in what it is made of
    factor   Score, Data, Function, Weight, Average, Drop, RowStat

Everything prints completely: reading a normal form is a test of the rules that made it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx

from .formula import KEY, MORE_KEYS, QUERY, Formula, Index, Size, axes_of, written

KEYS = frozenset({KEY, MORE_KEYS})


class Refused(Exception):
    """Not what the kernel computes: the reason, the term that does not fit, the node where it shows."""

    def __init__(self, reason: str, term: object = "", node: fx.Node | None = None) -> None:
        self.reason, self.term, self.node = reason, str(term), node
        super().__init__(f"{reason}: {self.term}" if self.term else reason)


class Unknown(Exception):
    """No rule reads this value. Where it does not depend on scores it is taken as data."""


class NeedsSplit(Exception):
    """An axis is two: evaluation starts over with an outer and an inner one."""

    def __init__(self, axis: str, inner: Size) -> None:
        super().__init__(f"{axis} in runs of {inner}")
        self.axis, self.inner = axis, inner


# --- atoms ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AtLeast:
    """A formula of positions is `least` or more; its first coefficient is positive, so that each test has one form."""

    coefs: tuple[tuple[str, Size], ...]
    least: Size

    @property
    def axes(self) -> frozenset[str]:
        return Formula(self.coefs).axes

    def __str__(self) -> str:
        return f"{Formula(self.coefs)}>={self.least}"


_SIGNS = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}


@dataclass(frozen=True)
class Test:
    """A tensor at an index, compared with a number; 'true' asks a boolean tensor."""

    __test__ = False

    node: fx.Node
    index: Index
    how: str = "true"
    value: int | float | None = None

    @property
    def axes(self) -> frozenset[str]:
        return axes_of(self.index)

    def __str__(self) -> str:
        return f"{self.node.name}{written(self.index)}" + (
            "" if self.how == "true" else f"{_SIGNS[self.how]}{self.value}"
        )


@dataclass(frozen=True)
class Blind:
    """The query sees no key in softmax number `softmax`."""

    softmax: int
    axes: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"blind{self.softmax}"


Atom: TypeAlias = AtLeast | Test | Blind


# --- factors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """The QK product at the pair's index."""

    detached: bool = False

    def __str__(self) -> str:
        return "score.detach" if self.detached else "score"


@dataclass(frozen=True)
class Data:
    """A tensor that does not depend on scores, computed as captured; or one divided by it."""

    node: fx.Node
    index: Index
    inverse: bool = False

    @property
    def axes(self) -> frozenset[str]:
        return axes_of(self.index)

    @property
    def of_pairs(self) -> bool:
        return QUERY in self.axes and bool(self.axes & KEYS)

    def __str__(self) -> str:
        return ("1/" if self.inverse else "") + f"{self.node.name}{written(self.index)}"


@dataclass(frozen=True)
class Function:
    """A function of one value, with its other arguments as text."""

    name: str
    arguments: tuple[str, ...]
    inner: Sum

    def __str__(self) -> str:
        return f"{self.name}({', '.join([str(self.inner), *self.arguments])})"


@dataclass(frozen=True)
class Weight:
    """What a softmax gives to a visible pair."""

    softmax: int
    may_be_nan: bool = False  # written out without a shift: its exponentials may overflow

    def __str__(self) -> str:
        return f"softmax{self.softmax}"


@dataclass(frozen=True)
class Average:
    """What a softmax gives where all scores of a query were removed by large numbers."""

    softmax: int
    may_be_nan: bool

    def __str__(self) -> str:
        return f"blind-average{self.softmax}"


@dataclass(frozen=True)
class Drop:
    """A random factor: 0 or 1 / (1 - p)."""

    node: fx.Node
    p: float

    def __str__(self) -> str:
        return f"dropout({self.p:g})"


@dataclass(frozen=True)
class RowStat:
    """A statistic of a row of scores, of the table with that number."""

    kind: str
    table: int

    def __str__(self) -> str:
        return f"row-{self.kind}#{self.table}"


Factor: TypeAlias = Score | Data | Function | Weight | Average | Drop | RowStat
Product: TypeAlias = tuple[Factor, ...]

OF_SCORES = (Score, Function, Weight, Average, RowStat)


def product(*factors: Factor) -> Product:
    return tuple(sorted(factors, key=lambda f: (type(f).__name__, str(f))))


# --- leaves --------------------------------------------------------------------------------------------

_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "True": True, "False": False}


@dataclass(frozen=True)
class Number:
    """One number; kept as text, so that NaN equals itself and 0.0 is not -0.0."""

    text: str
    dtype: torch.dtype

    @staticmethod
    def of(x: torch.Tensor) -> Number:
        return Number(repr(x.item()), x.dtype)

    @property
    def value(self) -> Any:
        if self.text in _WORDS:
            return _WORDS[self.text]
        return float(self.text) if self.dtype.is_floating_point else int(self.text)

    @property
    def is_zero(self) -> bool:
        return bool(self.value == 0)

    def __str__(self) -> str:
        return self.text


def number(value: Any, dtype: torch.dtype) -> Number:
    try:
        return Number.of(torch.full((1,), value, dtype=dtype))
    except RuntimeError as error:
        raise Unknown(f"{value} as {dtype}: {error}") from None


YES, NO = Number("True", torch.bool), Number("False", torch.bool)


def truth(value: bool) -> Number:
    return YES if value else NO


@dataclass(frozen=True)
class Position:
    formula: Formula
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"position({self.formula})"


@dataclass(frozen=True)
class Sum:
    terms: tuple[tuple[Product, float], ...]
    const: float
    dtype: torch.dtype
    peak: float = 0.0  # the largest number that was ever added: what it swallowed is gone

    @property
    def factors(self) -> list[Factor]:
        return [f for factors, _ in self.terms for f in factors]

    @property
    def single(self) -> Factor | None:
        """The one factor that this is, unscaled."""
        if self.const == 0 and len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    def __str__(self) -> str:
        parts = [("" if c == 1 else f"{c:g}·") + "·".join(map(str, factors)) for factors, c in self.terms]
        if self.const != 0 or not parts:
            parts.append(f"{self.const:g}")
        return " + ".join(parts)

    __repr__ = __str__


Leaf: TypeAlias = Number | Position | Sum


def just(factor: Factor, dtype: torch.dtype) -> Sum:
    return Sum(((product(factor), 1.0),), 0.0, dtype)


def of_scores(leaf: object) -> bool:
    return isinstance(leaf, Sum) and any(isinstance(f, OF_SCORES) for f in leaf.factors)


def is_zero(leaf: object) -> bool:
    return isinstance(leaf, Number) and leaf.is_zero


# --- renaming ------------------------------------------------------------------------------------------


def renamed_atom(atom: Atom, names: Mapping[str, str]) -> Atom:
    if isinstance(atom, AtLeast):
        return AtLeast(Formula(atom.coefs).renamed(names).coefs, atom.least)
    if isinstance(atom, Test):
        return replace(atom, index=tuple(i.renamed(names) for i in atom.index))
    return atom


def renamed_leaf(leaf: Leaf, names: Mapping[str, str]) -> Leaf:
    if not isinstance(leaf, Sum):
        return leaf
    terms = tuple((product(*(_renamed_factor(f, names) for f in factors)), c) for factors, c in leaf.terms)
    return replace(leaf, terms=terms)


def _renamed_factor(factor: Factor, names: Mapping[str, str]) -> Factor:
    if isinstance(factor, Data):
        return replace(factor, index=tuple(i.renamed(names) for i in factor.index))
    if isinstance(factor, Function):
        inner = renamed_leaf(factor.inner, names)
        assert isinstance(inner, Sum)
        return replace(factor, inner=inner)
    return factor
