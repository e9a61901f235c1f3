"""Tables, gathers and indexing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ....graph.nodes import tensor
from ..calls import arg, counts_from_zero, dim_of, op, operand, picking_mask, product, quotient, rank_of, shape
from ..declaration import row_op
from . import along, moves
from .packing import first_packed, same_dims

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..moves import Move, Moves
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..zeros import Support, Zeros


def _embedding(t: Typing, n: fx.Node) -> Dims:
    return [*t.dims(n.args[1]), t.dims(n.args[0])[1]]


def _embedding_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if arg(n, "scale_grad_by_freq"):
        return "scale_grad_by_freq counts the pads too"
    return None if r.free(n.args[0], s) else "a table indexed by rows"


def _embedding_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    table: Any = n.args[0]
    ids: Any = n.args[1]
    e.note_lookup(ids, shape(table)[0])
    return e.again(n, indices=e.packed(ids, chosen))


def _embedding_reads(m: Moves, n: fx.Node) -> Move | None:
    """Rows looked up as if they were a table. Options about gradients are about those of a table."""
    return moves.numbered(m, n) if len(n.args) == 2 and not n.kwargs else None


def _left_rows(t: Typing, n: fx.Node) -> Dims:
    return [*t.dims(n.args[1]), *t.dims(n.args[0])[1:]]


def _left_rows_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return None if r.free(n.args[0], s) else "rows looked up by rows"


def _left_rows_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """Rows that nobody reads need not be there."""
    where: Any = n.args[1]
    return e.again(n, where=e.packed(where, chosen))


def _one_hot(t: Typing, n: fx.Node) -> Dims:
    return [*t.dims(n.args[0]), t.axes.fresh(shape(n)[-1])]


def _one_hot_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return None if arg(n, "num_classes") != -1 else "the number of classes depends on the data"


def _one_hot_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    ids: Any = n.args[0]
    e.note_lookup(ids, shape(n)[-1])
    return first_packed(e, n, chosen)


def _searched_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if not r.covers(n.args[0], s) or not r.free(n.args[1], s):
        return f"{op(n)} among rows"
    return None


def _gather(t: Typing, n: fx.Node) -> Dims | None:
    if arg(n, "dim") is None or rank_of(n.args[0]) != rank_of(n):  # take_along_dim of all, gather of one number
        return None
    at = dim_of(n)
    x, index = t.dims(n.args[0]), t.dims(arg(n, "index") or arg(n, "indices"))
    old, new = shape(n.args[0]), shape(n)
    out: Dims = []
    for i, (d, k) in enumerate(zip(x, index, strict=True)):
        aligned = i != at and t.axes.same(old[i], new[i])  # gather may also read a corner of the tensor
        out.append(t.join(d, k) if aligned else k)
    return out


def _gather_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    index = arg(n, "index") or arg(n, "indices")
    if r.on_rows(n.args[0], dim_of(n), s) or not r.covers(n.args[0], s) or not r.covers(index, s):
        return "gathers rows"
    same = all(r.typing.axes.same(a, b) for i, (a, b) in enumerate(zip(shape(n.args[0]), shape(index), strict=True))
               if i != dim_of(n))  # fmt: skip
    return None if same else "gathers from a corner of the tensor"


def _gather_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """By gather: the fake of take_along_dim cannot take a number of rows that only the batch knows."""
    x: Any = n.args[0]
    e.note_lookup(arg(n, "index") or arg(n, "indices"), shape(x)[dim_of(n)])
    y, at = e.packed(x, chosen), e.position(x, dim_of(n), chosen)
    if op(n) == "take_along_dim":
        return e.call(torch.ops.aten.gather.default, y, at, e.packed(arg(n, "indices"), chosen))
    return e.again(n, self=y, dim=at, index=e.packed(arg(n, "index"), chosen))


def _index_select(t: Typing, n: fx.Node) -> Dims:
    mask = picking_mask(n)
    if mask is not None:
        return _picked(t, n, mask)
    chosen = (t.dims(arg(n, "index")) or [[]])[0]
    return [chosen if i == dim_of(n) else d for i, d in enumerate(t.dims(n.args[0]))]


def _selected_zeros(z: Zeros, n: fx.Node) -> Support:
    """Elements move along the dim, even where its axis stays the same."""
    return z.support_beside(n.args[0], dim_of(n))


def _index(t: Typing, n: fx.Node) -> Dims | None:
    x: Any = n.args[0]
    indices: Any = n.args[1]
    mask = picking_mask(n)
    if mask is not None:
        return _picked(t, n, mask)
    lone = _lone_index(n)
    if lone is not None:
        at, index = lone
        return [*t.dims(x)[:at], *t.dims(index), *t.dims(x)[at + 1 :]]
    if not _by_numbers(indices):
        return None
    for k, index in enumerate(indices):
        if counts_from_zero(index) and quotient(shape(x)[k], product(shape(index))) == 1:
            t.join(t.dims(x)[k], [a for d in t.dims(index) for a in d])  # x[arange(n)] is x
    rank = max(rank_of(i) for i in indices)
    return [*t.broadcast(indices, rank), *t.dims(x)[len(indices) :]]


def _by_numbers(indices: Any) -> bool:
    values = [tensor(i) for i in indices]
    return all(v is not None and v.dtype != torch.bool for v in values)


def _lone_index(n: fx.Node) -> tuple[int, fx.Node] | None:
    """x[:, :, numbers]: the one dim that is indexed, behind others that are not."""
    indices: Any = n.args[1]
    at = [k for k, index in enumerate(indices) if index is not None]
    if len(at) != 1 or at[0] == 0 or not _by_numbers([indices[at[0]]]):
        return None
    return at[0], indices[at[0]]


def _picked(t: Typing, n: fx.Node, mask: fx.Node) -> Dims:
    """Rows that a mask keeps."""
    x = operand(n)
    for mine, its in zip(t.dims(x), t.dims(mask), strict=False):
        t.join(mine, its)
    if mask not in t.kept:
        t.kept[mask] = [t.axes.new(shape(n)[0])]
    return [t.kept[mask], *t.dims(x)[rank_of(mask) :]]


def _index_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    lone = _lone_index(n)
    if lone is not None:
        at, index = lone
        over_rows = r.on_rows(n.args[0], at, s) or not r.covers(n.args[0], s) or not r.free(index, s)
        return "picks rows" if over_rows else None
    if not r.free(n.args[0], s):
        return "picks rows"
    if not _by_numbers(n.args[1]):
        return "picks by a mask"
    widest = _widest(n)
    leading = r.typing.atoms(n)[: rank_of(widest)]
    return None if r.typing.atoms(widest) == leading else "picks by numbers that are broadcast"


def _widest(n: fx.Node) -> fx.Node:
    """The first index of as many dims as all of them have together."""
    indices: Any = n.args[1]
    return max(indices, key=rank_of)


def _index_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """A table indexed by row values, or rows of which features are picked."""
    indices: Any = n.args[1]
    lone = _lone_index(n)
    if lone is not None:
        x: Any = n.args[0]
        at, index = lone
        before = [None] * e.position(x, at, chosen)
        return e.again(n, self=e.packed(x, chosen), indices=[*before, e.dense(index)])
    widest, table = _widest(n), operand(n)
    for i, count in zip(indices, shape(table), strict=False):
        e.note_lookup(i, count, from_end=True)
    packed = [e.operand(i, widest, chosen) if i is not widest else e.packed(i, chosen) for i in indices]
    return e.again(n, indices=packed)


row_op("embedding", models=("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"),
       axes=_embedding, mixes=_embedding_mixes, reads=_embedding_reads, packed=_embedding_packed)  # fmt: skip
row_op("turbogr::left_rows", models=("rows", "where"), axes=_left_rows, mixes=_left_rows_mixes,
       packed=_left_rows_packed)  # fmt: skip
row_op("one_hot", models=("self", "num_classes"), axes=_one_hot, mixes=_one_hot_mixes, packed=_one_hot_packed)
row_op("bucketize.Tensor", models=("self", "boundaries", "out_int32", "right"),
       axes=same_dims, mixes=_searched_mixes, packed=first_packed)  # fmt: skip
# Elements that are taken to be unique are looked for among each other.
row_op("isin.Tensor_Tensor", models=("elements", "test_elements", "invert"),
       axes=same_dims, mixes=_searched_mixes, packed=first_packed)  # fmt: skip
row_op("gather", "take_along_dim", models=("self", "dim", "index", "indices", "sparse_grad"),
       axes=_gather, mixes=_gather_mixes, reads=moves.gathered, packed=_gather_packed)  # fmt: skip
row_op("index_select", models=("self", "dim", "index"),
       axes=_index_select, zeros=_selected_zeros, reads=moves.numbered, **along.ALONG)  # fmt: skip
row_op("index", models=("self", "indices"),
       axes=_index, mixes=_index_mixes, reads=moves.indexed, packed=_index_packed)  # fmt: skip
