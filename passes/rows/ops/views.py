"""Views: the same elements in another shape. Row axes stay whole, or the view cuts across rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..calls import arg, dim_of, dims_of, op, operand, quotient, rank_of, shape, swapped
from ..declaration import row_op

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..zeros import Support, Zeros

aten = torch.ops.aten


def _reshape(t: Typing, n: fx.Node) -> Dims | None:
    return t.axes.regroup(t.dims(n.args[0]), shape(n))


def _unsqueeze(t: Typing, n: fx.Node) -> Dims:
    dims = list(t.dims(n.args[0]))
    dims.insert(arg(n, "dim") % rank_of(n), [])
    return dims


def _squeeze(t: Typing, n: fx.Node) -> Dims:
    sizes = shape(n.args[0])
    chosen = (dims_of(n) if arg(n, "dim") is not None else None) or list(range(len(sizes)))
    return [d for i, d in enumerate(t.dims(n.args[0])) if not (i in chosen and sizes[i] == 1)]


def _permute(t: Typing, n: fx.Node) -> Dims:
    return [t.dims(n.args[0])[i] for i in arg(n, "dims")]


def _transpose(t: Typing, n: fx.Node) -> Dims:
    dims = list(t.dims(n.args[0]))
    if len(dims) > 1:
        i, j = swapped(n)
        dims[i], dims[j] = dims[j], dims[i]
    return dims


def _expand(t: Typing, n: fx.Node) -> Dims:
    new, old = shape(n), shape(n.args[0])
    source: Dims = [[] for _ in range(len(new) - len(old))] + t.dims(n.args[0])
    return [d if d or s == 1 else t.axes.fresh(s) for d, s in zip(source, new, strict=True)]


def _repeat(t: Typing, n: fx.Node) -> Dims:
    new, old = shape(n), shape(n.args[0])
    missing = len(new) - len(old)
    out: Dims = []
    for d, before, after in zip([[]] * missing + t.dims(n.args[0]), [1] * missing + old, new, strict=True):
        times = quotient(after, before)
        out.append([*t.axes.fresh(times), *d] if times is not None else t.axes.fresh(after))
    return out


def _repeat_interleave(t: Typing, n: fx.Node) -> Dims | None:
    if not isinstance(arg(n, "repeats"), int) or arg(n, "dim") is None:
        return None
    dims = list(t.dims(n.args[0]))
    dims[dim_of(n)] = [*dims[dim_of(n)], *t.axes.fresh(arg(n, "repeats"))]
    return dims


def _cuts(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    flat = r.typing.flat(operand(n))
    if any(flat.count(a) > 1 for a in s.axes):
        return "a view of a tensor of pairs"
    return f"{op(n)} cuts across rows" if n in r.typing.untyped else None


def _repeats(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    why = _cuts(r, n, s)
    inside = [d for d in r.typing.atoms(n) if len(d) > 1 and any(a in s.axes for a in d)]
    return "repeats rows" if why is None and inside and not r.covers(n.args[0], s) else why


def _zeros(z: Zeros, n: fx.Node) -> Support:
    return z.support(n.args[0])


def _permuted(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    rank = rank_of(n)
    if op(n) == "permute":
        order = [i % rank for i in arg(n, "dims")]
    else:
        order = list(range(rank))
        i, j = swapped(n)
        order[i], order[j] = order[j], order[i]
    kept = [d for d, _ in e.kept(x, chosen.space.axes)]
    places = [kept.index(d) for d in order if d in kept]
    y = e.packed(x, chosen)
    return y if places == sorted(places) else e.call(aten.permute.default, y, [0, *[1 + p for p in places]])


def _expanded(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    axes = chosen.space.axes
    sizes = e.kept_sizes(n, axes)
    y = e.packed(x, chosen)
    mine = dict(e.kept(x, axes))
    offset = rank_of(n) - rank_of(x)
    want = [mine.get(d - offset, 1) for d, _ in e.kept(n, axes)]
    if e.kept_sizes(x, axes) != want:
        y = e.reshape(y, [-1, *want])
    if want == sizes:
        return y
    if all(w == s or w == 1 for w, s in zip(want, sizes, strict=True)):
        return e.call(aten.expand.default, y, [-1, *[e.size(s) for s in sizes]])
    times = [t for w, s in zip(want, sizes, strict=True) if (t := quotient(s, w)) is not None]
    assert len(times) == len(sizes), f"{sizes} are no repetitions of {want}"
    return e.call(aten.repeat.default, y, [1, *map(e.size, times)])


def _reshaped(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    y, sizes = e.packed(x, chosen), e.kept_sizes(n, chosen.space.axes)
    # Whole atoms move only in order: a reshape of the padded value is one of the rows.
    return y if sizes == e.kept_sizes(x, chosen.space.axes) else e.reshape(y, [-1, *sizes])


def _interleaved(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    rows, axes, dim = e.packed(x, chosen), chosen.space.axes, dim_of(n)
    times = set(e.typing.atoms(n)[dim]) - set(e.typing.atoms(x)[dim])
    if times <= set(axes):  # a row is repeated by being asked for again
        return e.reshape(rows, [-1, *e.kept_sizes(n, axes)])
    mine, dims = dict(e.kept(x, axes)), [d for d, _ in e.kept(n, axes)]
    wide = [mine.get(d, 1) for d in dims]  # rows may be all that the dim had
    if wide != e.kept_sizes(x, axes):
        rows = e.reshape(rows, [-1, *wide])
    return e.again(n, self=rows, dim=1 + dims.index(dim))


_SHAPES = ("self", "shape", "size", "sizes", "dim", "start_dim", "end_dim", "other")
row_op("reshape", "view", "flatten", "unflatten", "view_as", "reshape_as",
       models=_SHAPES, axes=_reshape, mixes=_cuts, zeros=_zeros, packed=_reshaped)  # fmt: skip
row_op("_unsafe_view", models=("self", "size"), axes=_reshape)
row_op("unsqueeze", models=("self", "dim"), axes=_unsqueeze, mixes=_cuts, zeros=_zeros, packed=_reshaped)
row_op("squeeze", models=("self", "dim"), axes=_squeeze, mixes=_cuts, zeros=_zeros, packed=_reshaped)
row_op("permute", models=("self", "dims"), axes=_permute, mixes=_cuts, zeros=_zeros, packed=_permuted)
row_op("transpose", models=("self", "dim0", "dim1", "axis0", "axis1"),
       axes=_transpose, mixes=_cuts, zeros=_zeros, packed=_permuted)  # fmt: skip
row_op("t", "numpy_T", models=("self",), axes=_transpose, mixes=_cuts, zeros=_zeros, packed=_permuted)
row_op("expand", "broadcast_to", "expand_as", models=("self", "size", "other", "implicit"),
       axes=_expand, mixes=_cuts, zeros=_zeros, packed=_expanded)  # fmt: skip
row_op("repeat", "tile", models=("self", "repeats", "dims"),
       axes=_repeat, mixes=_repeats, zeros=_zeros, packed=_expanded)  # fmt: skip
row_op("repeat_interleave", models=("self", "repeats", "dim", "output_size"),
       axes=_repeat_interleave, mixes=_repeats, packed=_interleaved)  # fmt: skip
