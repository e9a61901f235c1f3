"""Biases of an attention as arguments of `turbogr::jagged_attention`: by distance, by time, or for all pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .bias import Bias, ByBucket, ByCase, ByDistance, ByTime, Dense
from .builder import BUCKET, DISTANCE, Layout, Packed
from .formula import KEY, QUERY, Formula, Index, Size
from .language import AtLeast, Data
from .normal import HIDDEN
from .writing import Writing, as_it_is

aten = torch.ops.aten


class BiasArguments(Writing):
    """One table by distance, one by time, and what is neither."""

    def tables(self) -> tuple[Any, Any, Any, Any, Any, Any]:
        """bias, position_bias, time_bias, time_bounds, query_times, key_times."""
        dense: Any = None
        position: Any = None
        time: tuple[Any, Any, Any, Any] = (None, None, None, None)
        for bias in self.form.biases:
            if isinstance(bias, (ByDistance, ByBucket)) and self._of_heads(bias):
                position = self.sum(position, self._by_distance(bias))
            elif isinstance(bias, ByTime) and time[0] is None and self._of_heads(bias):
                time = self._by_time(bias)
            elif isinstance(bias, (Dense, ByCase)) and self._of_distance(bias):
                position = self.sum(position, self._along_distances(bias))
            else:
                dense = self.sum(dense, self._dense(bias))
        return dense, position, *time

    def _of_heads(self, bias: ByDistance | ByBucket | ByTime) -> bool:
        """Is its table the same for all sequences, and are times the same for all heads?"""
        if isinstance(bias, ByBucket) and set(bias.axes) - set(self.heads):
            return False
        rest = bias.data.index if isinstance(bias, ByDistance) else bias.rest
        times = (*bias.gap.query.index, *bias.gap.key.index) if isinstance(bias, ByTime) else ()
        of_sequences = any(i.axes & set(self.form.sequences) for i in rest)
        return not of_sequences and not any(i.axes & set(self.heads) for i in times)

    def _of_distance(self, bias: Dense | ByCase) -> bool:
        """Is it a function of the head and of query - key?"""
        return all(_asks_distance(i, self.form.sequences) for i in _formulas(bias)) and any(
            QUERY in i.axes for i in _formulas(bias)
        )

    def _along_distances(self, bias: Dense | ByCase) -> Any:
        """(H or 1, 2M - 1), by what makes the bias of pairs."""
        far, layout = self._farthest(), (self.heads, (DISTANCE,))
        sizes = {DISTANCE: 2 * far - 1}

        def moved(i: Formula) -> Formula:
            c = dict(i.coefs).get(QUERY, 0)
            rest = Formula.of({axis: k for axis, k in i.coefs if axis not in (QUERY, KEY)}, i.const)
            return rest + Formula.of({DISTANCE: c}, -c * (far - 1))

        self.moved, self.more = moved, sizes
        try:
            if isinstance(bias, ByCase):
                return self.by_case(bias.sums, layout)
            return self.product(bias.factors, bias.coef, layout)
        finally:
            self.moved, self.more = as_it_is, {}

    def _by_distance(self, bias: ByDistance | ByBucket) -> Any:
        """(H or 1, 2M - 1)."""
        layout: Layout = (self.heads, (DISTANCE,))
        if isinstance(bias, ByDistance):
            far = self._farthest()
            sizes = {DISTANCE: 2 * far - 1}
            at = Formula.of({DISTANCE: bias.sign}, bias.first - bias.sign * (far - 1))
            index = tuple(at if d == bias.dim else i for d, i in enumerate(bias.data.index))
            return self.scaled(self.b.read(bias.data.node, index, layout, sizes), bias.coef)
        if bias.table is None:
            return self.scaled(self.b.constant(self._by_head(bias)), bias.coef)
        entries = self.b.constant(bias.entries)
        rows = self._rows_of(bias.table, bias.rest, entries)
        return self.scaled(rows, bias.coef)

    def _by_head(self, bias: ByBucket) -> torch.Tensor:
        """(H or 1, 2M - 1)."""
        mine = [a for a in self.heads if a in bias.axes]
        x = bias.entries.permute([*(bias.axes.index(a) for a in mine), -1])
        if not mine:
            return x.unsqueeze(0)
        shape = [(int(self.form.sizes[a]), a in mine) for a in self.heads]
        x = x.reshape([*(s if own else 1 for s, own in shape), -1])
        return x.expand([*(s for s, _ in shape), -1]).flatten(0, -2)

    def _farthest(self) -> Size:
        """M: distances lie between -(M - 1) and M - 1."""
        sizes = self.form.sizes
        queries, keys = sizes[QUERY], sizes[KEY]
        if sizes.at_least(queries, keys):
            return queries
        if sizes.at_least(keys, queries):
            return keys
        raise self.refuse("a position bias of queries and keys of unknown sizes", (queries, keys))

    def _rows_of(self, table: fx.Node, rest: Index, at: Any) -> Any:
        """(H or 1, entries): rows of a table, by head."""
        sizes = {BUCKET: table.meta["val"].shape[0]}
        whole = self.b.read(table, (Formula.axis(BUCKET), *rest), (self.heads, (BUCKET,)), sizes)
        return self.b.call(aten.index_select.default, whole, 1, at)

    def _by_time(self, bias: ByTime) -> tuple[Any, Any, Any, Any]:
        rows = self.b.constant(torch.arange(bias.first, bias.first + len(bias.bounds) + 1))
        table = self.scaled(self._rows_of(bias.table, bias.rest, rows), bias.coef)
        times = [
            self.b.call(aten.reshape.default, self.b.read(t.node, t.index, (side,), {}), [-1])
            for t, side in ((bias.gap.query, Packed(QUERY)), (bias.gap.key, Packed(KEY)))
        ]
        return table, self.b.constant(torch.tensor(bias.bounds)), *times

    def _dense(self, bias: Bias) -> Any:
        """(S or 1, H or 1, Nq or 1, Nk or 1)."""
        match bias:
            case Dense():
                return self.product(bias.factors, bias.coef, self.pair_layout)
            case ByCase():
                return self.by_case(bias.sums, self.pair_layout)
            case ByDistance():
                return self.product((bias.data,), bias.coef, self.pair_layout)
        return self.product((bias.term,), bias.coef, self.pair_layout)


def _formulas(bias: Dense | ByCase) -> list[Formula]:
    """Everything that a bias is a function of."""
    if isinstance(bias, Dense):
        return [i for f in bias.factors for i in f.index]
    found = []
    for atom in bias.sums.atoms:
        found += [Formula(atom.coefs)] if isinstance(atom, AtLeast) else list(getattr(atom, "index", ()))
    for leaf in bias.sums.leaves:
        found += [i for f in leaf.factors if isinstance(f, Data) for i in f.index] if leaf is not HIDDEN else []
    return found


def _asks_distance(formula: Formula, sequences: tuple[str, ...]) -> bool:
    coefs = dict(formula.coefs)
    return coefs.get(QUERY, 0) == -coefs.get(KEY, 0) and not formula.axes & set(sequences)
