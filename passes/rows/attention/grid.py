"""Formulas, atoms and tables evaluated on a batch: the reference of what a normal form says.

Everything is laid out over all axes of the weights, (batch axes…, queries, keys), with a size of one where it does not
depend on an axis. Tests run whole normal forms on it; the engine may take from it what a check needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .formula import KEY, Formula, Index, Size, Sizes
from .language import AtLeast, Atom, Blind, Data, Product, Sum, Test
from .table import Table, compared


def symbols_in(values: Mapping[fx.Node, Any]) -> dict[Any, int]:
    """What symbolic sizes are in a batch."""
    found = {}
    for node, value in values.items():
        for d, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
            if isinstance(size, torch.SymInt) and isinstance(value, Tensor):
                found[size.node.expr] = int(value.shape[d])
    return found


class Grid:
    """Axes with their sizes in this batch, and the values of the graph's nodes."""

    def __init__(self, axes: Sequence[str], sizes: Sizes, values: Mapping[fx.Node, Any]) -> None:
        self.axes, self.values = tuple(axes), values
        self._symbols = symbols_in(values)
        self.shape = tuple(self.number(sizes[a]) for a in self.axes)
        self._along = {}
        for d, axis in enumerate(self.axes):
            view = [1] * len(self.axes)
            view[d] = -1
            self._along[axis] = torch.arange(self.shape[d]).view(view)

    def number(self, size: Size) -> int:
        return size if isinstance(size, int) else int(size.subs(self._symbols))

    @property
    def key_dim(self) -> int:
        return self.axes.index(KEY)

    def formula(self, formula: Formula) -> Tensor:
        at = torch.full([1] * len(self.axes), self.number(formula.const))
        for axis, c in formula.coefs:
            at = at + self.number(c) * self._along[axis]
        return at

    def tensor(self, node: fx.Node, index: Index) -> Tensor:
        """A tensor at each place; where a formula points outside of it, the case is another."""
        x = torch.as_tensor(self.values[node])  # a size is a number
        if not index:
            return x.reshape([1] * len(self.axes))
        places = [self.formula(i).clamp(0, max(s - 1, 0)) for i, s in zip(index, x.shape, strict=True)]
        return x[tuple(places)]

    def atom(self, atom: Atom) -> Tensor:
        if isinstance(atom, AtLeast):
            return self.formula(Formula(atom.coefs)) >= self.number(atom.least)
        assert isinstance(atom, Test) and not isinstance(atom, Blind)
        found: Tensor = compared(self.tensor(atom.node, atom.index), atom)
        return found

    def case(self, table: Table, bits: tuple[bool, ...]) -> Tensor:
        found = torch.ones([1] * len(self.axes), dtype=torch.bool)
        for atom, holds in zip(table.atoms, bits, strict=True):
            found = found & (self.atom(atom) == holds)
        return found

    def truth(self, table: Table) -> Tensor:
        found = torch.zeros([1] * len(self.axes), dtype=torch.bool)
        for bits, leaf in table.rows.items():
            if leaf.value:
                found = found | self.case(table, bits)
        return found

    def factor(self, factor: Data, dtype: torch.dtype) -> Tensor:
        x = self.tensor(factor.node, factor.index).to(dtype)
        return 1 / x if factor.inverse else x

    def product(self, factors: Product, coef: float, dtype: torch.dtype) -> Tensor:
        found = torch.tensor(coef, dtype=dtype)
        for f in factors:
            assert isinstance(f, Data)
            found = found * self.factor(f, dtype)
        return found

    def sum(self, leaf: Sum, dtype: torch.dtype) -> Tensor:
        found = torch.full([1] * len(self.axes), leaf.const, dtype=dtype)
        for factors, coef in leaf.terms:
            found = found + self.product(factors, coef, dtype)
        return found

    def blind(self, visible: Table) -> Tensor:
        """Queries that see no key; the key axis has a size of one."""
        return ~self.truth(visible).expand(self.shape).any(self.key_dim, keepdim=True)
