"""Biases of attention scores, by what the kernel can be told of them.

ByDistance   a tensor that is read at query - key + c: `position_bias`, whatever spelling led there
ByBucket     rows of a table, or numbers, that depend on query - key alone: T5-like buckets, slopes
ByTime       a table that is looked up by a non-decreasing function of |query time - key time|: `time_bias`
Dense        any other product of tensors; a size of one where it does not depend on queries or on keys
ByCase       terms that some visible pairs have and others have not
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

from ..calls import is_tensor, op, rank_of
from .calls import arguments, shape, value
from .checks import GapAtMost
from .facts import Facts
from .formula import KEY, QUERY, Index, Sizes, axes_of, written
from .grid import Places, along_groups
from .indexing import follow
from .language import Data, Product, Sum, Unknown
from .table import Table
from .times import Gap, buckets, gap_of

_LARGEST = 2**26


@dataclass(frozen=True)
class Dense:
    factors: tuple[Data, ...]
    coef: float

    def __str__(self) -> str:
        return f"{self.coef:g}·{'·'.join(map(str, self.factors))}"


@dataclass(frozen=True)
class ByDistance:
    """`data` with query - key + first at dim `dim` (or the other way round), and nothing of pairs elsewhere."""

    data: Data
    dim: int
    coef: float

    @property
    def sign(self) -> int:
        return int(dict(self.data.index[self.dim].coefs)[QUERY])

    @property
    def first(self) -> Any:
        return self.data.index[self.dim].const

    def __str__(self) -> str:
        return f"{self.coef:g}·{self.data} by distance"


@dataclass(frozen=True, eq=False)
class ByBucket:
    """`table[entries[query - key + M - 1]]`, or the entries themselves where there is no table."""

    table: fx.Node | None
    rest: Index  # of the table's other dims
    entries: torch.Tensor  # (2M - 1,), with dims for `axes` before it
    coef: float
    term: Data
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = self.table.name if self.table is not None else "numbers"
        return f"{self.coef:g}·{self.term} as {name}[{self.entries.shape[-1]} distances]{written(self.rest)}"


@dataclass(frozen=True)
class ByTime:
    """`table[first + number of bounds <= |query time - key time|]`."""

    table: fx.Node
    rest: Index
    first: int
    bounds: tuple[int, ...]
    gap: Gap
    coef: float
    term: Data

    def __str__(self) -> str:
        return f"{self.coef:g}·{self.term} as {self.table.name}[{len(self.bounds) + 1} buckets of {self.gap}]"


@dataclass(frozen=True, eq=False)
class ByCase:
    sums: Table  # a sum for each visible case, HIDDEN elsewhere

    def __str__(self) -> str:
        return f"by case {self.sums}"


Bias: TypeAlias = Dense | ByDistance | ByBucket | ByTime | ByCase


def classified(visible: Mapping[tuple[bool, ...], Sum], cases: Table, sizes: Sizes, facts: Facts) -> list[Bias]:
    """The biases of an attention, given the sum of each visible case."""
    shared = set.intersection(*(set(s.terms) for s in visible.values()))
    found = [_term(factors, c, sizes, facts) for factors, c in sorted(shared, key=lambda t: str(t[0]))]
    left = {b: Sum(tuple(t for t in s.terms if t not in shared), s.const, s.dtype) for b, s in visible.items()}
    if any(s.terms or s.const for s in left.values()):
        found.append(ByCase(_told_apart(cases, left)))
    return found


def _told_apart(cases: Table, left: Mapping[tuple[bool, ...], Sum]) -> Table:
    """The sum of each visible case, without atoms that only tell visible from hidden pairs: those have no score."""
    atoms, rows, at = list(cases.atoms), {bits: left.get(bits, x) for bits, x in cases.rows.items()}, 0
    hidden = next((x for bits, x in cases.rows.items() if bits not in left), None)
    while at < len(atoms):
        merged: dict[tuple[bool, ...], Any] = {}
        for bits, leaf in rows.items():
            rest = bits[:at] + bits[at + 1 :]
            if merged.setdefault(rest, leaf) is hidden:
                merged[rest] = leaf
            elif leaf is not hidden and merged[rest] != leaf:
                break
        else:
            rows = merged
            del atoms[at]
            continue
        at += 1
    return Table(tuple(atoms), rows)


def _term(factors: Product, coef: float, sizes: Sizes, facts: Facts) -> Bias:
    data = tuple(f for f in factors if isinstance(f, Data))
    if len(data) == 1 and not data[0].inverse and data[0].of_pairs:
        for rule in (_by_distance, _by_bucket, _by_time):
            found = rule(data[0], coef, sizes, facts)
            if found is not None:
                return found
    return Dense(data, coef)


def checks_of(bias: Bias) -> list[GapAtMost]:
    """A lookup that becomes an argument of the kernel would not have raised."""
    if not isinstance(bias, ByTime) or bias.gap.most is None:
        return []
    return [GapAtMost(bias.gap.query, bias.gap.key, bias.gap.most)]


def _by_distance(data: Data, coef: float, sizes: Sizes, facts: Facts) -> ByDistance | None:
    dims = [d for d, i in enumerate(data.index) if i.axes & {QUERY, KEY}]
    if len(dims) != 1:
        return None
    coefs = dict(data.index[dims[0]].coefs)
    if set(coefs) != {QUERY, KEY} or coefs[QUERY] != -coefs[KEY] or abs(coefs[QUERY]) != 1:
        return None
    return ByDistance(data, dims[0], coef)


# --- rows of a table by distance -----------------------------------------------------------------------


@dataclass(frozen=True)
class Lookup:
    """`table[index, …]`: the index at its place, and the table's other dims at theirs."""

    table: fx.Node
    index: fx.Node
    at: Index
    rest: Index


def lookup(data: Data, sizes: Sizes) -> Lookup | None:
    """What a lookup along the first dim of a table reads; the index is followed through views."""
    try:
        found = _looked_up(data)
    except Unknown:
        return None
    if found is None or not isinstance(shape(found.table)[0], int):
        return None
    node, at = follow(sizes, found.index, found.at)
    return Lookup(found.table, node, at, found.rest)


def _looked_up(data: Data) -> Lookup | None:
    node, index = data.node, data.index
    match op(node):
        case "embedding":
            args = arguments(node, ("weight", "indices"))
            return Lookup(args["weight"], args["indices"], index[:-1], index[-1:])
        case "index_select":
            args = arguments(node, ("self", "dim", "index"))
            if args["dim"] % rank_of(args["self"]) == 0:
                return Lookup(args["self"], args["index"], index[:1], index[1:])
        case "index":
            args = arguments(node, ("self", "indices"))
            given = args["indices"]
            if len(given) == 1 and is_tensor(given[0]) and not value(given[0]).dtype.is_floating_point:
                count = rank_of(given[0])
                return Lookup(args["self"], given[0], index[:count], index[count:])
    return None


def _by_bucket(data: Data, coef: float, sizes: Sizes, facts: Facts) -> ByBucket | None:
    if facts.is_constant(data.node):
        axes = tuple(sorted(data.axes - {QUERY, KEY}))
        entries = _entries(data.node, data.index, sizes, facts, axes)
        return ByBucket(None, (), entries, coef, data, axes) if entries is not None else None
    found = lookup(data, sizes)
    if found is None or axes_of(found.rest) & {QUERY, KEY} or not facts.is_constant(found.index):
        return None
    entries = _entries(found.index, found.at, sizes, facts)
    if entries is None or int(entries.min()) < 0 or int(entries.max()) >= int(shape(found.table)[0]):
        return None
    return ByBucket(found.table, found.rest, entries, coef, data)


def _entries(
    node: fx.Node, index: Index, sizes: Sizes, facts: Facts, others: tuple[str, ...] = ()
) -> torch.Tensor | None:
    """A constant at queries and keys, (…, 2M - 1) by query - key + M - 1; None where distance does not tell."""
    axes = (*others, QUERY, KEY)
    lengths = [sizes[axis] for axis in axes]
    if not all(isinstance(s, int) for s in lengths) or math.prod(map(int, lengths)) > _LARGEST:
        return None
    if not axes_of(index) <= set(axes) or not all(isinstance(i.const, int) for i in index):
        return None
    seen = facts.example(node)
    if seen is None:
        return None
    along = along_groups([(axis,) for axis in axes], lambda axis: int(sizes[axis]))
    at = Places(along, len(axes), {}, int).tensor_of(seen.cpu(), index)
    return by_distance(at.expand([int(s) for s in lengths]))


def by_distance(pairs: torch.Tensor) -> torch.Tensor | None:
    """(…, Nq, Nk) as (…, 2M - 1), entry i - j + M - 1 for query i and key j; None where i - j does not tell."""
    if not torch.equal(pairs[..., 1:, 1:], pairs[..., :-1, :-1]):
        return None
    *rest, queries, keys = pairs.shape
    most = max(queries, keys)
    entries = pairs.new_zeros(*rest, 2 * most - 1)
    entries[..., most - 1 : most - 1 + queries] = pairs[..., 0]
    entries[..., most - keys : most - 1] = pairs[..., 0, 1:].flip(-1)
    return entries


# --- by time -------------------------------------------------------------------------------------------


def _by_time(data: Data, coef: float, sizes: Sizes, facts: Facts) -> ByTime | None:
    found = lookup(data, sizes)
    if found is None or axes_of(found.rest) & {QUERY, KEY} or facts.gradients_reach(found.index):
        return None
    if value(found.index).dtype not in (torch.int64, torch.int32):
        return None
    chain = gap_of(found.index, found.at, sizes)
    if chain is None:
        return None
    told = buckets(chain, int(shape(found.table)[0]))
    if told is None:
        return None
    first, bounds, gap = told
    return ByTime(found.table, found.rest, first, bounds, gap, coef, data)
