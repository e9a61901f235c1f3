"""Values in their two forms, packed and padded, and conversions from the one to the other, made once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ....pipeline.capacity import Capacity
from ..calls import again, arg, is_tensor, op, operand, piece_of, product, rank_of, shape, tensors, value_of
from ..deciding import Given, Weighs
from ..declaration import declared
from ..demand import DemandAnalysis
from ..moves import Move
from ..program import Recipe, Rows, RowSet
from ..spaces import Projected, Relation, Space
from .inputs import Inputs

aten = torch.ops.aten
GATHER = torch.ops.turbogr.gather_rows.default
SCATTER = torch.ops.turbogr.scatter_rows.default


class Values(Inputs):
    """What rules of ops ask for: operands on the rows of a set."""

    arg = staticmethod(arg)

    def __init__(
        self, graph: fx.Graph, analysis: DemandAnalysis, parity: bool = False, capacity: Capacity | None = None
    ) -> None:
        super().__init__(graph, analysis, capacity)
        self.parity = parity  # draw dropout masks for padded values, and pack them
        self.homes: dict[fx.Node, RowSet] = {}  # captured values that live packed, and where
        self._twins: dict[tuple[fx.Node, RowSet], fx.Node] = {}
        self._dense: dict[fx.Node, fx.Node] = {}
        self._seeds: dict[fx.Node, fx.Node] = {}

    def seed(self, draw: fx.Node) -> fx.Node:
        """For what is drawn in place of a captured node."""
        if draw not in self._seeds:
            cpu = torch.device("cpu")
            self._seeds[draw] = self.call(aten.randint.low, 0, 2**31 - 1, [1], dtype=torch.int64, device=cpu)
        return self._seeds[draw]

    def live(self, node: fx.Node, chosen: RowSet, twin: fx.Node) -> None:
        """A value lives packed from now on."""
        self.homes[node] = chosen
        self._twins[node, chosen] = twin

    def again(self, n: fx.Node, /, **changed: Any) -> fx.Node:
        """The same op with some arguments changed; other tensors are read as the padded program has them."""
        args, kwargs = again(n, changed)
        new = [v for v in changed.values() if isinstance(v, fx.Node)]
        args, kwargs = fx.map_arg((args, kwargs), lambda x: x if x in new else self.dense(x))
        return self.call(n.target, *args, **kwargs)

    def flat_rows(self, node: fx.Node, axes: Sequence[int], padded: fx.Node | None = None) -> fx.Node:
        """A padded value, or another with its dims, as (all rows over the axes, kept dims)."""
        flat = self.typing.flat(node)
        rest = [a for a in flat if a not in axes]
        x = self.dense(node) if padded is None else padded
        order = [a for a in axes if a in flat] + rest
        if flat != order:
            x = self.reshape(x, [self.typing.axes.size(a) for a in flat])
            x = self.call(aten.permute.default, x, [flat.index(a) for a in order])
        return self.reshape(x, [-1, *self.kept_sizes(node, axes)])

    def rows_of(self, padded: fx.Node, like: fx.Node, chosen: RowSet) -> fx.Node:
        """Rows of a set out of a padded value that has the dims of another."""
        return self.call(GATHER, self.flat_rows(like, chosen.space.axes, padded), self.rows(chosen))

    def packed(self, node: fx.Node, chosen: RowSet) -> fx.Node:
        """The value on the rows of a set."""
        key = (node, chosen)
        if key not in self._twins:
            self._twins[key] = self._convert(node, chosen)
        return self._twins[key]

    def _convert(self, node: fx.Node, chosen: RowSet) -> fx.Node:
        if node in self.homes and chosen.space.includes(self.homes[node].space):
            source = self.homes[node]
            twin = self._twins[node, source]
            inner = tuple(a for a in chosen.space.axes if a in self.typing.flat(node) and a not in source.space.axes)
            if inner:
                return self._unfolded(node, source, chosen, inner)
            if self._is_zero_outside(node):
                zero = self.call(
                    aten.new_zeros.default, twin, [1, *[self.size(s) for s in self.kept_sizes(node, chosen.space.axes)]]
                )
                twin = self.call(aten.cat.default, [twin, zero])
                return self.call(GATHER, twin, self.map_to(source, chosen, zero_outside=True))
            return self.call(GATHER, twin, self.map_to(source, chosen))
        flat = self.typing.flat(node)
        axes = tuple(a for a in chosen.space.axes if a in flat)
        if not axes:
            x = self.dense(node)
            sizes = self.kept_sizes(node, ())
            return self.call(
                aten.expand.default,
                self.reshape(x, [1, *sizes]),
                [self.count_of(chosen), *[self.size(s) for s in sizes]],
            )
        self.note_entry(node, chosen=chosen)
        return self.call(GATHER, self.flat_rows(node, axes), self.row_index(chosen, axes))

    def _unfolded(self, node: fx.Node, source: RowSet, chosen: RowSet, inner: tuple[int, ...]) -> fx.Node:
        """Rows of a coarser space, of which features become rows."""
        left = [a for a in self.typing.flat(node) if a not in source.space.axes]
        order = [*inner, *[a for a in left if a not in inner]]
        twin = self.reshape(self._twins[node, source], [-1, *[self.typing.axes.size(a) for a in left]])
        if order != left:
            twin = self.call(aten.permute.default, twin, [0, *[1 + left.index(a) for a in order]])
        twin = self.reshape(twin, [-1, *self.kept_sizes(node, chosen.space.axes)])
        relation, outer = Projected(chosen.space, Space(inner)), Projected(chosen.space, source.space)
        self._needs(source)

        def recipe(r: Rows) -> torch.Tensor:
            rows, count = r.rows(chosen), 1
            for axis in inner:
                count = count * r.batch.size(axis)
            return r.found(source, outer.index(r.batch)[rows]) * count + relation.index(r.batch)[rows]

        return self.call(GATHER, twin, self.per_row("unfold", ("unfold", source, chosen, inner), chosen, recipe))

    def _is_zero_outside(self, node: fx.Node) -> bool:
        """Is the value zero on rows that its set lacks?"""
        return isinstance(self.an.decisions.get(node), (Given, Weighs))

    def count_of(self, chosen: RowSet) -> Any:
        """How many rows a set has, as an argument."""
        count = self.count(chosen)
        return count if isinstance(count, int) else self.call(aten.sym_size.int, self.rows(chosen), 0)

    def row_index(self, chosen: RowSet, axes: tuple[int, ...]) -> fx.Node:
        """Rows of a set as rows over some of its axes."""
        space = chosen.space
        if axes == space.axes:
            return self.rows(chosen)
        if axes == space.column:
            return self.columns(chosen)
        if axes == space.sequence:
            return self.sequences(chosen)
        relation = Projected(space, Space(axes))
        return self.per_row("part", ("part", chosen, axes), chosen, lambda r: relation.index(r.batch)[r.rows(chosen)])

    def dense(self, node: fx.Node) -> fx.Node:
        """The padded value; rows that are not demanded are zero."""
        if node not in self.homes:
            return node
        if node not in self._dense:
            source = self.homes[node]
            twin = self._twins[node, source]
            self._dense[node] = self.padded(self.scattered(twin, source, source.space.axes), node, source.space)
            self.note_readers(node, source)
        return self._dense[node]

    def scattered(self, x: fx.Node, chosen: RowSet, axes: Sequence[int]) -> fx.Node:
        """Rows of a set added up as rows over some of its axes; dummies go to one row more, which is cut off."""
        by_sequence = tuple(axes) == chosen.space.sequence
        total = product(self.typing.axes.size(a) for a in axes)
        if not chosen.rounded:
            index = self.sequences(chosen) if by_sequence else self.rows(chosen)
            return self.call(SCATTER, x, index, self.size(total))

        def rest(r: Rows) -> int:
            sequences, columns = r.batch.extent(chosen.space)
            return sequences if by_sequence else sequences * columns

        real: Recipe = (lambda r: r.sequences(chosen)) if by_sequence else (lambda r: r.rows(chosen))
        index = self.per_row("out", ("out", chosen, by_sequence), chosen, real, dummy=rest)
        every = self.call(SCATTER, x, index, self.size(total + 1))
        return self.call(aten.slice.Tensor, every, 0, 0, self.size(total))

    def without_dummies(self, x: fx.Node, chosen: RowSet, value: Any, dims: int) -> fx.Node:
        """A packed value with another value on dummy rows; `dims` follow the rows."""
        if not chosen.rounded:
            return x
        dummies = self.dummies(chosen)
        dummies = self.reshape(dummies, [-1, *[1] * dims]) if dims else dummies
        return self.call(aten.masked_fill.Scalar, x, dummies, value)

    def padded(self, x: fx.Node, node: fx.Node, space: Space) -> fx.Node:
        """(all rows of a space, kept dims) in the layout of a padded value."""
        flat = self.typing.flat(node)
        order = [*space.axes, *[a for a in flat if a not in space.axes]]
        if order != flat:
            x = self.reshape(x, [self.typing.axes.size(a) for a in order])
            x = self.call(aten.permute.default, x, [order.index(a) for a in flat])
        return self.reshape(x, shape(node))

    def operand(self, x: Any, n: fx.Node, chosen: RowSet) -> Any:
        """An operand of a pointwise op as a tensor that broadcasts against the packed result."""
        if not isinstance(x, fx.Node) or not is_tensor(x) or rank_of(x) == 0:
            return x
        axes = chosen.space.axes
        offset = rank_of(n) - rank_of(x)
        mine = dict(self.kept(x, axes))
        want = [mine.get(d - offset, 1) for d, _ in self.kept(n, axes)]
        if any(a in axes for a in self.typing.flat(x)):
            y = self.packed(x, chosen)
            return y if self.kept_sizes(x, axes) == want else self.reshape(y, [-1, *want])
        y = self.dense(x)
        have, want = shape(x), want or [1]  # a tensor without dims would count less in what types are promoted to
        while want[0] == 1 and len(want) > len(have):
            want = want[1:]
        return y if have == want else self.reshape(y, want)

    def pointwise(self, n: fx.Node, chosen: RowSet) -> fx.Node:
        if op(n) == "dropout" and self.parity and arg(n, "train") and arg(n, "p"):
            return self._padded_dropout(n, chosen)
        args = fx.map_arg(n.args, lambda x: self.operand(x, n, chosen))
        kwargs = fx.map_arg(n.kwargs, lambda x: self.operand(x, n, chosen))
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}  # strides of the padded value
        twin = self.call(n.target, *args, **kwargs)
        if not any(any(a in chosen.space.axes for a in self.typing.flat(x)) for x in tensors(n)):
            sizes = self.kept_sizes(n, chosen.space.axes)
            twin = self.call(aten.expand.default, twin, [self.count_of(chosen), *[self.size(s) for s in sizes]])
        return twin

    def _padded_dropout(self, n: fx.Node, chosen: RowSet) -> fx.Node:
        """Draw what eager draws, for every row, and use what belongs to ours."""
        x: Any = n.args[0]
        twin = self.packed(x, chosen)
        ones = self.call(aten.new_ones.default, twin, [self.size(s) for s in shape(n)])
        drawn = self.call(n.target, ones, *n.args[1:], **n.kwargs)
        flat, axes = self.typing.flat(n), chosen.space.axes
        order = [*axes, *[a for a in flat if a not in axes]]
        if flat != order:
            drawn = self.reshape(drawn, [self.typing.axes.size(a) for a in flat])
            drawn = self.call(aten.permute.default, drawn, [flat.index(a) for a in order])
        drawn = self.reshape(drawn, [-1, *self.kept_sizes(n, axes)])
        return self.call(aten.mul.Tensor, twin, self.call(GATHER, drawn, self.rows(chosen)))

    def piece(self, n: fx.Node, chosen: RowSet) -> fx.Node:
        source, index = operand(n), piece_of(n)
        key = (source, chosen)
        if key not in self._twins:
            found = declared(source)
            assert found is not None and found.packed is not None, source
            packed: Any = found.packed  # rules are written for the emitter, which this becomes
            self._twins[key] = packed(self, source, chosen)
        twin: Any = self._twins[key]
        return twin[index] if isinstance(twin, list) else self.call(operator.getitem, twin, index)

    def neighbours(self, x: fx.Node, relations: Sequence[Relation], chosen: RowSet) -> fx.Node:
        """(rows, relations, kept dims): what rows of a set read through each relation; zeros where there is nothing."""
        into, home = relations[0].into, self.homes.get(x)
        if home is not None and home.space == into:
            twin = self._twins[x, home]
            self._needs(home)
        else:
            home, twin = None, self.flat_rows(x, into.axes)
            self.note_entry(x)
        zero = self.call(aten.new_zeros.default, twin, [1, *[self.size(s) for s in self.kept_sizes(x, into.axes)]])
        source = self.call(aten.cat.default, [twin, zero])
        empty = self._is_zero_outside(x)

        def recipe(r: Rows, relation: Relation) -> torch.Tensor:
            there = relation.index(r.batch)[r.rows(chosen)]
            hit = there >= 0
            if home is None:
                sequences, columns = r.batch.extent(into)
                return there.where(hit, sequences * columns)
            hit = hit & (r.places(home)[there.clamp(min=0)] >= 0) if empty else hit
            out = torch.full_like(there, r.size(home))
            out[hit] = r.found(home, there[hit])
            return out

        each = []
        for relation in relations:
            self._needs_relation(relation)
            near = partial(recipe, relation=relation)
            each.append(self.per_row("near", ("near", x, relation, chosen), chosen, near))
        index = self.reshape(self.call(aten.stack.default, each, 1), [-1])
        return self.reshape(self.call(GATHER, source, index), [-1, len(each), *self.kept_sizes(x, into.axes)])

    def moved(self, n: fx.Node, move: Move, chosen: RowSet) -> fx.Node:
        """Gather the rows of a result from its parts."""
        axes = move.out.axes
        sizes = self.kept_sizes(n, axes)
        arrays, homes = [], []
        for x, relation in move.parts:
            home = self.homes.get(x)
            if home is not None and home.space == relation.into:
                twin = self._twins[x, home]
            else:
                home, twin = None, self.flat_rows(x, relation.into.axes)
                self.note_entry(x)
            arrays.append(self.reshape(twin, [-1, *sizes]) if self.kept_sizes(x, relation.into.axes) != sizes else twin)
            homes.append((home, self._is_zero_outside(x)))
            self._needs_relation(relation)
            if home is not None:
                self._needs(home)
        relations = [r for _, r in move.parts]

        def recipe(r: Rows) -> torch.Tensor:
            rows = r.rows(chosen)
            out, start = torch.full_like(rows, -1), 0
            for relation, (home, zero_outside) in zip(relations, homes, strict=True):
                there = relation.index(r.batch)[rows]
                hit = there >= 0
                if home is not None and zero_outside:
                    hit = hit & (r.places(home)[there.clamp(min=0)] >= 0)
                local = there[hit]
                out[hit] = start + (local if home is None else r.found(home, local))
                total, columns = r.batch.extent(relation.into)
                start += total * columns if home is None else r.size(home)
            return out.where(out >= 0, start)

        if op(n) in ("constant_pad_nd", "pad") or any(zero for _, zero in homes):
            arrays.append(self.call(aten.new_full.default, arrays[0], [1, *[self.size(s) for s in sizes]], move.fill))
        source = arrays[0] if len(arrays) == 1 else self.call(aten.cat.default, arrays)
        wanted = value_of(n).dtype
        if all(value_of(x).dtype != wanted for x, _ in move.parts):  # a part without elements counts for the type
            source = self.call(aten._to_copy.default, source, dtype=wanted)
        index = self.per_row("moved", ("moved", n, chosen), chosen, recipe)
        return self.call(GATHER, source, index)
