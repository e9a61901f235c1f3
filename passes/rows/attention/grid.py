"""Formulas, atoms and tables evaluated on a batch.

`Places` evaluates at any places, given the coordinates of each: rows of a set, say. `Grid` is laid out over all axes of
the weights, (batch axes…, queries, keys), with a size of one where a value does not depend on an axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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


class Places:
    """Places with a coordinate along each axis, as tensors that broadcast against each other."""

    def __init__(
        self, along: Mapping[str, Tensor], rank: int, values: Mapping[fx.Node, Any], number: Callable[[Size], int]
    ) -> None:
        self.along, self.rank, self.values, self.number = along, rank, values, number

    def formula(self, formula: Formula) -> Tensor:
        at = torch.full([1] * self.rank, self.number(formula.const))
        for axis, c in formula.coefs:
            at = at + self.number(c) * self.along[axis]
        return at

    def tensor(self, node: fx.Node, index: Index) -> Tensor:
        """A tensor at each place; where a formula points outside of it, the case is another."""
        return self.tensor_of(torch.as_tensor(self.values[node]), index)  # a size is a number

    def tensor_of(self, x: Tensor, index: Index) -> Tensor:
        if not index:
            return x.reshape([1] * self.rank)
        places = [self.formula(i).clamp(0, max(s - 1, 0)).to(x.device) for i, s in zip(index, x.shape, strict=True)]
        return x[tuple(places)].cpu()

    def atom(self, atom: Atom) -> Tensor:
        if isinstance(atom, AtLeast):
            return self.formula(Formula(atom.coefs)) >= self.number(atom.least)
        assert isinstance(atom, Test) and not isinstance(atom, Blind)
        found: Tensor = compared(self.tensor(atom.node, atom.index), atom)
        return found

    def case(self, table: Table, bits: tuple[bool, ...]) -> Tensor:
        found = torch.ones([1] * self.rank, dtype=torch.bool)
        for atom, holds in zip(table.atoms, bits, strict=True):
            found = found & (self.atom(atom) == holds)
        return found

    def truth(self, table: Table) -> Tensor:
        found = torch.zeros([1] * self.rank, dtype=torch.bool)
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
        found = torch.full([1] * self.rank, leaf.const, dtype=dtype)
        for factors, coef in leaf.terms:
            found = found + self.product(factors, coef, dtype)
        return found


class Grid(Places):
    """All pairs: axes with their sizes in this batch."""

    def __init__(
        self, axes: Sequence[str], sizes: Sizes, values: Mapping[fx.Node, Any],
        number: Callable[[Size], int] | None = None,
    ) -> None:  # fmt: skip
        self.axes = tuple(axes)
        if number is None:
            symbols = symbols_in(values)

            def number(size: Size) -> int:
                return size if isinstance(size, int) else int(size.subs(symbols))

        self.shape = tuple(number(sizes[a]) for a in self.axes)
        along = {}
        for d, axis in enumerate(self.axes):
            view = [1] * len(self.axes)
            view[d] = -1
            along[axis] = torch.arange(self.shape[d]).view(view)
        super().__init__(along, len(self.axes), values, number)

    @property
    def key_dim(self) -> int:
        return self.axes.index(KEY)

    def blind(self, visible: Table) -> Tensor:
        """Queries that see no key; the key axis has a size of one."""
        return ~self.truth(visible).expand(self.shape).any(self.key_dim, keepdim=True)


def along_groups(groups: Sequence[Sequence[str]], length: Callable[[str], int]) -> dict[str, Tensor]:
    """Coordinates of a tensor whose dims run over groups of axes, the outermost of a group first."""
    found: dict[str, Tensor] = {}
    for d, group in enumerate(groups):
        lengths = [length(axis) for axis in group]
        left = torch.arange(math.prod(lengths)).view([-1 if i == d else 1 for i in range(len(groups))])
        for axis, size in zip(reversed(group), reversed(lengths), strict=True):
            found[axis], left = left % size, left // size
    return found
