"""What masks and indices say: the language.

A value is described as a formula over its own dims, or not at all:

    Const(c)               one number
    Iota(dim, offset)      the index along a dim, plus an offset
    Two(literals, yes, no) `yes` where every literal holds, `no` elsewhere
    OneHot(dim, index)     1 at `index` along a dim, 0 elsewhere

`Two` is one object for boolean masks, 0/1 floats and additive 0/-1e4/-inf masks. A literal says that a *predicate* of
the data holds, or that two indices are so far apart. Predicates are compared by what they test, not by how they are
written: `ids != 0`, `~(ids == 0)` and `ids.bool()` are one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

MINUS_INFINITY = -1e4  # what is added to a score to remove it: this or less


@dataclass(frozen=True)
class Predicate:
    """Holds where `(node == value)` is `equal`."""

    node: fx.Node
    value: Any = True
    equal: bool = True

    def negated(self) -> Predicate:
        return replace(self, equal=not self.equal)

    def __str__(self) -> str:
        if self.value is True:
            return f"%{self.node}" if self.equal else f"not %{self.node}"
        return f"%{self.node} {'==' if self.equal else '!='} {self.value}"


@dataclass(frozen=True)
class Within:
    """Holds in the first columns of a sequence, as many as its length in jagged offsets."""

    node: fx.Node

    def __str__(self) -> str:
        return f"column < length in %{self.node}"


@dataclass(frozen=True)
class Holds:
    """A predicate, and the dim of this tensor along which each non-unit dim of the predicate's tensor runs."""

    predicate: Predicate
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Band:
    """index along dim i - index along dim j >= least."""

    i: int
    j: int
    least: Any

    def negated(self) -> Band:
        return Band(self.j, self.i, 1 - self.least)


Literal = Holds | Band


@dataclass(frozen=True)
class Const:
    value: Any


@dataclass(frozen=True)
class Iota:
    dim: int
    offset: Any = 0


@dataclass(frozen=True)
class Two:
    literals: frozenset[Literal]
    yes: Any
    no: Any
    otherwise: frozenset[Literal] | None = field(default=None, compare=False)  # literals under which it is `no`

    def flipped(self) -> Two | None:
        """The same with `yes` and `no` exchanged, where literals say when it is `no`; one literal always does."""
        if self.otherwise is not None:
            return Two(self.otherwise, self.no, self.yes, self.literals)
        if len(self.literals) != 1:
            return None
        (literal,) = self.literals
        other = (
            literal.negated() if isinstance(literal, Band) else replace(literal, predicate=literal.predicate.negated())
        )
        return Two(frozenset([other]), self.no, self.yes)

    def with_yes(self, wanted: Callable[[Any, Any], bool]) -> Two | None:
        """In the form whose (yes, no) is as wanted."""
        if wanted(self.yes, self.no):
            return self
        flipped = self.flipped()
        return flipped if flipped is not None and wanted(flipped.yes, flipped.no) else None

    def keeps(self) -> frozenset[Literal] | None:
        """Literals under which a 0/1 or boolean mask is 1."""
        found = self.with_yes(lambda yes, no: yes == 1 and no == 0)
        return found.literals if found is not None else None

    def admits(self) -> frozenset[Literal] | None:
        """Literals under which an additive mask is 0; minus infinity elsewhere."""
        found = self.with_yes(lambda yes, no: yes == 0 and no <= MINUS_INFINITY and no is not False)
        return found.literals if found is not None else None


@dataclass(frozen=True)
class OneHot:
    dim: int
    index: fx.Node


Meaning = Const | Iota | Two | OneHot


@dataclass(frozen=True)
class Speculation:
    """What was true of the inputs seen at compile time, and is checked on every batch."""

    node: fx.Node
    kind: (
        str  # 'binary': only 0 and 1; 'additive': only 0 and minus infinity; 'values': only those seen; 'same': as seen
    )
    seen: Any = field(default=None, compare=False)


def only(value: torch.Tensor, kind: str, seen: tuple[float, float] | None = None) -> torch.Tensor:
    """Where a mask holds what masks of its kind hold."""
    if seen is not None:
        return (value == seen[0]) | (value == seen[1])
    return (value == 0) | (value == 1 if kind == "binary" else value <= MINUS_INFINITY)
