"""Sets of rows as expressions, evaluated on each batch.

The compiler proves nothing about padding. It derives, for every value, an expression for the rows that can matter, and
the prologue evaluates it: left or right padding, holes, masks that differ by a row need no case of their own, and a set
that is larger than necessary is only slower.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeGuard

import torch
from torch import fx

from ...runtime.prologue import Unprovable
from .attention.formula import Sizes
from .attention.grid import Places, along_groups
from .attention.language import Atom, Test
from .attention.table import Table
from .axes import Axis
from .calls import Size
from .meaning import Predicate, Within
from .spaces import Moved, Relation, Space

UNBOUNDED = 1 << 40


@dataclass(frozen=True)
class Holding:
    """Rows where all predicates hold."""

    space: Space
    predicates: frozenset[Predicate | Within]

    def __str__(self) -> str:
        return " and ".join(sorted(map(str, self.predicates)))


@dataclass(frozen=True)
class Seen:
    """Rows at a distance between `least` and `most` before a row of another set: the keys of its queries."""

    of: Term
    least: int
    most: int

    @property
    def space(self) -> Space:
        return self.of.space

    def __str__(self) -> str:
        return f"rows up to ({self.of})" if self.most >= UNBOUNDED and self.least <= 0 else (
            f"rows {self.least}..{self.most} before ({self.of})"
        )  # fmt: skip


@dataclass(frozen=True)
class Read:
    """Rows that rows of another set, or all rows there are, read through a relation."""

    relation: Relation
    of: Term | None = None

    @property
    def space(self) -> Space:
        return self.relation.into

    def __str__(self) -> str:
        if isinstance(self.relation, Moved) and self.relation.step == 1 and not self.relation.wraps:
            shift = self.relation.start
            return f"{self.of}" if shift == 0 else f"({self.of}) shifted by {shift}"
        return f"{self.relation}" + (f" of ({self.of})" if self.of is not None else "")


@dataclass(frozen=True)
class Shown:
    """Pairs that a table of truth shows, in dims of (sequences, heads, queries, keys)."""

    atoms: tuple[Atom, ...]
    cases: tuple[tuple[tuple[bool, ...], Any], ...]
    dims: tuple[tuple[str, ...], ...]  # axes of each dim, outermost first
    sizes: tuple[tuple[str, Size], ...]

    @staticmethod
    def of(table: Table, dims: Iterable[tuple[str, ...]], sizes: Sizes) -> Shown:
        groups, (atoms, cases) = tuple(dims), table.key
        return Shown(atoms, cases, groups, tuple((axis, sizes[axis]) for group in groups for axis in group))

    @property
    def nodes(self) -> list[fx.Node]:
        return [a.node for a in self.atoms if isinstance(a, Test)]

    def on(self, batch: Batch) -> torch.Tensor:
        """With a size of one where it does not vary."""
        lengths = {axis: batch.number(size) for axis, size in self.sizes}
        along = along_groups(self.dims, lengths.__getitem__)
        return Places(along, len(self.dims), batch.values, batch.number).truth(Table(self.atoms, dict(self.cases)))

    def __str__(self) -> str:
        return ", ".join(map(str, self.atoms))


@dataclass(frozen=True)
class VisibleTo:
    """Keys that queries of another set see, or all queries there are."""

    space: Space
    pairs: Shown
    of: Term | None

    def __str__(self) -> str:
        return f"keys shown by {self.pairs}" + (f" to ({self.of})" if self.of is not None else "")


Term = Holding | Seen | Read | VisibleTo
Terms = frozenset[Term]


class Demand(Enum):
    ALL = "all rows"


ALL = Demand.ALL
Wanted = Demand | Terms  # of a value: all of its rows, or those of a union


def seen(term: Term, least: Any, most: Any) -> Term:
    """Keys of the queries in `term`; what a stack of layers sees collapses where that is exact or larger."""
    of, first, last = _banded(term)
    return Seen(of, first + min(int(least), 0), min(last + int(most), UNBOUNDED))


def read(relation: Relation, of: Term | None) -> Term:
    """What moves rows to other columns and back again ends at rows around those that it began with.

    Columns that fall off an end on the way may be among them: the set is as large as the rows that are read, or larger.
    """
    at, least, most, distance = of, 0, 0, relation.start if _shifts(relation) else None
    while distance is not None and at is not None:
        at, first, last = _banded(at)
        least, most = least + first, most + last
        if not isinstance(at, Read) or not _shifts(at.relation) or at.of is None:
            break
        distance = distance + at.relation.start
        if at.relation.out == relation.into and isinstance(distance, int):
            origin, first, last = _banded(at.of)
            return _band(origin, least + first - distance, min(most + last - distance, UNBOUNDED))
        at = at.of
    return Read(relation, of)


def _shifts(relation: Relation) -> TypeGuard[Moved]:
    return isinstance(relation, Moved) and relation.step == 1 and not relation.wraps


def _banded(term: Term) -> tuple[Term, int, int]:
    """A term as the rows at some distances before those of another."""
    return (term.of, term.least, term.most) if isinstance(term, Seen) else (term, 0, 0)


def _band(of: Term, least: int, most: int) -> Term:
    return of if least == most == 0 else Seen(of, least, most)


def spanned(terms: Iterable[Term]) -> Terms:
    """Rows at some distances before those of one term, and all rows in between."""
    every = frozenset(terms)
    bands = [_banded(term) for term in every]
    if len({of for of, _, _ in bands}) != 1:
        return every
    return frozenset([_band(bands[0][0], min(first for _, first, _ in bands), max(last for _, _, last in bands))])


def united(terms: Terms) -> Terms:
    """The same rows in fewer terms: distances that follow each other are one range."""
    if not any(isinstance(t, Seen) for t in terms):
        return terms
    ranges: dict[Term, list[tuple[int, int]]] = {}
    for term in terms:
        of, least, most = _banded(term)
        ranges.setdefault(of, []).append((least, most))
    found = set()
    for of, bounds in ranges.items():
        (least, most), *rest = sorted(bounds)
        for first, last in rest:
            if first > most + 1:
                found.add(_band(of, least, most))
                least = first
            most = max(most, last)
        found.add(_band(of, least, most))
    return frozenset(found)


def within(some: Terms, more: Terms) -> bool:
    """Are these rows among those, and not all of them, as far as terms tell?"""
    return some != more and united(some | more) == united(more)


@dataclass
class Batch:
    """One batch: values of the nodes that sets mention, sizes, and what has been evaluated so far."""

    values: Mapping[fx.Node, torch.Tensor]
    atoms: Callable[[fx.Node], list[list[Axis]]]
    number: Callable[[Size], int]
    axis_size: Callable[[Axis], Size]

    def __post_init__(self) -> None:
        self._masks: dict[Any, torch.Tensor] = {}

    def refuse(self, reason: str) -> None:
        raise Unprovable(reason)

    def size(self, axis: Axis) -> int:
        return self.number(self.axis_size(axis))

    def extent(self, space: Space) -> tuple[int, int]:
        """Number of sequences, and of columns."""
        rows = columns = 1
        for axis in space.sequence:
            rows *= self.size(axis)
        for axis in space.column:
            columns *= self.size(axis)
        return rows, columns

    def coordinates(self, space: Space) -> dict[Axis, torch.Tensor]:
        """Index along each axis, for every row of the space."""
        sizes = [self.size(a) for a in space.axes]
        total = 1
        for s in sizes:
            total *= s
        left = torch.arange(total)
        out = {}
        for axis, s in zip(reversed(space.axes), reversed(sizes), strict=True):
            out[axis] = left % s
            left = left // s
        return out

    def laid_out(self, node: fx.Node, value: torch.Tensor, space: Space, without: Collection[int] = ()) -> torch.Tensor:
        """A value over some of the space's axes, as (sequences, columns), `without` dims that were narrowed to one."""
        flat = [a for i, d in enumerate(self.atoms(node)) if i not in without for a in d]
        if not set(flat) <= set(space.axes) or len(set(flat)) != len(flat):
            raise AssertionError(f"%{node} does not lie in the row space")
        order = [a for a in space.axes if a in flat]
        value = value.reshape([self.size(a) for a in flat]).permute([flat.index(a) for a in order])
        value = value.reshape([self.size(a) if a in flat else 1 for a in space.axes])
        return value.expand([self.size(a) for a in space.axes]).reshape(self.extent(space))

    def holds(self, predicate: Predicate | Within, space: Space) -> torch.Tensor:
        value = self.values[predicate.node]
        if isinstance(predicate, Within):
            rows, columns = self.extent(space)
            lengths = value.diff()
            if lengths.numel() != rows or bool(((lengths < 0) | (lengths > columns)).any()) or int(value[0]) != 0:
                self.refuse(f"%{predicate.node} does not hold offsets of sequences of at most {columns} rows")
            return torch.arange(columns) < lengths[:, None]
        mask = value == predicate.value
        return self.laid_out(predicate.node, mask if predicate.equal else ~mask, space)

    def mask(self, term: Term) -> torch.Tensor:
        if term not in self._masks:
            self._masks[term] = self._evaluate(term)
        return self._masks[term]

    def union(self, terms: Terms) -> torch.Tensor:
        out: torch.Tensor | None = None
        for term in terms:
            out = self.mask(term) if out is None else out | self.mask(term)
        assert out is not None
        return out

    def _evaluate(self, term: Term) -> torch.Tensor:
        if isinstance(term, Holding):
            out = torch.ones(self.extent(term.space), dtype=torch.bool)
            for predicate in term.predicates:
                out = out & self.holds(predicate, term.space)
            return out
        if isinstance(term, Seen):
            return within_band(self.mask(term.of), term.least, term.most)
        if isinstance(term, Read):
            index = term.relation.index(self)
            index = index if term.of is None else index[self.mask(term.of).flatten()]
            out = torch.zeros(self.extent(term.space), dtype=torch.bool)
            out.view(-1)[index[index >= 0]] = True
            return out
        pairs = term.pairs.on(self)
        if term.of is not None:
            pairs = pairs & self.mask(term.of)[:, None, :, None]
        return pairs.any(2).any(1).expand(self.extent(term.space))


def within_band(queries: torch.Tensor, least: int, most: int) -> torch.Tensor:
    """Keys j for which some query i has least <= i - j <= most."""
    columns = queries.shape[1]
    count = torch.nn.functional.pad(queries.long().cumsum(1), (1, 0))
    j = torch.arange(columns)
    first, last = (j + least).clamp(0, columns), (j + min(most, columns) + 1).clamp(0, columns)
    return count[:, last] > count[:, first]
