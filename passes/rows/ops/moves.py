"""Ops that move rows, and the rules that say which rows of its operands each row of a result reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import fx

from ..calls import (
    Size,
    arg,
    dim_of,
    dim_of_cat,
    dims_of,
    einsum_labels,
    folded,
    is_tensor,
    joined_parts,
    op,
    operand,
    operands,
    padding,
    piece_of,
    quotient,
    rank_of,
    shape,
    size,
    value_of,
)
from ..declaration import row_op
from ..meaning import Iota, OneHot
from ..moves import Move
from ..spaces import At, Moved, Numbered, Part, Space
from . import along

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..moves import Moves
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..zeros import Support, Zeros


aten = torch.ops.aten
FEW = 4  # times as many columns, at least, has what few are taken of


def _resized_dims(t: Typing, n: fx.Node) -> Dims:
    old, new = shape(n.args[0]), shape(n)
    same = [quotient(a, b) == 1 for a, b in zip(old, new, strict=True)]
    if op(n) in ("constant_pad_nd", "pad"):
        same = [not any(p) for p in padding(n)]  # a negative and a positive pad may leave the size alone
    return [d if kept else t.axes.fresh(s) for d, kept, s in zip(t.dims(n.args[0]), same, new, strict=True)]


def _turned_dims(t: Typing, n: fx.Node) -> Dims:
    moved = dims_of(n, "dims")
    return [t.axes.fresh(s) if moved is None or i in moved else d
            for i, (d, s) in enumerate(zip(t.dims(n.args[0]), shape(n), strict=True))]  # fmt: skip


def _selected_dims(t: Typing, n: fx.Node) -> Dims:
    return [d for i, d in enumerate(t.dims(n.args[0])) if i != dim_of(n)]


def _slice_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    x: Any = n.args[0]
    return None if r.typing.atoms(n) == r.typing.atoms(x) else along.over_rows(r, n, s)


def _slice_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    return e.packed(x, chosen) if e.typing.atoms(n) == e.typing.atoms(x) else along.packed(e, n, chosen)


def _zeros_beside_dim(z: Zeros, n: fx.Node) -> Support:
    x: Any = n.args[0]
    whole = rank_of(n) == rank_of(x) and z.typing.atoms(n) == z.typing.atoms(x)
    return z.support(x) if whole else z.support_beside(x, dim_of(n))


def _features_mix(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    """Features are padded, turned around or shifted; rows are moved instead."""
    x: Any = n.args[0]
    if not r.covers(x, s):
        return f"{op(n)} of a value with other rows"
    if op(n) in ("flip", "roll") and not dims_of(n, "dims"):
        return f"{op(n)} of everything"
    if op(n) in ("constant_pad_nd", "pad") and not all(isinstance(p, int) for pair in padding(n) for p in pair):
        return "padded by a size that only the batch knows"
    return f"{op(n)} of rows" if any(r.on_rows(x, d, s) for d in _changed(n)) else None


def _turned(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    return e.again(n, self=e.packed(x, chosen), dims=[e.position(x, d, chosen) for d in _changed(n)])


def _features_padded(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """By concatenation: the fake of constant_pad_nd cannot take a number of rows that only the batch knows."""
    x: Any = n.args[0]
    y = e.packed(x, chosen)
    dims = len(e.kept(x, chosen.space.axes))
    for d in _changed(n):
        at, (before, after) = e.position(x, d, chosen), padding(n)[d]
        edge = e.call(aten.slice.Tensor, y, at, 0, 1)
        filler = e.call(aten.full_like.default, edge, arg(n, "value") or 0)
        start, end = max(-before, 0), min(after, 0)
        if start or end:
            y = e.call(aten.slice.Tensor, y, at, start, end or None)
        more = [[-1] * at + [count] + [-1] * (dims - at) for count in (before, after)]
        left, right = ([e.call(aten.expand.default, filler, m)] if m[at] > 0 else [] for m in more)
        y = e.call(aten.cat.default, [*left, y, *right], at) if left or right else y
    return y


# --- which rows are read ---------------------------------------------------------------------------


def resized(m: Moves, n: fx.Node) -> Move | None:
    x: Any = n.args[0]
    out, into = m.space_of(n), m.space_of(x)
    if op(n) in ("slice", "narrow") and (few := _few(m, n)) is not None:
        return few
    if out is None or into is None or out.sequence != into.sequence:
        return None
    dims = _changed(n)
    if len(dims) != 1 or tuple(m.typing.atoms(x)[dims[0]]) != into.column:
        return None
    if tuple(m.typing.atoms(n)[dims[0]]) != out.column or (op(n) == "slice" and out == into):
        return None
    at, length = dims[0], shape(x)[dims[0]]
    name = op(n)
    if name == "flip":
        return Move(out, ((x, Moved(out, into, length - 1, -1)),))
    if name == "roll":
        shifts = arg(n, "shifts")
        shift = shifts[0] if isinstance(shifts, (list, tuple)) else shifts
        return Move(out, ((x, Moved(out, into, -size(shift), 1, True)),)) if _plain(shift) else None
    if name in ("constant_pad_nd", "pad"):
        before = padding(n)[at][0]
        fill = arg(n, "value") or 0  # as it is: a float lacks whole numbers that i64 has
        return Move(out, ((x, Moved(out, into, -size(before))),), fill) if _plain(before) else None
    start = _slice_start(n, length)
    step = arg(n, "step", 1) or 1
    if start is None or not isinstance(step, int):
        return None
    return Move(out, ((x, Moved(out, into, start, step)),))


def _few(m: Moves, n: fx.Node) -> Move | None:
    """The last column, or the last three: a slice of so few that those alone are worth having."""
    x, at = operand(n), dim_of(n)
    into, count, start = m.space_of(x), shape(n)[at], _slice_start(n, shape(x)[at])
    if into is None or not into.column or tuple(m.typing.atoms(x)[at]) != into.column or start is None:
        return None
    columns, step = m.typing.axes.seen(shape(x)[at]), arg(n, "step", 1) or 1
    if not isinstance(count, int) or not isinstance(step, int) or not count or FEW * count > (columns or 0):
        return None
    out = Space(into.sequence, tuple(m.typing.atoms(n)[at]))
    if m.space_of(n) not in (None, out, Space(into.sequence)):
        return None
    return Move(out, ((x, Moved(out, into, start, step)),), narrows=True)


def _changed(n: fx.Node) -> list[int]:
    if op(n) in ("slice", "narrow"):
        return [dim_of(n)]
    if op(n) in ("roll", "flip"):
        return dims_of(n, "dims") or []
    return [i for i, (before, after) in enumerate(padding(n)) if before or after]


def joined(m: Moves, n: fx.Node) -> Move | None:
    out, at, parts = m.space_of(n), dim_of_cat(n), joined_parts(n)
    if out is None:
        return None
    atoms = m.typing.atoms(n)[at]
    if op(n) == "stack" or (len(atoms) > 1 and all(m.typing.atoms(p)[at] == atoms[1:] for p in parts)):
        if not atoms or atoms[0] not in out.axes:
            return None
        coarse = Space(out.sequence, tuple(a for a in out.column if a != atoms[0]))
        if atoms[0] not in out.column or any(m.space_of(p) not in (coarse, None) for p in parts):
            return None
        return Move(out, tuple((p, Part(out, coarse, atoms[0], i)) for i, p in enumerate(parts)))
    if tuple(atoms) != out.column:
        return None
    pieces, start = [], 0
    for p in parts:
        into, length = m.space_of(p), shape(p)[at]
        if into is not None and into.sequence == out.sequence and tuple(m.typing.atoms(p)[at]) == into.column:
            pieces.append((p, Moved(out, into, -start)))
        elif length == 1 and set(out.sequence) <= set(m.typing.flat(p)):
            pieces.append((p, Moved(out, Space(out.sequence), -start)))
        else:
            return None
        start = start + length
    return Move(out, tuple(pieces))


def selected(m: Moves, n: fx.Node) -> Move | None:
    x: Any = n.args[0]
    into, atoms = m.space_of(x), tuple(m.typing.atoms(x)[dim_of(n)])
    index = arg(n, "index")
    if into is None or not atoms or not isinstance(index, int):
        return None
    if atoms == into.column:
        return Move(Space(into.sequence), ((x, At(Space(into.sequence), into, index)),), narrows=True)
    if len(atoms) == 1 and atoms[0] in into.column:
        return m.fixed(n, x, into, atoms[0], index)
    return None


def piece(m: Moves, n: fx.Node) -> Move | None:
    source: Any = n.args[0]
    x, number = source.args[0], piece_of(n)
    into, at = m.space_of(x), dim_of(source)
    atoms = tuple(m.typing.atoms(x)[at])
    if into is None or op(source) != "unbind":
        return _part(m, n, x, into, at, atoms)
    if len(atoms) == 1 and atoms[0] in into.column and len(into.column) > 1:
        return m.fixed(n, x, into, atoms[0], number)
    if atoms == into.column:
        return Move(Space(into.sequence), ((x, At(Space(into.sequence), into, number)),), narrows=True)
    return None


def _part(m: Moves, n: fx.Node, x: fx.Node, into: Space | None, at: int, atoms: tuple[int, ...]) -> Move | None:
    """A piece of a split along the columns."""
    out = m.space_of(n)
    if into is None or out is None or atoms != into.column or out.sequence != into.sequence:
        return None
    start: Size = 0
    for piece in operand(n).meta["val"][: piece_of(n)]:
        start = start + size(piece.shape[at])
    return Move(out, ((x, Moved(out, into, start)),)) if tuple(m.typing.atoms(n)[at]) == out.column else None


def numbered(m: Moves, n: fx.Node) -> Move | None:
    """Rows of a flattened value, by their number; or the same columns of every sequence."""
    x = operand(n)
    index = arg(n, "index") if op(n) == "index_select" else arg(n, "indices")
    if op(n) == "index_select" and dim_of(n) != 0:
        return _columns(m, n, index, dim_of(n))
    into = m.space_of(x)
    if into is None or tuple(m.typing.atoms(x)[0]) != into.axes:
        return None
    return _listed(m, n, (index[0] if op(n) == "index" else index,))


def _columns(m: Moves, n: fx.Node, index: Any, at: int, from_end: bool = False) -> Move | None:
    x = operand(n)
    into = m.space_of(x)
    if into is None or tuple(m.typing.atoms(x)[at]) != into.column or not is_tensor(index):
        return None
    if value_of(index).dtype == torch.bool or not all(m.is_sized(a) for a in m.typing.flat(index)):
        return None
    return m.taken(n, x, index, [*into.sequence, *m.typing.flat(index)], from_end)


def _listed(m: Moves, n: fx.Node, numbers: tuple[Any, ...]) -> Move | None:
    """Rows of the first operand, at numbers that index tensors hold, one row after another."""
    x = operand(n)
    into = m.space_of(x)
    for index in numbers:
        if not is_tensor(index) or index in m.meanings.tainted or value_of(index).dtype == torch.bool:
            return None
    flat = [a for d in m.typing.atoms(n)[: max(map(rank_of, numbers))] for a in d]
    out = m.space_of(n) or Space(tuple(flat))
    inside = all(set(m.typing.flat(index)) <= set(flat) for index in numbers)
    if into is None or not inside or set(out.axes) != set(flat) or len(set(flat)) != len(flat):
        return None
    if not all(m.is_sized(a) for a in out.axes):
        return None
    return Move(out, ((x, Numbered(out, into, numbers, op(n) == "index")),), narrows=True)


def gathered(m: Moves, n: fx.Node) -> Move | None:
    x: Any = n.args[0]
    index, at = arg(n, "index") or arg(n, "indices"), dim_of(n)
    into = m.space_of(x)
    if into is None or tuple(m.typing.atoms(x)[at]) != into.column:
        return None
    column = index
    while op(column) in ("expand", "repeat", "broadcast_to", "clone", "contiguous"):
        column = column.args[0]
    repeats = _expanded(column, at) if rank_of(column) == rank_of(n) else ()
    dims = enumerate(m.typing.atoms(column))
    rest = [a for i, d in dims if i not in repeats for a in d if a not in into.sequence]
    allowed = set(m.typing.atoms(n)[at])
    if not set(rest) <= allowed or not set(into.sequence) <= set(m.typing.flat(n)):
        return None  # different columns for different features
    kept = [a for i, d in enumerate(m.typing.atoms(x)) if i != at for a in d]
    got = [a for i, d in enumerate(m.typing.atoms(n)) if i != at for a in d]
    if kept != got:
        return None
    return m.taken(n, x, column, [*into.sequence, *m.typing.atoms(n)[at]], repeats=repeats)


def _expanded(index: fx.Node, at: int) -> tuple[int, ...]:
    """Dims behind `at` along which an input was expanded outside of the graph: its memory has them once."""
    if index.op != "placeholder":
        return ()
    once = [isinstance(stride, int) and stride == 0 for stride in value_of(index).stride()]
    return tuple(d for d in range(at + 1, len(once)) if once[d] and shape(index)[d] != 1)


def indexed(m: Moves, n: fx.Node) -> Move | None:
    """x[numbers], x[:, columns], x[arange(B), column], x[sequence, column]."""
    x: Any = n.args[0]
    indices: Any = n.args[1]
    if len(indices) == 1:
        return numbered(m, n)
    into = m.space_of(x)
    if len(indices) == 2 and indices[0] is None:
        return _columns(m, n, indices[1], 1, from_end=True)
    if into is None or len(indices) != 2 or not all(is_tensor(i) for i in indices):
        return None
    atoms = m.typing.atoms(x)
    if tuple(atoms[0]) != into.sequence or tuple(atoms[1]) != into.column:
        return None
    counts = m.meanings.of(indices[0])
    aligned = isinstance(counts, Iota) and counts.offset == 0 and tuple(m.typing.flat(indices[0])) == into.sequence
    if not aligned:
        return _listed(m, n, tuple(indices))
    if value_of(indices[1]).dtype == torch.bool or isinstance(m.meanings.of(indices[1]), Iota):
        return None  # a view
    m.meanings.use(indices[0])
    rank = max(rank_of(i) for i in indices)
    rows = [a for d in m.typing.atoms(n)[:rank] for a in d]
    return m.taken(n, x, indices[1], rows, from_end=True)


def one_hot(m: Moves, n: fx.Node) -> Move | None:
    """A product with rows of a unit matrix picks rows."""
    if op(n) == "einsum":
        labels = einsum_labels(n)
        if labels is None or len(labels[0]) != 2:
            return None
        (p, v), out = labels
        hot, x = operands(n, 1)
        found = m.meanings.of(hot)
        if not isinstance(found, OneHot) or p[found.dim] in out or p[found.dim] not in v:
            return None
    else:
        hot, x = operand(n), operand(n, 1)
        found = m.meanings.of(hot)
        if not isinstance(found, OneHot) or found.dim != rank_of(hot) - 1:
            return None
    into = m.space_of(x)
    if into is None or tuple(m.typing.atoms(hot)[found.dim]) != into.column:
        return None
    rows = [a for i, d in enumerate(m.typing.atoms(hot)) if i != found.dim for a in d]
    return m.taken(n, x, found.index, rows)


def _slice_start(n: fx.Node, length: Size) -> Size | None:
    start = arg(n, "start")
    start = start.meta.get("val") if isinstance(start, fx.Node) else 0 if start is None else start
    if not _plain(start):
        return None
    start = sympy.sympify(size(start))
    # From the end, a slice that would begin before the first column begins there. A size may have either sign.
    from_end = sympy.Max(start + length, 0)
    return folded(sympy.Piecewise((from_end, start < 0), (start, True)))


def _plain(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt))


row_op("slice", "narrow", models=("self", "dim", "start", "end", "step", "length"), axes=_resized_dims,
       mixes=_slice_mixes, zeros=_zeros_beside_dim, reads=resized, packed=_slice_packed)  # fmt: skip
row_op("select", models=("self", "dim", "index"),
       axes=_selected_dims, zeros=_zeros_beside_dim, reads=selected, **along.ALONG)  # fmt: skip
row_op("constant_pad_nd", "pad", models=("self", "pad", "value"), axes=_resized_dims,
       mixes=_features_mix, reads=resized, packed=_features_padded)  # fmt: skip
row_op("roll", "flip", models=("self", "shifts", "dims"), axes=_turned_dims,
       mixes=_features_mix, reads=resized, packed=_turned)  # fmt: skip
