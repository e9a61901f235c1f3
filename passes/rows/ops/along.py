"""Ops that run along one dim: row-wise where that dim carries no rows, and packed by naming the dim anew."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..calls import Size, arg, dim_of, op, operand, rank_of, shape, size, tensors
from ..declaration import row_op
from ..spans import Prefix
from .packing import first_name, first_packed, same_dims

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..moves import Moves
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..spans import Span


def over_rows(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if not r.covers(n.args[0], s):
        return f"{op(n)}: rows of the result are not rows of %{n.args[0]}"
    if not all(r.free(x, s) for x in tensors(n)[1:]):
        return "selected by rows"
    return f"{op(n)} runs over rows" if r.on_rows(n.args[0], dim_of(n), s) else None


def packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    return e.again(n, **{first_name(n): e.packed(x, chosen), "dim": e.position(x, dim_of(n), chosen)})


def _reduced(t: Typing, n: fx.Node) -> list[Dims | None]:
    """Values and where they were."""
    keep = bool(arg(n, "keepdim", False))
    dims: Dims = [[] if i == dim_of(n) else d for i, d in enumerate(t.dims(n.args[0])) if keep or i != dim_of(n)]
    return [dims, list(dims)]


def _reordered(t: Typing, n: fx.Node) -> Dims:
    """Elements move along the dim, or there are fewer of them: an axis of its own."""
    sizes = _first_shape(n)
    return [t.axes.fresh(sizes[i]) if i == dim_of(n) else d for i, d in enumerate(t.dims(n.args[0]))]


def _both_reordered(t: Typing, n: fx.Node) -> list[Dims | None]:
    dims = _reordered(t, n)
    return [dims, list(dims)]


def _both_same(t: Typing, n: fx.Node) -> list[Dims | None]:
    return [same_dims(t, n), same_dims(t, n)]


def _first_shape(n: fx.Node) -> list[Size]:
    """Of the result, or of the first of several."""
    value = n.meta["val"]
    return [size(s) for s in (value if isinstance(value, torch.Tensor) else value[0]).shape]


def _up_to_each_row(m: Moves, n: fx.Node, space: Space) -> Span | None:
    x = operand(n)
    if n not in m.meanings.tainted or m.space_of(x) != space:
        return None  # counting valid rows costs nothing
    return Prefix(space, x) if tuple(m.typing.atoms(x)[dim_of(n)]) == space.column else None


def _running(e: Emitter, n: fx.Node, chosen: RowSet) -> Any:
    """Along columns as eager does, in the same order: no row looks at those behind it, which are not there."""
    x = operand(n)
    if not set(e.typing.atoms(x)[dim_of(n)]) & set(chosen.space.axes):
        return packed(e, n, chosen)
    whole = e.again(n, self=e.dense(x))
    several = not isinstance(n.meta["val"], torch.Tensor)
    parts = [e.call(operator.getitem, whole, i) for i in range(2)] if several else [whole]
    rows = [e.rows_of(part, x, chosen) for part in parts]
    return rows if several else rows[0]


def _windows(t: Typing, n: fx.Node) -> Dims:
    at, sizes = dim_of(n, "dimension"), shape(n)
    dims = [t.axes.fresh(sizes[i]) if i == at else d for i, d in enumerate(t.dims(n.args[0]))]
    return [*dims, t.axes.fresh(sizes[-1])]


def _windows_mix(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if not r.covers(n.args[0], s):
        return "windows of a value with other rows"
    return "windows run over rows" if r.on_rows(n.args[0], dim_of(n, "dimension"), s) else None


def _windows_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    return e.again(n, self=e.packed(x, chosen), dimension=e.position(x, dim_of(n, "dimension"), chosen))


def _triangle_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    """The last two dims stay the last two where neither carries rows."""
    if not r.covers(n.args[0], s):
        return f"{op(n)} of a tensor of pairs"
    return f"{op(n)} over rows" if any(r.on_rows(n.args[0], d, s) for d in (-1, -2)) else None


def _similarity(t: Typing, n: fx.Node) -> Dims:
    dims = t.broadcast(tensors(n), rank_of(n) + 1)
    del dims[arg(n, "dim") % len(dims)]
    return dims


def _similarity_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    x, *others = tensors(n)
    if any(r.typing.atoms(y) != r.typing.atoms(x) for y in others) or not r.covers(x, s):
        return "a similarity of values with other rows"
    return "a similarity over rows" if r.on_rows(x, dim_of(n), s) else None


def _similarity_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    y: Any = n.args[1]
    return e.again(n, x1=e.packed(x, chosen), x2=e.packed(y, chosen), dim=e.position(x, dim_of(n), chosen))


ALONG: dict[str, Any] = {"mixes": over_rows, "packed": packed}
row_op("softmax", "log_softmax", "_softmax", "_safe_softmax",
       models=("self", "dim", "dtype", "half_to_float"), axes=same_dims, **ALONG)  # fmt: skip
RUNNING: dict[str, Any] = {"mixes": over_rows, "spans": _up_to_each_row, "packed": _running}
row_op("cumsum", "cumprod", "logcumsumexp", models=("self", "dim", "dtype"), axes=same_dims, **RUNNING)
row_op("cummax", "cummin", models=("self", "dim"), axes=_both_same, **RUNNING)
row_op("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode", "kthvalue",
       models=("self", "k", "dim", "keepdim"), axes=_reduced, **ALONG)  # fmt: skip
row_op("sort", "topk", models=("self", "k", "dim", "descending", "stable", "largest", "sorted"),
       axes=_both_reordered, **ALONG)  # fmt: skip
row_op("argsort", models=("self", "dim", "descending", "stable"), axes=_reordered, **ALONG)
row_op("glu", models=("self", "dim"), axes=_reordered, **ALONG)
row_op("diff", models=("self", "n", "dim"), axes=_reordered, **ALONG)
row_op("unfold", models=("self", "dimension", "size", "step"),
       axes=_windows, mixes=_windows_mix, packed=_windows_packed)  # fmt: skip
row_op("tril", "triu", models=("self", "diagonal"), axes=same_dims, mixes=_triangle_mixes, packed=first_packed)
row_op("cosine_similarity", models=("x1", "x2", "dim", "eps"),
       axes=_similarity, mixes=_similarity_mixes, packed=_similarity_packed)  # fmt: skip
