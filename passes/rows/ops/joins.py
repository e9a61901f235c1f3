"""Concatenation, stacking and splitting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ....graph.nodes import tensor
from ..calls import SPLITS, dim_of, dim_of_cat, joined_parts, op, quotient, rank_of, shape, size, value_of
from ..declaration import row_op
from . import moves

if TYPE_CHECKING:
    from ..axes import Dim, Dims, Typing
    from ..emit import Emitter
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..zeros import Support, Zeros

aten = torch.ops.aten


def _cat(t: Typing, n: fx.Node) -> Dims:
    parts, at = joined_parts(n), dim_of_cat(n)
    out: Dims = []
    for i in range(rank_of(n)):
        dims = [t.dims(p)[i] for p in parts]
        if i != at:
            out.append(t.join(*dims))
        elif len({tuple(t.axes.atoms(d)) for d in dims}) == 1 and dims[0]:
            out.append([*t.axes.fresh(len(dims)), *dims[0]])  # equal parts one after the other: a stack, flattened
        else:
            out.append(t.axes.fresh(shape(n)[i]))
    return out


def _stack(t: Typing, n: fx.Node) -> Dims:
    out = t.broadcast(joined_parts(n), rank_of(n) - 1)
    out.insert(dim_of_cat(n), t.axes.fresh(len(joined_parts(n))))
    return out


def _join_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    at = dim_of_cat(n)
    if any(0 in shape(p) for p in joined_parts(n)):
        return f"{op(n)} of a value without elements, which alone brings gradients to what it is made of"
    atoms = r.typing.atoms(n)[at]
    if any(a in s.axes for a in atoms):
        same = op(n) != "stack" and all(r.typing.atoms(p)[at] == atoms[1:] for p in joined_parts(n))
        if not same or atoms[0] in s.axes:
            return f"{op(n)} along rows"
    return None if all(r.covers(p, s) for p in joined_parts(n)) else f"{op(n)} of values with other rows"


def _cat_zeros(z: Zeros, n: fx.Node) -> Support:
    """Zero where every part is; where parts are not whole blocks, elements move along the dim."""
    at, parts = dim_of_cat(n), joined_parts(n)
    whole = z.typing.atoms(n)[at]
    blocks = all(z.typing.atoms(p)[at] == whole[1:] for p in parts)
    return frozenset.intersection(*[z.support(p) if blocks else z.support_beside(p, at) for p in parts])


def _stack_zeros(z: Zeros, n: fx.Node) -> Support:
    return frozenset.intersection(*[z.support(p) for p in joined_parts(n)])


def _join_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    parts, at, axes = joined_parts(n), dim_of_cat(n), chosen.space.axes
    twins = [e.packed(p, chosen) for p in parts]
    if op(n) == "stack" or any(
        a in axes for a in e.typing.atoms(n)[at]
    ):  # equal parts one after the other, beside rows
        place = 1 + sum(1 for d, _ in e.kept(n, axes) if d < at)
        stacked, sizes = e.call(aten.stack.default, twins, place), e.kept_sizes(n, axes)
        whole = len(sizes) == 1 + len(e.kept(parts[0], axes))
        return stacked if whole else e.reshape(stacked, [-1, *sizes])  # features lay between the parts and their rows
    joined = e.call(aten.cat.default, twins, e.position(parts[0], at, chosen))
    value, kept = tensor(n), {value_of(p).dtype for p in parts}
    assert value is not None
    # A part without elements counts for the dtype.
    return joined if value.dtype in kept else e.call(aten._to_copy.default, joined, dtype=value.dtype)


def _split(t: Typing, n: fx.Node) -> list[Dims | None]:
    x, at = t.dims(n.args[0]), dim_of(n)
    if op(n) == "unbind":
        return [[d for i, d in enumerate(x) if i != at] for _ in n.meta["val"]]
    out: list[Dims | None] = []
    block = _blocks(t, n)
    for part in n.meta["val"]:
        inner = block if block is not None else t.axes.fresh(size(part.shape[at]))
        out.append([inner if i == at else d for i, d in enumerate(x)])
    return out


def _blocks(t: Typing, n: fx.Node) -> Dim | None:
    """The inner axes of a dim that a split cuts between equal blocks: the reverse of a flattened stack."""
    atoms = t.axes.atoms(t.dims(n.args[0])[dim_of(n)])
    parts = [size(p.shape[dim_of(n)]) for p in n.meta["val"]]
    if len(parts) == 1 and op(n) != "unbind":
        return atoms
    fits = len(atoms) > 1 and t.axes.size(atoms[0]) == len(parts)
    return atoms[1:] if fits and all(quotient(t.size_of(atoms[1:]), p) == 1 for p in parts) else None


def _split_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    x: Any = n.args[0]
    if not r.covers(x, s):
        return "a split of a value with other rows"
    if not r.on_rows(x, dim_of(n), s) or _is_whole(n):
        return None
    outer = r.typing.atoms(x)[dim_of(n)][0]
    whole = op(n) != "unbind" and _blocks(r.typing, n) is not None and outer not in s.axes
    return None if whole else "a split of rows"


def _is_whole(n: fx.Node) -> bool:
    """Is there one piece only?"""
    return op(n) != "unbind" and len(n.meta["val"]) == 1


def _split_zeros(z: Zeros, n: fx.Node) -> Support:
    return z.support_beside(n.args[0], dim_of(n))


def _split_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> Any:
    x: Any = n.args[0]
    if _is_whole(n):
        return [e.packed(x, chosen)]
    y, at = e.packed(x, chosen), e.position(x, dim_of(n), chosen)
    atoms = e.typing.atoms(x)[dim_of(n)]
    if any(a in chosen.space.axes for a in atoms):  # blocks of a flattened stack
        inner = [a for a in atoms[1:] if a not in chosen.space.axes]
        if inner:
            sizes = e.kept_sizes(x, chosen.space.axes)
            blocks = [e.typing.size_of(atoms[:1]), e.typing.size_of(inner)]
            y = e.reshape(y, [-1, *sizes[: at - 1], *blocks, *sizes[at:]])
        return e.call(aten.unbind.int, y, at)
    return e.again(n, self=y, dim=at)


row_op("cat", models=("tensors", "dim"),
       axes=_cat, mixes=_join_mixes, zeros=_cat_zeros, reads=moves.joined, packed=_join_packed)  # fmt: skip
row_op("stack", models=("tensors", "dim"),
       axes=_stack, mixes=_join_mixes, zeros=_stack_zeros, reads=moves.joined, packed=_join_packed)  # fmt: skip
row_op(*sorted(SPLITS), models=("self", "dim", "split_size", "split_sizes", "chunks", "sections", "indices"),
       axes=_split, mixes=_split_mixes, zeros=_split_zeros, reads=moves.piece, packed=_split_packed)  # fmt: skip
