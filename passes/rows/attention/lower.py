"""From a normal form to the arguments of `turbogr::jagged_attention`, for rows that are packed.

The builder reads a captured tensor at the places that a formula names, in a layout of packed rows, heads, columns or
distances; how it does that (an operand that lives packed, a gather, a view) is its business. What the op cannot say is
refused by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .... import kernels as _kernels  # noqa: F401  (defines the op)
from .bias_arguments import BiasArguments
from .builder import Builder, Layout, Packed
from .calls import value
from .formula import DEPTH, KEY, QUERY, WIDTH
from .language import Data, Sum
from .normal import NormalForm, Operand, Visible

aten = torch.ops.aten

UNBOUNDED = 2**31 - 1


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


class _Lowering(BiasArguments):
    def __init__(self, form: NormalForm, builder: Builder, kernel: Kernel) -> None:
        super().__init__(form, builder)
        self.kernel = kernel
        self.queries, self.keys = Packed(QUERY), Packed(KEY)
        self.groups = self._groups()
        self._refuse_what_the_op_lacks()

    def _refuse_what_the_op_lacks(self) -> None:
        form, kernel = self.form, self.kernel
        if form.activation not in kernel.activations:
            raise self.refuse("an activation without a kernel", form.activation)
        if form.cap is not None and not kernel.has_cap:
            raise self.refuse("a cap without a kernel", form.cap)
        if form.cap is not None and form.score_factors:
            raise self.refuse("a factor of capped scores", form.score_factors[0])
        if form.sink is not None and not kernel.has_sink:
            raise self.refuse("a sink without a kernel", form.sink)
        if any(a not in _axes(x) for a in form.sequences for x in (form.key, form.value) if x is not None):
            raise self.refuse("keys or values that all sequences share", form.value)
        if form.query is not None and not _axes(form.query) & {*form.sequences, QUERY}:
            raise self.refuse("a query that all sequences share", form.query)
        for limit in (form.visible.least, form.visible.most):
            if not isinstance(limit, (int, float)):
                raise self.refuse("a band of unknown width", limit)

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
        tables = self.tables()
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
            kept = self.truth(form.values_kept, (self.keys, self.groups, ()))
            v = self._where(kept, v) if kept is not True else v
        return q, k, v

    def _nothing(self, v: Any) -> tuple[Any, Any, Any]:
        """Rows of queries and of keys without features: their product is zero, and weights are the biases."""
        rows = self.b.call(aten._to_copy.default, self.b.query_columns, dtype=value(self.form.value.given).dtype)
        one = self.b.call(aten.reshape.default, rows, [-1, 1, 1])
        q = self.b.call(aten.expand.default, one, [-1, self.count(self.heads), 0])
        return q, self.b.call(aten.slice.Tensor, v, 2, 0, 0), v

    def _finished(self, result: Any, visible: Visible) -> Any:
        for f in self.form.post_factors:
            result = result if KEY in f.axes else self._times(result, f, self.queries)
        for table in (visible.queries, self.form.queries_kept):
            kept = self.truth(table, (self.queries, self.heads, ())) if table is not None else True
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
        return self.b.call(aten.expand.default, x, [-1, self.count(heads), -1])

    def _times(self, x: Any, f: Data, rows: Packed) -> Any:
        layout: Layout = (rows, self.heads if rows is self.queries else self.groups, ())
        factor = self.harmless(self.b.read(f.node, f.index, layout, {}), f, layout)
        return self.b.call(aten.div.Tensor if f.inverse else aten.mul.Tensor, x, factor)

    def _sink(self, sink: Sum) -> Any:
        if any(isinstance(f, Data) and f.axes - set(self.heads) for f in sink.factors):
            raise self.refuse("a sink that is not one number per head", sink)
        return self.b.call(aten.expand.default, self.total(sink, (self.heads,)), [self.count(self.heads)])

    def _masks(self, visible: Visible) -> tuple[Any, Any]:
        """Keys that count, and pairs; a key that counts for some heads only is a matter of pairs."""
        keys, pairs = visible.keys, visible.pairs
        valid = None
        tables = [pairs] if pairs is not None else []
        if keys is not None and any(a.axes & set(self.heads) for a in keys.atoms):
            tables.append(keys)
        elif keys is not None:
            valid = self.truth(keys, (self.keys,))
            valid = self.b.call(aten.reshape.default, valid, [-1]) if valid is not True else None
        found = None
        for table in tables:
            mask = self.truth(table, self.pair_layout)
            assert mask is not True
            found = mask if found is None else self.b.call(aten.logical_and.default, found, mask)
        return valid, found


def _axes(operand: Operand) -> set[str]:
    return {a for i in operand.index for a in i.axes}


def _limit(distance: Any, otherwise: int) -> int:
    return otherwise if isinstance(distance, float) and math.isinf(distance) else int(distance)
