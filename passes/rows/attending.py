"""Attention in terms of rows: the spaces that queries and keys live in, keys that predicates tell, what a call reads.

`attention/` says what a chain of ops computes; here its axes are matched with the axes of the graph. What cannot be
matched is refused, with the term.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .attention.builder import Layout, Packed
from .attention.checks import Check, Finite, GapAtMost, Same, SeesKey, SizeOfScores, TwoValues
from .attention.find import FUSED, is_candidate
from .attention.formula import KEY, QUERY, ZERO, Formula, Index, Size, axes_of
from .attention.language import Data, Refused, Test
from .attention.lower import lowered
from .attention.normal import NormalForm
from .attention.recognise import recognise
from .attention.table import Table
from .attention.weighed import weighed, weighings
from .axes import Axis, Typing
from .calls import dim_of, is_tensor, op, operand, tensors
from .matching import Matching, Rows, ordered
from .meaning import Predicate
from .sets import UNBOUNDED, Holding, Shown, Terms, VisibleTo
from .spaces import Space
from .telling import Telling


@dataclass(eq=False)
class Attention:
    """An attention over rows."""

    form: NormalForm
    query: fx.Node  # operands of the products
    key: fx.Node
    value: fx.Node
    queries: Space
    keys: Space
    rows: Rows  # of sequences, queries and keys
    predicates: frozenset[Predicate]  # hold of every key that a query sees
    shown: frozenset[Predicate]  # hold of every query that sees a key
    told: frozenset[str]  # sides whose masks these are, exactly
    tainted: set[fx.Node]  # values that only the graph computes
    reads: tuple[tuple[fx.Node, str], ...] = ()  # tensors, and at which rows: QUERY, KEY, or '' for all of them
    gathers: frozenset[tuple[fx.Node, fx.Node, str]] = frozenset()  # pairs gathered from a tensor at its own rows

    @property
    def node(self) -> fx.Node:
        return self.form.node

    @property
    def activation(self) -> str:
        return self.form.activation

    @property
    def least(self) -> int:
        """Distance from key to query, in columns."""
        return _limited(self.form.visible.least)

    @property
    def most(self) -> int:
        return _limited(self.form.visible.most)

    @property
    def self_attention(self) -> bool:
        return self.queries == self.keys

    @property
    def bounded(self) -> bool:
        """Does distance alone bound which keys are seen?"""
        return self.least > -UNBOUNDED or self.most < UNBOUNDED

    @property
    def exact(self) -> bool:
        """Do distance and predicates tell which pairs are visible?"""
        return self.form.visible.pairs is None and self.told == {QUERY, KEY}

    @property
    def keys_kept(self) -> Terms | None:
        """Keys that the mask of keys keeps; None where there is none, or where only the graph knows."""
        mask = self.form.visible.keys
        if mask is None or not self.known_before(mask):
            return None
        if KEY in self.told:
            return frozenset([Holding(self.keys, self.predicates)])
        return frozenset([VisibleTo(self.keys, Shown.of(mask, self.pairs, self.form.sizes), None)])

    @property
    def sees_key(self) -> SeesKey | None:
        return next((c for c in self.form.checks if isinstance(c, SeesKey)), None)

    @property
    def pairs(self) -> tuple[tuple[str, ...], ...]:
        """Dims of a tensor of pairs."""
        return self.form.sequences, self.form.heads, (QUERY,), (KEY,)

    def tested(self, table: Table) -> list[fx.Node]:
        """Tensors that a table asks."""
        return [a.node for a in table.atoms if isinstance(a, Test)]

    def known_before(self, table: Table) -> bool:
        """Can it be told before the graph runs?"""
        return not any(n in self.tainted for n in self.tested(table))


def _limited(distance: Any) -> int:
    return int(max(-UNBOUNDED, min(UNBOUNDED, distance)))


def checked_nodes(check: Check) -> list[fx.Node]:
    """Tensors that a check looks at before the graph runs."""
    match check:
        case Same() | TwoValues() | Finite():
            return [check.node]
        case SizeOfScores():
            return [f.node for f in check.term if isinstance(f, Data)]
        case GapAtMost():
            return [check.query.node, check.key.node]
    return []


# --- recognition ---------------------------------------------------------------------------------------


class Attentions:
    """Recognises the attentions of a graph whose queries and keys are rows."""

    def __init__(self, telling: Telling, space_of: Callable[[Any], Space | None]) -> None:
        self.telling, self.known, self.space_of = telling, telling.known, space_of
        self.typing, self.meanings = telling.typing, telling.meanings

    def of(self, node: fx.Node) -> Attention | None:
        """The attention whose result is a node; None where it is none over rows, `Refused` where it almost is."""
        over_rows = [x for x in tensors(node) if (s := self.space_of(x)) is not None and s.column]
        if not over_rows or not (op(node) == FUSED or is_candidate(node)):
            return None
        form = recognise(node, self.known)
        if isinstance(form, Refused):
            raise form
        return self._in_rows(form) if form is not None else None

    def weighing(self, node: fx.Node) -> Attention | None:
        """A product over rows with weights that are no scores."""
        for way in weighings(node):
            keys = self.space_of(way.values)
            if keys is None or not keys.column or tuple(self.typing.atoms(way.values)[way.contracted]) != keys.column:
                continue
            try:
                found = self._in_rows(weighed(way, self.known))
            except Refused:
                continue
            if found is not None and found.self_attention:
                return found
        return None

    def _in_rows(self, form: NormalForm) -> Attention | None:
        found = Matching(form.sizes, self.typing)
        value, at = form.value.nearest
        keys = self.space_of(value)
        rows = found.rows(value, at, (*form.sequences, KEY))
        sequence = self._sequence(form, rows) if rows is not None else None
        if keys is None or rows is None or rows.get(KEY) != keys.column or sequence != keys.sequence:
            return None
        if form.key is not None and found.rows(*form.key.nearest, (*form.sequences, KEY)) != rows:
            raise Refused("keys and values have different rows", f"{form.key}, {form.value}", form.node)
        result = found.rows(form.node, form.result, (*form.sequences, QUERY))
        if result is None or self._sequence(form, result) != keys.sequence:
            raise Refused("queries are no rows of the same sequences", form.query, form.node)
        rows |= {QUERY: result.get(QUERY, ())}
        told, predicates = set(), {}
        for side, mask in ((KEY, form.visible.keys), (QUERY, form.visible.queries)):
            mine = {name: axes for name, axes in rows.items() if name in (*form.sequences, side)}
            predicates[side], exactly = self.telling.of(form.visibility, mask, side, mine, form.sizes)
            told |= {side} if exactly else set()
        query, key = (x.nearest[0] if x is not None else value for x in (form.query, form.key))
        a = Attention(
            form, query, key, value,
            Space(keys.sequence, rows[QUERY]), keys, rows,
            predicates[KEY], predicates[QUERY], frozenset(told), self.meanings.tainted,
        )  # fmt: skip
        dry = Reads(a, self.typing)
        lowered(form, dry)
        a.reads, a.gathers = tuple(dict.fromkeys(dry.found)), frozenset(dry.gathers)
        return a

    def _sequence(self, form: NormalForm, rows: Rows) -> tuple[Axis, ...] | None:
        if any(s not in rows for s in form.sequences):
            return None
        return tuple(a for s in form.sequences for a in rows[s])


# --- what a call reads ---------------------------------------------------------------------------------


def unreadable(a: Attention, typing: Typing, node: fx.Node, index: Index, layout: Layout) -> Refused | None:
    """Why a tensor cannot be laid out as packed rows."""
    if not is_tensor(node) or not isinstance(layout[0], Packed):
        return None
    names = {*a.form.sequences, layout[0].side}
    for formula in index:
        rest = formula.axes - names
        if not rest:
            continue
        mixed = formula.axes & names and not is_plain(a, typing, node, index, layout[0].side)
        if mixed or ordered(a.form.sizes, formula) is None:
            return Refused("rows and features of a tensor cannot be told apart", f"{node}{formula}", a.node)
    return None


def is_plain(a: Attention, typing: Typing, node: fx.Node, index: Index, side: str) -> bool:
    """Are rows of the tensor the rows of queries or of keys, each its own?"""
    names = (*a.form.sequences, side)
    mine = Matching(a.form.sizes, typing).rows(node, index, names)
    if mine is None or any(a.rows[name] != axes for name, axes in mine.items()):
        return False
    of_rows = sorted(x for axes in mine.values() for x in axes)
    space = a.queries if side == QUERY else a.keys
    return of_rows == sorted(x for x in typing.flat(node) if x in space.axes)  # a tensor of pairs has some twice


NOTHING = object()  # what a builder that builds nothing builds


class Reads:
    """A builder that builds nothing: it notes what would be read, and refuses what cannot be."""

    query_offsets = key_offsets = query_columns = key_columns = NOTHING

    def __init__(self, a: Attention, typing: Typing) -> None:
        self.a, self.typing = a, typing
        self.found: list[tuple[fx.Node, str]] = []
        self.gathers: list[tuple[fx.Node, fx.Node, str]] = []

    def read(self, node: fx.Node, index: Index, layout: Layout, sizes: dict[str, Size]) -> object:
        why = unreadable(self.a, self.typing, node, index, layout)
        if why is not None:
            raise why
        side = layout[0].side if isinstance(layout[0], Packed) else ""
        plain = side and is_tensor(node) and is_plain(self.a, self.typing, node, index, side)
        self.found.append((node, side if plain else ""))
        if op(node) == "gather" and not plain:
            self._gathered(node, index)
        return NOTHING

    def _gathered(self, node: fx.Node, index: Index) -> None:
        """Pairs of which each is an element of its query's row, or of its key's: relative positions, say."""
        source = operand(node)
        there = tuple(ZERO if d == dim_of(node) else formula for d, formula in enumerate(index))
        for side, other in ((QUERY, KEY), (KEY, QUERY)):
            alone = side in axes_of(there) and other not in axes_of(there)
            if alone and is_plain(self.a, self.typing, source, there, side):
                self.gathers.append((node, source, side))

    def truth(self, table: Table, layout: Layout) -> Any:
        """Masks are computed before the graph runs, where they can be."""
        return NOTHING if self.a.known_before(table) else None

    def positions(self, formula: Formula, layout: Layout, sizes: dict[str, Size]) -> object:
        return NOTHING

    def constant(self, tensor: torch.Tensor) -> object:
        return NOTHING

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return NOTHING, NOTHING

    def seed(self) -> object:
        return NOTHING
