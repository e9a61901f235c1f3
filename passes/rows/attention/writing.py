"""Tables of cases, and sums of products, as ops of the packed graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..calls import COPIES, VIEWS, op
from .builder import Builder, Layout
from .calls import value
from .formula import KEY, QUERY, Formula, Size
from .language import AtLeast, Atom, Data, Product, Refused, Sum, Test
from .normal import HIDDEN, NormalForm
from .table import Table

aten = torch.ops.aten


class Writing:
    """What a normal form says, in a layout: packed rows, heads, columns or distances."""

    def __init__(self, form: NormalForm, builder: Builder) -> None:
        self.form, self.b = form, builder
        self.heads = form.heads
        self.pair_layout: Layout = (form.sequences, self.heads, (QUERY,), (KEY,))
        self.moved: Callable[[Formula], Formula] = as_it_is  # indices, in the axes of the layout at hand
        self.more: dict[str, Size] = {}  # sizes of axes that only the layout at hand has

    def refuse(self, reason: str, term: object = "") -> Refused:
        return Refused(reason, term, self.form.node)

    def count(self, heads: tuple[str, ...]) -> int:
        sizes = [self.form.sizes[a] for a in heads]
        if not all(isinstance(s, int) for s in sizes):
            raise self.refuse("heads of unknown number", sizes)
        return math.prod(int(s) for s in sizes)

    def truth(self, table: Table, layout: Layout) -> Any:
        """Where a table holds: any of the cases in which it does. True: wherever it is asked."""
        found = self.b.truth(table, layout)
        if found is not None:
            return found
        for bits, leaf in table.rows.items():
            if not leaf.value:
                continue
            case = self._case(table, bits, layout)
            found = case if found is None else self.b.call(aten.logical_or.default, found, case)
        assert found is not None
        return found

    def _case(self, table: Table, bits: tuple[bool, ...], layout: Layout) -> Any:
        found = None
        for atom, holds in zip(table.atoms, bits, strict=True):
            x = self._atom(atom, layout)
            x = x if holds else self.b.call(aten.logical_not.default, x)
            found = x if found is None else self.b.call(aten.logical_and.default, found, x)
        return found

    def _atom(self, atom: Atom, layout: Layout) -> Any:
        if isinstance(atom, AtLeast):
            at = self.b.positions(self.moved(Formula(atom.coefs) - atom.least), layout, self.more)
            return self.b.call(aten.ge.Scalar, at, 0)
        assert isinstance(atom, Test)
        x = self.b.read(atom.node, tuple(map(self.moved, atom.index)), layout, self.more)
        if atom.how == "true":
            return x
        return self.b.call(getattr(aten, atom.how).Scalar, x, atom.value)

    def sum(self, x: Any, y: Any) -> Any:
        return y if x is None else self.b.call(aten.add.Tensor, x, y)

    def scaled(self, x: Any, coef: float) -> Any:
        return x if coef == 1 else self.b.call(aten.mul.Tensor, x, coef)

    def product(self, factors: Product, coef: float, layout: Layout) -> Any:
        found: Any = None
        for f in factors:
            assert isinstance(f, Data)
            x = self.b.read(f.node, tuple(map(self.moved, f.index)), layout, self.more)
            x = self.harmless(x, f, layout) if layout == self.pair_layout else x
            if f.inverse:
                x = self.b.call(aten.reciprocal.default, x)
            found = x if found is None else self.b.call(aten.mul.Tensor, found, x)
        return self.scaled(found, coef)

    def harmless(self, x: Any, f: Data, layout: Layout) -> Any:
        """Ones for queries that are left out in the end: what the graph computes there may be NaN, which spreads.

        Inputs are known to be finite.
        """
        source = f.node
        while op(source) in VIEWS | COPIES:
            source = source.all_input_nodes[0]
        if QUERY not in f.axes or source.op == "placeholder":
            return x
        for table in (self.form.visible.queries, self.form.queries_kept):
            kept = self.truth(table, (*layout[:-1], ())) if table is not None else True
            if kept is not True:
                one = self.b.constant(torch.ones((), dtype=value(f.node).dtype))
                x = self.b.call(aten.where.self, kept, x, one)
        return x

    def total(self, leaf: Sum, layout: Layout) -> Any:
        found: Any = None
        for factors, coef in leaf.terms:
            found = self.sum(found, self.product(factors, coef, layout))
        if found is None:
            return self.b.constant(torch.full([1] * len(layout), leaf.const, dtype=leaf.dtype))
        return found if leaf.const == 0 else self.b.call(aten.add.Tensor, found, leaf.const)

    def by_case(self, table: Table, layout: Layout) -> Any:
        found: Any = None
        for bits, leaf in table.rows.items():
            if leaf is HIDDEN or (not leaf.terms and leaf.const == 0):
                continue
            total = self.total(leaf, layout)
            if table.atoms:
                case = self._case(table, bits, layout)
                zero = self.b.constant(torch.zeros((), dtype=leaf.dtype))
                total = self.b.call(aten.where.self, case, total, zero)
            found = self.sum(found, total)
        return found


def as_it_is(formula: Formula) -> Formula:
    return formula
