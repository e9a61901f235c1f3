"""From a normal form to the arguments of `turbogr::jagged_attention`, for rows that are packed.

The builder reads a captured tensor at the places that a formula names, in a layout of packed rows, heads, columns or
distances; how it does that (an operand that lives packed, a gather, a view) is its business. What the op cannot say is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from .... import kernels as _kernels  # noqa: F401  (defines the op)
from ..calls import COPIES, VIEWS, op
from .bias import Bias, ByBucket, ByCase, ByDistance, ByTime, Dense
from .calls import value
from .formula import DEPTH, KEY, QUERY, WIDTH, Formula, Index, Size
from .language import AtLeast, Atom, Data, Product, Refused, Sum, Test
from .normal import HIDDEN, NormalForm, Operand, Visible
from .table import Table

aten = torch.ops.aten

DISTANCE, BUCKET = "distance", "bucket"  # axes of the op's tables
UNBOUNDED = 2**31 - 1


@dataclass(frozen=True)
class Packed:
    """A dim of packed rows, of queries or of keys."""

    side: str


Layout = tuple["tuple[str, ...] | Packed", ...]  # of each dim: packed rows, or axes that it runs over, outermost first


class Builder(Protocol):
    """What the packed graph is made with. Where nothing of a dim of a layout occurs in an index, its size is one."""

    query_offsets: Any
    key_offsets: Any
    query_columns: Any
    key_columns: Any

    def read(self, node: fx.Node, index: Index, layout: Layout, sizes: dict[str, Size]) -> Any:
        """A captured tensor in a layout; `sizes` are of axes that no dim of the graph has."""

    def truth(self, table: Table, layout: Layout) -> Any:
        """Where a table holds, if that is known before the graph runs; True: for all rows; None: compute it."""

    def positions(self, formula: Formula, layout: Layout, sizes: dict[str, Size]) -> Any:
        """A formula in a layout, as whole numbers."""

    def constant(self, tensor: torch.Tensor) -> Any:
        """Numbers that are known now."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """An op of the packed graph."""

    def seed(self) -> Any:
        """For dropout."""


@dataclass(frozen=True)
class Kernel:
    """What the op has."""

    activations: frozenset[str]
    has_sink: bool
    has_cap: bool

    @staticmethod
    def installed() -> Kernel:
        names = {a.name for a in torch.ops.turbogr.jagged_attention.default._schema.arguments}
        more = {"sigmoid", "squared_relu", "linear"} if "score_cap" in names else set()
        return Kernel(frozenset({"softmax", "silu"} | more), "sink" in names, "score_cap" in names)


def lowered(form: NormalForm, builder: Builder, kernel: Kernel | None = None) -> tuple[Any, Any]:
    """The result of an attention on packed rows, (rows of queries, heads, width), and log_sum."""
    return _Lowering(form, builder, kernel or Kernel.installed()).result()


class _Lowering:
    def __init__(self, form: NormalForm, builder: Builder, kernel: Kernel) -> None:
        self.form, self.b, self.kernel = form, builder, kernel
        self.queries, self.keys = Packed(QUERY), Packed(KEY)
        self.heads = form.heads
        self.pair_layout: Layout = (form.sequences, self.heads, (QUERY,), (KEY,))
        self.groups = self._groups()
        self.moved: Callable[[Formula], Formula] = _as_it_is  # indices, in the axes of the layout at hand
        self.more: dict[str, Size] = {}  # sizes of axes that only the layout at hand has
        self._refuse_what_the_op_lacks()

    def _refuse(self, reason: str, term: object = "") -> Refused:
        return Refused(reason, term, self.form.node)

    def _refuse_what_the_op_lacks(self) -> None:
        form, kernel = self.form, self.kernel
        if form.activation not in kernel.activations:
            raise self._refuse("an activation without a kernel", form.activation)
        if form.cap is not None and not kernel.has_cap:
            raise self._refuse("a cap without a kernel", form.cap)
        if form.cap is not None and form.score_factors:
            raise self._refuse("a factor of capped scores", form.score_factors[0])
        if form.sink is not None and not kernel.has_sink:
            raise self._refuse("a sink without a kernel", form.sink)
        if any(a not in _axes(x) for a in form.sequences for x in (form.key, form.value) if x is not None):
            raise self._refuse("keys or values that all sequences share", form.value)
        if form.query is not None and not _axes(form.query) & {*form.sequences, QUERY}:
            raise self._refuse("a query that all sequences share", form.query)
        for limit in (form.visible.least, form.visible.most):
            if not isinstance(limit, (int, float)):
                raise self._refuse("a band of unknown width", limit)

    def _groups(self) -> tuple[str, ...]:
        """Heads of keys and values: the outermost axes of heads, so that those of a group lie side by side."""
        mine = self.form.groups
        factors = [f for f in (*self.form.score_factors, *self.form.post_factors) if KEY in f.axes]
        plain = mine == self.heads[: len(mine)] and not any(f.axes & set(self.heads) - set(mine) for f in factors)
        return mine if plain else self.heads

    # --- the call ----------------------------------------------------------------------------------

    def result(self) -> tuple[Any, Any]:
        form, b = self.form, self.b
        visible = form.visible
        q, k, v = self._operands()
        key_valid, pair_mask = self._masks(visible)
        tables = self._tables()
        scale: float = form.scale
        more: tuple[Any, ...] = ()
        if form.cap is not None or form.sink is not None:
            more = (self._sink(form.sink) if form.sink is not None else None, 0.0)
        if form.cap is not None:
            more, scale = (more[0], abs(form.scale)), form.cap * form.scale
        p = form.dropout.p if form.dropout is not None else 0.0
        found = b.call(
            torch.ops.turbogr.jagged_attention.default, q, k, v, b.query_offsets, b.key_offsets, b.query_columns,
            b.key_columns, key_valid, pair_mask, *tables, b.seed() if p else None, form.activation, float(scale),
            float(form.post_scale), _limit(visible.least, -UNBOUNDED), _limit(visible.most, UNBOUNDED), p, *more,
        )  # fmt: skip
        result, log_sum = found
        return self._finished(result, visible), log_sum

    def _operands(self) -> tuple[Any, Any, Any]:
        form = self.form
        width = tuple(a for i in form.value.index for a in i.axes if a.startswith(WIDTH))
        v = self._read(form.value, (self.keys, self.groups, width))
        if form.query is None or form.key is None:
            return self._nothing(v)
        q = self._read(form.query, (self.queries, self.heads, (DEPTH,)))
        k = self._read(form.key, (self.keys, self.groups, (DEPTH,)))
        for f in form.score_factors:
            q, k = (q, self._times(k, f, self.keys)) if KEY in f.axes else (self._times(q, f, self.queries), k)
        for f in form.post_factors:
            v = self._times(v, f, self.keys) if KEY in f.axes else v
        if form.values_kept is not None:
            kept = self._truth(form.values_kept, (self.keys, self.groups, ()))
            v = self._where(kept, v) if kept is not True else v
        return q, k, v

    def _nothing(self, v: Any) -> tuple[Any, Any, Any]:
        """Rows of queries and of keys without features: their product is zero, and weights are the biases."""
        rows = self.b.call(aten._to_copy.default, self.b.query_columns, dtype=value(self.form.value.given).dtype)
        one = self.b.call(aten.reshape.default, rows, [-1, 1, 1])
        q = self.b.call(aten.expand.default, one, [-1, self._count(self.heads), 0])
        return q, self.b.call(aten.slice.Tensor, v, 2, 0, 0), v

    def _finished(self, result: Any, visible: Visible) -> Any:
        for f in self.form.post_factors:
            result = result if KEY in f.axes else self._times(result, f, self.queries)
        for table in (visible.queries, self.form.queries_kept):
            kept = self._truth(table, (self.queries, self.heads, ())) if table is not None else True
            result = self._where(kept, result) if kept is not True else result
        return result

    def _where(self, kept: Any, x: Any) -> Any:
        """Zeros elsewhere, whatever is there: a product with zero would keep NaN."""
        zero = self.b.constant(torch.zeros((), dtype=value(self.form.value.given).dtype))
        return self.b.call(aten.where.self, kept, x, zero)

    def _read(self, operand: Operand, layout: Layout) -> Any:
        """An operand in full: where it lacks heads that the layout has, it is repeated."""
        x = self.b.read(*operand.nearest, layout, {})
        heads = layout[1]
        assert not isinstance(heads, Packed)
        if all(a in _axes(operand) for a in heads):
            return x
        return self.b.call(aten.expand.default, x, [-1, self._count(heads), -1])

    def _count(self, heads: tuple[str, ...]) -> int:
        sizes = [self.form.sizes[a] for a in heads]
        if not all(isinstance(s, int) for s in sizes):
            raise self._refuse("heads of unknown number", sizes)
        return math.prod(int(s) for s in sizes)

    def _times(self, x: Any, f: Data, rows: Packed) -> Any:
        layout: Layout = (rows, self.heads if rows is self.queries else self.groups, ())
        factor = self._harmless(self.b.read(f.node, f.index, layout, {}), f, layout)
        return self.b.call(aten.div.Tensor if f.inverse else aten.mul.Tensor, x, factor)

    # --- masks -------------------------------------------------------------------------------------

    def _masks(self, visible: Visible) -> tuple[Any, Any]:
        """Keys that count, and pairs; a key that counts for some heads only is a matter of pairs."""
        keys, pairs = visible.keys, visible.pairs
        valid = None
        tables = [pairs] if pairs is not None else []
        if keys is not None and any(a.axes & set(self.heads) for a in keys.atoms):
            tables.append(keys)
        elif keys is not None:
            valid = self._truth(keys, (self.keys,))
            valid = self.b.call(aten.reshape.default, valid, [-1]) if valid is not True else None
        found = None
        for table in tables:
            mask = self._truth(table, self.pair_layout)
            assert mask is not True
            found = mask if found is None else self.b.call(aten.logical_and.default, found, mask)
        return valid, found

    def _truth(self, table: Table, layout: Layout) -> Any:
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

    # --- biases ------------------------------------------------------------------------------------

    def _tables(self) -> tuple[Any, Any, Any, Any, Any, Any]:
        """bias, position_bias, time_bias, time_bounds, query_times, key_times."""
        dense: Any = None
        position: Any = None
        time: tuple[Any, Any, Any, Any] = (None, None, None, None)
        for bias in self.form.biases:
            if isinstance(bias, (ByDistance, ByBucket)) and self._of_heads(bias):
                position = self._sum(position, self._by_distance(bias))
            elif isinstance(bias, ByTime) and time[0] is None and self._of_heads(bias):
                time = self._by_time(bias)
            elif isinstance(bias, (Dense, ByCase)) and self._of_distance(bias):
                position = self._sum(position, self._along_distances(bias))
            else:
                dense = self._sum(dense, self._dense(bias))
        return dense, position, *time

    def _sum(self, x: Any, y: Any) -> Any:
        return y if x is None else self.b.call(aten.add.Tensor, x, y)

    def _scaled(self, x: Any, coef: float) -> Any:
        return x if coef == 1 else self.b.call(aten.mul.Tensor, x, coef)

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
                return self._by_case(bias.sums, layout)
            return self._product(bias.factors, bias.coef, layout)
        finally:
            self.moved, self.more = _as_it_is, {}

    def _by_distance(self, bias: ByDistance | ByBucket) -> Any:
        """(H or 1, 2M - 1)."""
        layout: Layout = (self.heads, (DISTANCE,))
        if isinstance(bias, ByDistance):
            far = self._farthest()
            sizes = {DISTANCE: 2 * far - 1}
            at = Formula.of({DISTANCE: bias.sign}, bias.first - bias.sign * (far - 1))
            index = tuple(at if d == bias.dim else i for d, i in enumerate(bias.data.index))
            return self._scaled(self.b.read(bias.data.node, index, layout, sizes), bias.coef)
        if bias.table is None:
            return self._scaled(self.b.constant(self._by_head(bias)), bias.coef)
        entries = self.b.constant(bias.entries)
        rows = self._rows_of(bias.table, bias.rest, entries)
        return self._scaled(rows, bias.coef)

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
        raise self._refuse("a position bias of queries and keys of unknown sizes", (queries, keys))

    def _rows_of(self, table: fx.Node, rest: Index, at: Any) -> Any:
        """(H or 1, entries): rows of a table, by head."""
        sizes = {BUCKET: table.meta["val"].shape[0]}
        whole = self.b.read(table, (Formula.axis(BUCKET), *rest), (self.heads, (BUCKET,)), sizes)
        return self.b.call(aten.index_select.default, whole, 1, at)

    def _by_time(self, bias: ByTime) -> tuple[Any, Any, Any, Any]:
        rows = self.b.constant(torch.arange(bias.first, bias.first + len(bias.bounds) + 1))
        table = self._scaled(self._rows_of(bias.table, bias.rest, rows), bias.coef)
        times = [
            self.b.call(aten.reshape.default, self.b.read(t.node, t.index, (side,), {}), [-1])
            for t, side in ((bias.gap.query, self.queries), (bias.gap.key, self.keys))
        ]
        return table, self.b.constant(torch.tensor(bias.bounds)), *times

    def _dense(self, bias: Bias) -> Any:
        """(S or 1, H or 1, Nq or 1, Nk or 1)."""
        match bias:
            case Dense():
                return self._product(bias.factors, bias.coef, self.pair_layout)
            case ByCase():
                return self._by_case(bias.sums, self.pair_layout)
            case ByDistance():
                return self._product((bias.data,), bias.coef, self.pair_layout)
        return self._product((bias.term,), bias.coef, self.pair_layout)

    def _product(self, factors: Product, coef: float, layout: Layout) -> Any:
        found: Any = None
        for f in factors:
            assert isinstance(f, Data)
            x = self.b.read(f.node, tuple(map(self.moved, f.index)), layout, self.more)
            x = self._harmless(x, f, layout) if layout == self.pair_layout else x
            if f.inverse:
                x = self.b.call(aten.reciprocal.default, x)
            found = x if found is None else self.b.call(aten.mul.Tensor, found, x)
        return self._scaled(found, coef)

    def _harmless(self, x: Any, f: Data, layout: Layout) -> Any:
        """Ones for queries that are left out in the end: what the graph computes there may be NaN, which spreads.

        Inputs are known to be finite.
        """
        source = f.node
        while op(source) in VIEWS | COPIES:
            source = source.all_input_nodes[0]
        if QUERY not in f.axes or source.op == "placeholder":
            return x
        for table in (self.form.visible.queries, self.form.queries_kept):
            kept = self._truth(table, (*layout[:-1], ())) if table is not None else True
            if kept is not True:
                one = self.b.constant(torch.ones((), dtype=value(f.node).dtype))
                x = self.b.call(aten.where.self, kept, x, one)
        return x

    def _total(self, leaf: Sum, layout: Layout) -> Any:
        found: Any = None
        for factors, coef in leaf.terms:
            found = self._sum(found, self._product(factors, coef, layout))
        if found is None:
            return self.b.constant(torch.full([1] * len(layout), leaf.const, dtype=leaf.dtype))
        return found if leaf.const == 0 else self.b.call(aten.add.Tensor, found, leaf.const)

    def _by_case(self, table: Table, layout: Layout) -> Any:
        found: Any = None
        for bits, leaf in table.rows.items():
            if leaf is HIDDEN or (not leaf.terms and leaf.const == 0):
                continue
            total = self._total(leaf, layout)
            if table.atoms:
                case = self._case(table, bits, layout)
                zero = self.b.constant(torch.zeros((), dtype=leaf.dtype))
                total = self.b.call(aten.where.self, case, total, zero)
            found = self._sum(found, total)
        return found

    def _sink(self, sink: Sum) -> Any:
        if any(isinstance(f, Data) and f.axes - set(self.heads) for f in sink.factors):
            raise self._refuse("a sink that is not one number per head", sink)
        return self.b.call(aten.expand.default, self._total(sink, (self.heads,)), [self._count(self.heads)])


def _axes(operand: Operand) -> set[str]:
    return {a for i in operand.index for a in i.axes}


def _limit(distance: Any, otherwise: int) -> int:
    return otherwise if isinstance(distance, float) and math.isinf(distance) else int(distance)


def _as_it_is(formula: Formula) -> Formula:
    return formula


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
