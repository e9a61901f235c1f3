"""The call of an attention on packed rows: where each tensor that it reads comes from, and how it is laid out."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ....graph.costs import PAIRS
from ....graph.nodes import tensor
from ..attending import Attention, is_plain, unreadable
from ..attention.builder import Layout, Packed
from ..attention.formula import KEY, QUERY, Formula, Index, Size, Sizes, size_of
from ..attention.grid import Places, along_groups
from ..attention.lower import lowered
from ..attention.table import Table
from ..calls import is_tensor, product, shape
from ..matching import ordered
from ..program import Rows, RowSet
from ..sets import Shown

if TYPE_CHECKING:
    from .values import Values

aten = torch.ops.aten
ATTENTION = torch.ops.turbogr.jagged_attention.default
GATHER = torch.ops.turbogr.gather_rows.default


def attention(e: Values, a: Attention, queries: RowSet, keys: RowSet) -> fx.Node:
    """The rows of an attention's result, in the layout that packed values have."""
    builder = PackedBuilder(e, a, queries, keys)
    result, _ = lowered(a.form, builder)
    return builder.finished(result)


class PackedBuilder:
    """Builds a call with the emitter."""

    def __init__(self, e: Values, a: Attention, queries: RowSet, keys: RowSet) -> None:
        self.e, self.a, self.form, self.sizes = e, a, a.form, a.form.sizes
        self.sets = {QUERY: queries, KEY: keys}
        self.query_offsets, self.key_offsets = e.query_offsets(queries), e.offsets(keys)
        self.query_columns, self.key_columns = e.columns(queries), e.columns(keys)

    # --- what `lowered` asks for -------------------------------------------------------------------

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        if target is not ATTENTION:
            return self.e.call(target, *args, **kwargs)
        found = self.e.call(target, *self._in_one_dtype(args[:3]), *args[3:], **kwargs)
        found.meta[PAIRS] = (self.e.pairs(self.sets[QUERY], self.sets[KEY]), None)
        return self.e.call(operator.getitem, found, 0), None

    def seed(self) -> fx.Node:
        """One for each dropout: attentions that share their weights drop the same pairs."""
        assert self.form.dropout is not None
        return self.e.seed(self.form.dropout.node)

    def constant(self, x: torch.Tensor) -> fx.Node:
        key = ("constant", x.dtype, tuple(x.shape), tuple(x.flatten().tolist()))
        return self.e.input("constant", key, x.shape, lambda r: x, x.dtype)

    def truth(self, table: Table, layout: Layout) -> Any:
        """Masks of the batch are computed before the graph runs."""
        if not self.a.known_before(table):
            return None
        rows, *rest = layout
        if not isinstance(rows, Packed):
            return self._pair_mask(table, layout)
        if any(a.axes & set(self.form.heads) for a in table.atoms):
            return None
        if self._is_told(table, rows.side):
            return True
        self.e.need(*self.a.tested(table))
        chosen, side = self.sets[rows.side], rows.side

        def recipe(r: Rows) -> torch.Tensor:
            along = self._along_rows(r, chosen, side)
            return Places(along, 1, r.batch.values, r.batch.number).truth(table).expand(len(r.rows(chosen)))

        found = self.e.per_row("valid", ("truth", chosen, table.key), chosen, recipe, torch.bool)
        return self.e.reshape(found, [-1, *[1] * len(rest)]) if rest else found

    def positions(self, formula: Formula, layout: Layout, sizes: dict[str, Size]) -> fx.Node:
        rows, *rest = layout
        if isinstance(rows, Packed):
            chosen, side = self.sets[rows.side], rows.side
            heads = Formula.of({a: c for a, c in formula.coefs if a not in (*self.form.sequences, side)})
            if heads.coefs:
                at = self.positions(heads, ((), *rest), sizes)
                return self.e.call(aten.add.Tensor, self.positions(formula - heads, layout, sizes), at)

            def of_rows(r: Rows) -> torch.Tensor:
                at = Places(self._along_rows(r, chosen, side), 1, {}, r.batch.number).formula(formula)
                return at.expand(len(r.rows(chosen)))

            found = self.e.per_row("positions", ("positions", chosen, formula), chosen, of_rows)
            return self.e.reshape(found, [-1, *[1] * len(rest)]) if rest else found
        groups = _groups(layout)
        every = self._with(sizes)

        def recipe(r: Rows) -> torch.Tensor:
            along = along_groups(groups, lambda axis: r.batch.number(every[axis]))
            return Places(along, len(groups), {}, r.batch.number).formula(formula)

        shown = [self._size(g, every) if formula.axes & set(g) else 1 for g in groups]
        key = ("positions", groups, formula, tuple(shown))
        return self.e.input("positions", key, [self.e.fake_size(s) for s in shown], recipe)

    def read(self, node: fx.Node, index: Index, layout: Layout, sizes: dict[str, Size]) -> Any:
        if not is_tensor(node):
            return node  # a size
        why = unreadable(self.a, self.e.typing, node, index, layout)
        if why is not None:
            raise why
        rows, *rest = layout
        if not isinstance(rows, Packed):
            return self._dense(node, index, _groups(layout), self._with(sizes))
        groups = [g for g in rest if not isinstance(g, Packed)]
        if not any(i.axes & {*self.form.sequences, rows.side} for i in index):
            return self._dense(node, index, [(), *groups], self.sizes)
        if is_plain(self.a, self.e.typing, node, index, rows.side):
            return self._packed(node, index, self.sets[rows.side], groups)
        return self._moved(node, index, rows.side, groups)

    # --- rows --------------------------------------------------------------------------------------

    def _packed(self, node: fx.Node, index: Index, chosen: RowSet, groups: Sequence[tuple[str, ...]]) -> fx.Node:
        """Rows of the tensor that are rows of the set."""
        x = self.e.packed(node, chosen)
        kept = self.e.kept(node, chosen.space.axes)
        return self._features(x, [index[d] for d, _ in kept], [s for _, s in kept], groups)

    def _moved(self, node: fx.Node, index: Index, side: str, groups: Sequence[tuple[str, ...]]) -> fx.Node:
        """Rows of the tensor that other rows name by a formula."""
        names, chosen = {*self.form.sequences, side}, self.sets[side]
        mine = [d for d, i in enumerate(index) if i.axes & names]
        others = [d for d in range(len(index)) if d not in mine]
        dims = shape(node)
        self.e.note_entry(node)
        x = self.e.dense(node)
        if mine != list(range(len(mine))):
            x = self.e.call(aten.permute.default, x, [*mine, *others])
        x = self.e.reshape(x, [-1, *(dims[d] for d in others)])

        def recipe(r: Rows) -> torch.Tensor:
            places = Places(self._along_rows(r, chosen, side), 1, {}, r.batch.number)
            at = torch.zeros(len(r.rows(chosen)), dtype=torch.long)
            for d in mine:
                length = r.batch.number(dims[d])
                at = at * length + places.formula(index[d]).clamp(0, length - 1)
            return at

        at = self.e.per_row("moved", ("formula", node, chosen, index), chosen, recipe)
        return self._features(self.e.call(GATHER, x, at), [index[d] for d in others], [dims[d] for d in others], groups)

    def _along_rows(self, r: Rows, chosen: RowSet, side: str) -> dict[str, torch.Tensor]:
        """Coordinates of the rows of a set, along axes of the weights."""
        rows, at = r.rows(chosen), r.batch.coordinates(chosen.space)
        found = {}
        for name in (*self.form.sequences, side):
            flat = torch.zeros_like(rows)
            for axis in self.a.rows[name]:
                flat = flat * r.batch.size(axis) + at[axis][rows]
            found[name] = flat
        return found

    def _features(
        self, x: fx.Node, formulas: Sequence[Formula], dims: Sequence[Size], groups: Sequence[tuple[str, ...]]
    ) -> fx.Node:
        """(rows, dims…) with the dims cut and regrouped; `formulas` say which axes each runs over, rows aside."""
        rows = {*self.form.sequences, QUERY, KEY}
        cut = []
        for d, (formula, size) in enumerate(zip(formulas, dims, strict=True)):
            order = ordered(self.sizes, formula)
            assert order is not None
            mine = [axis for axis in order if axis not in rows]
            cut.append(mine)
            length = self._size(mine, self.sizes)
            if formula.const != 0 or length != size:
                start = self.e.size(formula.const)
                x = self.e.call(aten.slice.Tensor, x, d + 1, start, self.e.size(size_of(formula.const + length)))
        return self._regrouped(x, cut, groups, self.sizes, 1)

    # --- tensors as they are -----------------------------------------------------------------------

    def _dense(self, node: fx.Node, index: Index, groups: Sequence[tuple[str, ...]], sizes: Sizes) -> fx.Node:
        """A captured tensor with dims for groups of axes, of which pairs that nobody sees are not read."""
        self.e.note_entry(node)
        dims, x = shape(node), self.e.dense(node)
        cut = [ordered(sizes, i) for i in index]
        plain = all(
            order is not None and i.const == 0 and (size_of(self._size(order, sizes) - s) == 0)
            for order, i, s in zip(cut, index, dims, strict=True)
        )
        if plain:
            return self._regrouped(x, [order or [] for order in cut], groups, sizes, 0)
        fixed = {name: sizes[name] for i in index for name in i.axes}
        every: list[Any] = []
        for i, s in zip(index, dims, strict=True):
            every.append(self._inside(i, s, groups, fixed))
        return self.e.call(aten.index.Tensor, x, every)

    def _inside(
        self, formula: Formula, size: Size, groups: Sequence[tuple[str, ...]], sizes: dict[str, Size]
    ) -> fx.Node:
        """Places along a dim; where a formula points outside of it, the case is another."""
        every = self._with(sizes)

        def recipe(r: Rows) -> torch.Tensor:
            along = along_groups(groups, lambda axis: r.batch.number(every[axis]))
            at = Places(along, len(groups), {}, r.batch.number).formula(formula)
            return at.clamp(0, r.batch.number(size) - 1)

        shown = [self._size(g, every) if formula.axes & set(g) else 1 for g in groups]
        key = ("inside", tuple(groups), formula, size, tuple(shown))
        return self.e.input("places", key, [self.e.fake_size(s) for s in shown], recipe)

    def _pair_mask(self, table: Table, layout: Layout) -> fx.Node | None:
        """A mask of pairs; one that the batch has as it is, is read where it lies."""
        if len(table.atoms) == 1 and self._is_mask(table):
            return None
        groups = _groups(layout)
        pairs = Shown.of(table, groups, self.sizes)
        self.e.need(*pairs.nodes)
        varies = set().union(*(a.axes for a in table.atoms))
        shown = [self.e.fake_size(self._size(g, self.sizes)) if varies & set(g) else 1 for g in groups]
        return self.e.input("pair_mask", ("pairs", pairs), shown, lambda r: pairs.on(r.batch), torch.bool)

    def _is_mask(self, table: Table) -> bool:
        (atom,) = table.atoms
        return getattr(atom, "how", "") == "true"

    # --- the result --------------------------------------------------------------------------------

    def finished(self, x: fx.Node) -> fx.Node:
        """(rows, heads, width) in the layout and dtype of the packed result."""
        node, e = self.a.node, self.e
        wanted = tensor(node)
        assert wanted is not None
        if self._dtype() != wanted.dtype or self.form.post_factors:
            x = e.call(aten._to_copy.default, x, dtype=wanted.dtype)
        kept = [d for d, _ in e.kept(node, self.sets[QUERY].space.axes)]
        rows, groups = {*self.form.sequences, QUERY, KEY}, []
        for d in kept:
            order = ordered(self.sizes, self.form.result[d])
            assert order is not None
            groups.append(tuple(axis for axis in order if axis not in rows))
        heads = [a for a in self.form.heads if self.sizes[a] != 1]
        width = [a for i in self.form.value.index for a in (ordered(self.sizes, i) or []) if a.startswith("e")]
        return self._regrouped(x, [heads, width], groups, self.sizes, 1)

    def _dtype(self) -> torch.dtype:
        """The widest of the operands: the kernel takes one type, and casts in between are for precision."""
        found = [x.dtype for n in (self.a.query, self.a.key, self.a.value) if (x := tensor(n)) is not None]
        return torch.promote_types(torch.promote_types(found[0], found[1]), found[2])

    def _in_one_dtype(self, operands: Sequence[fx.Node]) -> list[fx.Node]:
        wide, sources = self._dtype(), (self.a.query, self.a.key, self.a.value)
        factored = bool(self.form.score_factors or self.form.post_factors or self.form.values_kept)
        same = [(x := tensor(n)) is not None and x.dtype == wide and not factored for n in sources]
        return [
            x if kept else self.e.call(aten._to_copy.default, x, dtype=wide)
            for x, kept in zip(operands, same, strict=True)
        ]

    # --- sizes -------------------------------------------------------------------------------------

    def _size(self, axes: Sequence[str], sizes: Sizes) -> Size:
        return product(sizes[a] for a in axes)

    def _with(self, more: dict[str, Size]) -> Sizes:
        return Sizes({**self.sizes.of, **more}, self.sizes.env)

    def _is_told(self, table: Table, side: str) -> bool:
        """Does a mask of keys hold for every row of their set?"""
        keys = self.form.visible.keys
        mine = side == KEY and keys is not None and table.key == keys.key
        return mine and self.sets[side].terms == self.a.keys_kept

    def _regrouped(
        self, x: fx.Node, cut: Sequence[Sequence[str]], groups: Sequence[Sequence[str]], sizes: Sizes, lead: int
    ) -> fx.Node:
        """Dims that run over axes, as dims that run over groups of axes; a group that has some of its axes is whole."""
        have = [a for dim in cut for a in dim]
        order = [a for g in groups for a in g if a in have]
        assert sorted(order) == sorted(have), (cut, groups)
        rows: list[Any] = [-1] * lead
        before = [self._size(dim, sizes) for dim in cut]
        if order != have:
            x = self.e.reshape(x, [*rows, *(sizes[a] for a in have)])
            x = self.e.call(aten.permute.default, x, [*range(lead), *(lead + have.index(a) for a in order)])
            before = [sizes[a] for a in order]
        partial = [g for g in groups if set(g) & set(have) and not set(g) <= set(have)]
        if partial:
            every = [a for g in groups for a in g if a in have or g in partial]
            x = self.e.reshape(x, [*rows, *(sizes[a] if a in have else 1 for a in every)])
            x = self.e.call(aten.expand.default, x, [*rows, *(self.e.size(sizes[a]) for a in every)])
            before = [sizes[a] for a in every]
        after = [self._size(g, sizes) if set(g) & set(have) else 1 for g in groups]
        return x if before == after else self.e.reshape(x, [*rows, *after])


def _groups(layout: Layout) -> tuple[tuple[str, ...], ...]:
    return tuple(g for g in layout if not isinstance(g, Packed))
