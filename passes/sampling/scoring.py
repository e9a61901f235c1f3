"""A scoring: queries times rows of a table, and how positions, negatives and queries share dims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from ...graph.shapes import expression
from ..common.cross_entropy import HALF, SIZE, Refused, value_of
from .plans import Plan
from .products import SUMMED, Labels, Product, product_of
from .rows import rows_of
from .tables import Rows

FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class Scoring:
    """Queries (first operand) times rows (second operand); a label of '' is a dim of one."""

    product: Product
    query: Plan
    of_query: Labels
    other: Plan  # the second operand itself, without what only repeats it
    of_rows: Labels  # without the dim of a row where `rows` is known
    rows: Rows | None  # None: rows of the batch, not of a table

    @cached_property
    def positions(self) -> Labels:
        """Dims that queries and rows share, in the order of the query."""
        return tuple(n for n in self.of_query if n and n != SUMMED and n in self.of_rows)

    @cached_property
    def negatives(self) -> Labels:
        return tuple(n for n in self.of_rows if n and n != SUMMED and n not in self.of_query)

    @cached_property
    def sharing(self) -> Labels:
        """Dims of queries that meet the same rows."""
        return tuple(n for n in self.of_query if n and n != SUMMED and n not in self.of_rows)

    @property
    def own_rows(self) -> bool:
        """Does each query have rows of its own?"""
        return bool(self.positions and not self.sharing and self.rows is not None)

    @property
    def per_position(self) -> bool:
        return self.own_rows and bool(self.negatives)

    @property
    def spread(self) -> bool:
        """Are rows repeated for queries that share them?"""
        plan = self.other if self.rows is None else self.rows.ids
        return any(s is not None for s in plan.spread)

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (*self.product.nodes, *(() if self.rows is None else self.rows.nodes))

    @property
    def in_order(self) -> bool:
        """Is the result, row by row, that of positions and then of negatives?"""
        wanted = (*self.positions, *self.negatives)
        rows = tuple(n for n in self.of_rows if n and n != SUMMED)
        return tuple(n for n in self.product.result if n) == wanted == rows

    @cached_property
    def counts(self) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
        """Queries, rows that each of them meets, and numbers of a row."""
        sizes = dict(zip(self.product.labels[1], value_of(self.product.operands[1]).shape, strict=True))
        sizes |= dict(zip(self.product.labels[0], value_of(self.product.operands[0]).shape, strict=True))
        sizes |= {
            n: s for n, s in zip(self.product.labels[1], value_of(self.product.operands[1]).shape, strict=True) if n
        }
        queries = _count(sizes, (*self.positions, *self.sharing))
        return queries, _count(sizes, self.negatives), expression(sizes[SUMMED])


def _count(sizes: dict[str, Any], labels: Labels) -> sympy.Expr:
    return sympy.Mul(*[expression(sizes[n]) for n in labels])


def scorings_of(node: fx.Node) -> Iterator[Scoring]:
    """Ways to read a product as a scoring, either operand being the rows; those with a table first."""
    product = product_of(node)
    if product is None:
        return
    found = [s for p in (product, product.swapped()) if (s := _read(p)) is not None]
    yield from sorted(found, key=lambda s: s.rows is None)


def _read(product: Product) -> Scoring | None:
    queries, operand = product.operands
    axis = product.labels[1].index(SUMMED)
    query = Plan.of(queries)
    of_query = _unspread(product.labels[0], query)
    if SUMMED not in of_query:
        return None
    try:
        rows = rows_of(operand, axis)
    except Refused:
        # Only where each query has rows of its own is there something to win, and a reason to tell.
        plain = tuple(n for n in product.labels[1] if n != SUMMED)
        guess = Scoring(product, query, of_query, Plan.of(operand), plain, None)
        if guess.positions and guess.negatives and not guess.sharing:
            raise
        return None
    other = Plan.of(operand)
    if rows is None:
        found = Scoring(product, query, of_query, other, _unspread(product.labels[1], other), None)
    else:
        if product.eps >= 0:
            if rows.table.eps >= 0 or rows.factors or rows.learned or rows.scale != 1.0:
                raise Refused("rows-changed", "rows are scaled, and normalised afterwards", product.node)
            rows = replace(rows, table=replace(rows.table, eps=product.eps))
        plain = tuple(n for n in product.labels[1] if n != SUMMED)
        found = Scoring(product, query, of_query, other, _unspread(plain, rows.ids), rows)
    known = {*found.of_query, *found.of_rows}
    return found if SUMMED in _summed(found) and all(n in known for n in product.result if n) else None


def _summed(found: Scoring) -> Labels:
    return found.of_rows if found.rows is None else (SUMMED,)


def _unspread(labels: Labels, plan: Plan) -> Labels:
    return tuple("" if s is not None else n for n, s in zip(labels, plan.spread, strict=True))


# --- what keeps a scoring as it is -------------------------------------------------------------------


def check_types(s: Scoring) -> None:
    types = {value_of(x).dtype for x in (*s.product.operands, s.product.node)}
    if s.rows is not None:
        types.add(value_of(s.rows.table.node).dtype)
    if types & set(HALF):
        text = "scores are computed in 16 bits, and the kernel would not round as they do"
        raise Refused("sampling-half", text, s.product.node, "keep table and queries of the loss in float32")
    if len(types) != 1 or not types <= set(FLOATS):
        raise Refused("sampling-types", f"the product mixes {', '.join(sorted(map(str, types)))}", s.product.node)


def read_elsewhere(s: Scoring, members: set[fx.Node]) -> fx.Node | None:
    """A looked-up tensor of full size that something else than scores reads, so that it has to be stored anyway."""
    assert s.rows is not None
    whole = expression(value_of(s.product.operands[1]).numel())
    for node in (*s.product.nodes[:-1], *s.rows.nodes):
        small = (expression(value_of(node).numel()) / whole).is_number and (
            2 * expression(value_of(node).numel()) <= whole
        ) == sympy.true
        if not small and any(u not in members and u.target is not SIZE for u in node.users):
            return node
    return None
