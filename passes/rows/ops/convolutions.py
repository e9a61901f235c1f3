"""Convolutions over features, and over neighbouring rows: the rows that are read and those around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ....kernels.declare import accumulator
from ..calls import arg, op, operand, product, quotient, rank_of, shape, value_of
from ..declaration import row_op
from ..spans import Window

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..moves import Moves
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..spans import Span

aten = torch.ops.aten


def _each(value: Any, count: int) -> list[Any]:
    """One number per spatial dim."""
    value = list(value) if isinstance(value, (list, tuple)) else [value]
    return value * count if len(value) == 1 else value


class Taps:
    """What a convolution reads along each of its spatial dims."""

    def __init__(self, n: fx.Node) -> None:
        self.spatial = rank_of(n.args[0]) - 2
        if op(n) == "im2col":
            self.sizes: list[Any] = list(arg(n, "kernel_size"))
        else:
            self.sizes = shape(n.args[1])[2:]
        self.strides, self.dilations = (_each(arg(n, a), self.spatial) for a in ("stride", "dilation"))
        self.plain = all(isinstance(v, int) for v in (*self.sizes, *self.strides, *self.dilations))
        self.before = self._padding(arg(n, "padding")) if self.plain else []
        self.plain = self.plain and all(isinstance(p, int) for p in self.before)

    def _padding(self, padding: Any) -> list[Any]:
        if padding == "valid":
            return [0] * self.spatial
        if padding == "same":
            return [d * (k - 1) // 2 for d, k in zip(self.dilations, self.sizes, strict=True)]
        return _each(padding, self.spatial)

    def starts(self, at: int) -> tuple[int, ...]:
        return tuple(k * self.dilations[at] - self.before[at] for k in range(self.sizes[at]))

    def passes(self, at: int) -> bool:
        """Is each element along the dim made from the one at its own index?"""
        return self.sizes[at] == 1 and self.before[at] == 0 and self.strides[at] == 1


def _along(t: Typing, n: fx.Node, taps: Taps, at: int) -> Any:
    """A spatial dim of the result: the operand's where they have one length, index by index."""
    dim, length, out = t.dims(n.args[0])[2 + at], shape(n.args[0])[2 + at], shape(n)[2 + at]
    same = taps.plain and taps.strides[at] == 1 and quotient(length, out) == 1
    return dim if same else t.axes.fresh(out)


def _axes(t: Typing, n: fx.Node) -> Dims | None:
    x, w = t.dims(n.args[0]), t.dims(n.args[1])
    if len(x) != len(w):
        return None
    if arg(n, "groups") == 1:
        t.join(x[1], w[1])
    taps = Taps(n)
    return [x[0], w[0], *(_along(t, n, taps, at) for at in range(taps.spatial))]


def _columns_axes(t: Typing, n: fx.Node) -> Dims | None:
    """im2col: windows over one of two dims, the other being of size one; channels, and in each its window."""
    x, taps = t.dims(n.args[0]), Taps(n)
    at = _lone(n)
    if rank_of(n.args[0]) != 4 or not taps.plain or at is None:
        return None
    same = taps.strides[at] == 1 and quotient(shape(n.args[0])[2 + at], shape(n)[2]) == 1
    return [x[0], [*x[1], *t.axes.fresh(taps.sizes[at])], x[2 + at] if same else t.axes.fresh(shape(n)[2])]


def _lone(n: fx.Node) -> int | None:
    """The spatial dim over which windows run, where the other is a single one."""
    taps = Taps(n)
    for at in range(2):
        if taps.plain and shape(n.args[0])[3 - at] == 1 and taps.passes(1 - at):
            return at
    return None


def _mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    """Row-wise where windows run over features, or take one row each."""
    x: Any = n.args[0]
    taps = Taps(n) if rank_of(x) > 2 else None
    if taps is None or not taps.plain or not r.covers(x, s) or not all(r.free(y, s) for y in n.args[1:3]):
        return "a convolution of values with other rows"
    if r.on_rows(x, 1, s):
        return "convolves over rows"
    along = any(r.on_rows(x, 2 + at, s) for at in range(taps.spatial))
    if op(n) == "im2col" or (along and not all(map(taps.passes, range(taps.spatial)))):
        return "a convolution over neighbouring rows, or over features beside them"
    return None


def _spans(m: Moves, n: fx.Node, space: Space) -> Span | None:
    """Along the columns, where all else that windows run over is one element wide."""
    x: Any = n.args[0]
    into, taps = m.space_of(x), Taps(n) if rank_of(x) > 2 else None
    if into is None or taps is None or not taps.plain or into.sequence != space.sequence:
        return None
    atoms = [tuple(d) for d in m.typing.atoms(x)]
    at = next((i for i in range(taps.spatial) if atoms[2 + i] == into.column), None)
    if at is None or atoms[0] != into.sequence or taps.strides[at] != 1 or set(atoms[1]) & set(into.axes):
        return None
    if any(not taps.passes(i) for i in range(taps.spatial) if i != at):
        return None
    out = tuple(m.typing.atoms(n)[2 if op(n) == "im2col" else 2 + at])
    if out != space.column or (op(n) != "im2col" and taps.passes(at)):
        return None
    return Window(space, into, x, taps.starts(at), inside=taps.before[at] == 0)


def _packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """A product with the rows of each window, side by side."""
    x, weight, bias = operand(n), operand(n, 1), arg(n, "bias")
    span = e.an.span_of(n)
    axes = span.into.axes if isinstance(span, Window) else chosen.space.axes
    kept = e.kept(x, axes)
    one, wide = [s for d, s in kept if d == 0], [s for d, s in kept if d > 1]  # a batch of one sequence has no axis
    rows = e.neighbours(x, span.taps, chosen) if isinstance(span, Window) else e.packed(x, chosen)
    groups, (out, inner, *_) = arg(n, "groups"), shape(weight)
    taps = len(span.taps) if isinstance(span, Window) else 1
    if groups == 1 and all(size == 1 for size in wide):
        kernel = e.call(aten.transpose.int, e.reshape(e.dense(weight), [out, inner, taps]), 1, 2)
        window = e.reshape(rows, [-1, product([taps, inner])])
        y = e.call(
            aten.linear.default, window, e.reshape(kernel, [out, -1]), e.dense(bias) if bias is not None else None
        )
        return e.reshape(y, [-1, *one, out, *wide])
    # A convolution rounds once, its bias added: until then a half type is wider.
    inside, dtype = accumulator(value_of(n).dtype) if bias is not None else value_of(n).dtype, value_of(n).dtype

    def widened(x: fx.Node) -> fx.Node:
        return x if inside == dtype else e.call(aten.to.dtype, x, inside)

    windows = e.reshape(widened(rows), [-1, taps, groups, inner, *(wide or [1])])
    kernel = e.reshape(widened(e.dense(weight)), [groups, quotient(out, groups), inner, taps])
    y = e.call(aten.einsum.default, "tkgce,gock->tgoe", [windows, kernel])
    y = e.reshape(y, [-1, *one, out, *wide])
    if bias is not None:
        y = e.call(aten.add.Tensor, y, e.reshape(widened(e.dense(bias)), [out, *[1] * len(wide)]))
    return y if inside == dtype else e.call(aten.to.dtype, y, dtype)


def _over_features(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """Rows are sequences of their own, or the windows run over them."""
    x: Any = n.args[0]
    along = any(e.an.rowwise.on_rows(x, d, chosen.space) for d in range(2, rank_of(x)))
    return _packed(e, n, chosen) if along or e.an.span_of(n) is not None else e.again(n, input=e.packed(x, chosen))


def _columns_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    span = e.an.span_of(n)
    assert isinstance(span, Window)
    rows = e.reshape(e.neighbours(x, span.taps, chosen), [-1, len(span.taps), quotient(shape(n)[1], len(span.taps))])
    return e.reshape(e.call(aten.transpose.int, rows, 1, 2), [-1, shape(n)[1]])


_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
row_op("conv1d", "conv2d", models=_ARGUMENTS, axes=_axes, mixes=_mixes, spans=_spans, packed=_over_features)
row_op("im2col", models=("self", "kernel_size", "dilation", "padding", "stride"),
       axes=_columns_axes, mixes=_mixes, spans=_spans, packed=_columns_packed)  # fmt: skip
