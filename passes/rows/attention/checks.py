"""What must hold of a batch for a normal form to be what eager computes on it.

Each check is a value that follows from the rule that needs it. `failed` is the reference evaluation: it names the first
check that a batch breaks. `sees_a_key` alone is asked per query; it is evaluated by `grid.blind`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from .formula import KEY, QUERY, Size
from .grid import symbols_in
from .language import Data, Product
from .numbers import BOUND
from .table import Table, kept
from .times import Times


@dataclass(frozen=True)
class Same:
    """A tensor that was read as a pattern of positions still holds it."""

    node: fx.Node
    seen: torch.Tensor = field(compare=False)  # one tensor was seen, however often it was read

    def holds(self, values: Mapping[fx.Node, Any]) -> bool:
        return torch.equal(values[self.node], self.seen)

    def __str__(self) -> str:
        return f"{self.node.name} is as it was"


@dataclass(frozen=True)
class TwoValues:
    """A tensor that was read as a mask holds two numbers and no others."""

    node: fx.Node
    values: tuple[float, float]

    def holds(self, values: Mapping[fx.Node, Any]) -> bool:
        x = values[self.node]
        return bool(((x == self.values[0]) | (x == self.values[1])).all())

    def __str__(self) -> str:
        return f"{self.node.name} is {self.values[0]:g} or {self.values[1]:g}"


@dataclass(frozen=True)
class SizeOfScores:
    """An additive term made from the batch is of the size of scores: a mask would not be."""

    term: Product
    coef: float

    def holds(self, values: Mapping[fx.Node, Any]) -> bool:
        largest = abs(self.coef)
        for f in self.term:
            assert isinstance(f, Data)
            x = torch.as_tensor(values[f.node]).detach().double().abs()
            if x.numel() == 0:
                return True
            largest *= float(1 / x.min() if f.inverse else x.max())
        return largest <= BOUND

    def __str__(self) -> str:
        return f"|{self.coef:g}·{'·'.join(map(str, self.term))}| <= {BOUND:g}"


@dataclass(frozen=True)
class Finite:
    """A factor is no infinity and no NaN: 0 times it is 0. A divisor is not zero either."""

    node: fx.Node
    inverse: bool

    def holds(self, values: Mapping[fx.Node, Any]) -> bool:
        x = torch.as_tensor(values[self.node])
        return bool(torch.isfinite(x).all()) and not (self.inverse and bool((x == 0).any()))

    def __str__(self) -> str:
        return f"{self.node.name} is finite" + (" and not zero" if self.inverse else "")


@dataclass(frozen=True)
class GapAtMost:
    """No two times lie farther apart than the last bucket of a table reaches: eager would have raised."""

    query: Times
    key: Times
    most: int

    def holds(self, values: Mapping[fx.Node, Any]) -> bool:
        q, k = (values[t.node] for t in (self.query, self.key))
        if q.numel() == 0 or k.numel() == 0:
            return True
        (low, high), (least, greatest) = (self._range(x, t) for x, t in ((q, self.query), (k, self.key)))
        return bool(((high - least <= self.most) & (greatest - low <= self.most)).all())

    def _range(self, x: torch.Tensor, times: Times) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each sequence, where both sides have their sequences in the same dims; else of the batch."""
        rest = [[str(i) for i in t.index if not i.axes & {QUERY, KEY}] for t in (self.query, self.key)]
        along = [d for d, i in enumerate(times.index) if i.axes & {QUERY, KEY}]
        if rest[0] != rest[1] or not along:
            along = list(range(x.dim()))
        return x.amin(along), x.amax(along)

    def __str__(self) -> str:
        return f"|{self.query} - {self.key}| <= {self.most}"


@dataclass(frozen=True)
class SizeAtMost:
    """Positions up to a symbolic size are exact in the dtype that they are counted in."""

    size: Size
    most: int

    def holds(self, values: Mapping[fx.Node, Any]) -> bool:
        if isinstance(self.size, int):
            return self.size <= self.most
        number = self.size.subs(symbols_in(values))
        return bool(number.is_Integer) and int(number) <= self.most

    def __str__(self) -> str:
        return f"{self.size} <= {self.most}"


@dataclass(frozen=True, eq=False)
class SeesKey:
    """Every query that matters sees a key, or is one of those for which eager gives zero without one."""

    visible: Table
    exempt: Table

    def __str__(self) -> str:
        unless = f", unless {kept(self.exempt)}" if self.exempt.atoms else ""
        return f"every query sees a key: {kept(self.visible)}{unless}"


@dataclass(frozen=True)
class LogSum:
    """After the fact: the visible scores of a query lie far enough above what the hidden ones were filled with."""

    fill: float
    dtype: torch.dtype

    def holds_for(self, log_sum: torch.Tensor, keys: int) -> torch.Tensor:
        nothing = 746.0 if self.dtype == torch.float64 else 104.0
        return log_sum - math.log(max(keys, 1)) >= self.fill + nothing

    def __str__(self) -> str:
        return f"log_sum - log(keys) lies above {self.fill:g}"


OnBatch: TypeAlias = Same | TwoValues | SizeOfScores | Finite | GapAtMost | SizeAtMost
Check: TypeAlias = OnBatch | SeesKey | LogSum


def failed(checks: Iterable[Check], values: Mapping[fx.Node, Any]) -> OnBatch | None:
    """The first check on the batch that does not hold."""
    for check in checks:
        if not isinstance(check, (SeesKey, LogSum)) and not check.holds(values):
            return check
    return None
