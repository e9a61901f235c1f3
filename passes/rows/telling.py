"""Which rows a table of truth keeps, as predicates of the graph's values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from ...graph.nodes import tensor
from .attention.evaluate import Evaluator
from .attention.formula import KEY, QUERY, Formula, Index, Size, Sizes, size_of
from .attention.indexing import flattened
from .attention.language import Atom, NeedsSplit, Refused, Test, Unknown
from .attention.normal import fixed
from .attention.table import Table
from .axes import Axis
from .calls import is_tensor, op
from .known import Known
from .matching import Matching, Rows
from .meaning import Predicate
from .meanings import Meanings


class Telling:
    """Predicates for what an evaluation found visible."""

    def __init__(self, known: Known, meanings: Meanings) -> None:
        self.known, self.typing, self.meanings = known, known.typing, meanings

    def of(
        self, visible: Table, mask: Table | None, side: str, rows: Rows, sizes: Sizes
    ) -> tuple[frozenset[Predicate], bool]:
        """Predicates that hold of visible keys, or of queries that see one; and whether they are that side's mask."""
        other, fixed_atoms, found = (QUERY if side == KEY else KEY), fixed(visible), Matching(sizes, self.typing)
        mine = {a: holds for a, holds in fixed_atoms.items() if side in a.axes and other not in a.axes}
        known = {a: p for a, holds in mine.items() if (p := self._predicate(a, holds, found, rows)) is not None}
        exactly = mask is None or (
            all(a in known for a in mask.atoms)
            and all(
                bool(leaf.value) == all(mine[a] == bit for a, bit in zip(mask.atoms, bits, strict=True))
                for bits, leaf in mask.rows.items()
            )
        )
        named = self._named(mask, rows, side, sizes) if mask is not None and not exactly else None
        return (frozenset([named]), True) if named is not None else (frozenset(known.values()), exactly)

    def _named(self, mask: Table, rows: Rows, side: str, sizes: Sizes) -> Predicate | None:
        """A tensor of the batch that is this mask."""
        names = [name for name in rows if name == side or name not in (QUERY, KEY)]
        axes = {x for name in names for x in rows[name]}
        ev = Evaluator(self.known.graph, None, sizes, self.known, False)
        for node in self.known.graph.nodes:
            value = tensor(node)
            if value is None or value.dtype != torch.bool or set(self.typing.flat(node)) != axes:
                continue
            index = self._index(node, rows, names) if self.meanings.describes_rows(node) else None
            try:
                if index is not None and ev.at(node, index).key == mask.key:
                    return self._of_node(node, True)
            except (Refused, Unknown, NeedsSplit):
                continue
        return None

    def _index(self, node: fx.Node, rows: Rows, names: Iterable[str]) -> Index | None:
        """Dims of a tensor by axes of the weights."""
        found = []
        for dim in self.typing.atoms(node):
            mine = [name for name in names if rows[name] and set(rows[name]) <= set(dim)]
            mine.sort(key=lambda name: dim.index(rows[name][0]))
            if [a for name in mine for a in rows[name]] != dim:
                return None
            found.append(mine)
        return tuple(flattened(tuple(map(Formula.axis, dim)), [self._length(rows[n]) for n in dim]) for dim in found)

    def _length(self, axes: tuple[Axis, ...]) -> Size:
        return size_of(self.typing.size_of(axes))

    def _predicate(self, atom: Atom, holds: bool, found: Matching, rows: Rows) -> Predicate | None:
        """A test of data as a predicate of the rows it runs over."""
        if not isinstance(atom, Test) or atom.node in self.meanings.tainted:
            return None
        mine = found.rows(atom.node, atom.index, atom.axes)
        whole = mine is not None and sum(len(a) for a in mine.values()) == len(self.typing.flat(atom.node))
        if mine is None or not whole or any(rows.get(name) != axes for name, axes in mine.items()):
            return None
        if atom.how in ("eq", "ne"):
            return Predicate(self.meanings.root(atom.node), atom.value, (atom.how == "eq") == holds)
        if atom.how == "true":
            return self._of_node(atom.node, holds)
        asked = [u for u in atom.node.users if op(u) == atom.how and u.args[1:] == (atom.value,) and is_tensor(u)]
        return self._of_node(asked[0], holds) if asked else None

    def _of_node(self, node: fx.Node, holds: bool) -> Predicate:
        return Predicate(self.meanings.root(node), True, holds)
