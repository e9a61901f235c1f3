"""Linear layers, matrix products, einsum, attention as one op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..by_sequence import MOST_COPIED, by_letters, multiplied, times
from ..calls import (
    COPIES,
    REPEATS,
    VIEWS,
    arg,
    einsum_labels,
    is_tensor,
    op,
    operand,
    operands,
    product,
    quotient,
    rank_of,
    shape,
)
from ..declaration import EVERY, row_op
from ..zeros import NOWHERE_KNOWN
from . import moves
from .packing import first_packed

if TYPE_CHECKING:
    from ..axes import Dim, Dims, Typing
    from ..emit import Emitter
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..zeros import Support, Zeros

aten = torch.ops.aten


def _linear(t: Typing, n: fx.Node) -> Dims:
    x, w = t.dims(n.args[0]), t.dims(n.args[1])
    t.join(x[-1], w[-1])
    return [*x[:-1], *w[:-1]]


def _matmul(t: Typing, n: fx.Node) -> Dims | None:
    x, y = t.dims(n.args[0]), t.dims(n.args[1])
    if len(x) > 1 and len(y) > 1:
        return t.product(x, y)
    if len(y) == 1:
        t.join(x[-1], y[0])
        return x[:-1]
    t.join(x[0], y[-2])
    return [*y[:-2], y[-1]]


def _add_product(t: Typing, n: fx.Node) -> Dims:
    out = t.product(t.dims(n.args[1]), t.dims(n.args[2]))
    added = t.dims(n.args[0])
    return [t.join(p, q) for p, q in zip(out, [[]] * (len(out) - len(added)) + added, strict=True)]


def _einsum(t: Typing, n: fx.Node) -> Dims | None:
    labels = einsum_labels(n)
    if labels is None:
        return None
    inputs, out = labels
    known: dict[str, Dim] = {}
    for label, x in zip(inputs, operands(n, 1), strict=True):
        for letter, dim in zip(label, t.dims(x), strict=True):
            known[letter] = t.join(known.get(letter, []), dim)
    return [known[letter] for letter in out]


def _attention(t: Typing, n: fx.Node) -> Dims:
    q, k, v = (t.dims(a) for a in n.args[:3])
    lead: list[Dims] = [[[]] * (rank_of(n) - len(x)) + x[:-2] for x in (q, k, v)]  # any may be broadcast
    batch = [dims[0] if arg(n, "enable_gqa") and i == rank_of(n) - 3 else t.join(*dims)
             for i, dims in enumerate(zip(*lead, strict=True))]  # fmt: skip
    t.join(q[-1], k[-1])
    t.join(k[-2], v[-2])
    if is_tensor(arg(n, "attn_mask")):
        for m, s in zip(reversed(t.dims(arg(n, "attn_mask"))), reversed([*batch, q[-2], k[-2]]), strict=False):
            t.join(s, m)
    return [*batch, q[-2], v[-1]]


def _linear_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return None if not r.on_rows(n.args[0], -1, s) and all(r.free(x, s) for x in n.args[1:]) else "linear over rows"


def _product_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    x, y = operand(n), operand(n, 1)
    if op(n) in ("addmm", "baddbmm"):
        x, y = _factors(n)
        if not r.free(n.args[0], s) and not r.covers(n.args[0], s):
            return f"{op(n)} of a value with other rows"
    if r.on_rows(x, -1, s):
        return "a product over rows"
    if rank_of(y) <= 2 and r.free(y, s):
        return None if r.covers(x, s) else "a product of values with other rows"
    plain = op(n) in ("matmul", "bmm") and min(rank_of(x), rank_of(y)) > 1
    if plain and _is_repeated(r.typing, y, set(s.axes)) and r.covers(x, s):
        own = r.free(y, s) or r.space_of(_before_repetition(y)) is None
        return None if own else "matrices made from other rows"  # else a matrix for each head, say
    batch = r.typing.atoms(n)[:-2]
    rows = [a for d in batch for a in d if a in s.axes]
    same = rank_of(x) == rank_of(y) == rank_of(n) and sorted(rows) == sorted(s.axes)
    same = same and r.covers(x, s) and r.covers(y, s)
    if same and r.typing.atoms(x)[:-2] == r.typing.atoms(y)[:-2] == batch:
        return None
    of_sequences = _is_of_sequences(r.typing, n, x, y, s) or times(r.typing, n, s) is not None
    return None if of_sequences else "a product of values with other rows"


def _is_of_sequences(t: Typing, n: fx.Node, x: fx.Node, y: fx.Node, s: Space) -> bool:
    """Rows times something that their sequence has one of: a candidate against its history, say."""
    letters = by_letters(n)
    if letters is None:
        return False
    of_x, of_y = (operand.label for operand in letters[0])
    places = [{a: letter for letter, atoms in zip(of, t.atoms(v), strict=True) for a in atoms if a in s.axes}
              for of, v in ((of_x, x), (of_y, y))]  # fmt: skip
    counted = [[a for a in t.flat(v) if a in s.axes] for v in (x, y)]
    if any(len(set(axes)) != len(axes) for axes in counted) or any("z" in at.values() for at in places):
        return False
    whole = [v for v, at in zip((x, y), places, strict=True) if set(at) == set(s.axes)]
    aligned = all(places[1].get(a, letter) == letter for a, letter in places[0].items())
    if len(whole) != 1 or not aligned:
        return False
    (rows,) = whole
    other = y if rows is x else x
    sizes = [product(t.axes.size(a) for a in t.flat(v) if a not in s.axes) for v in (rows, other)]
    return all(isinstance(size, int) for size in sizes) and sizes[1] <= MOST_COPIED * sizes[0]


def _is_repeated(t: Typing, y: Any, rows: set[int]) -> bool:
    """Is the value the same for all rows: without row axes, or with such that a repetition has made?"""
    left = rows & set(t.flat(y))
    if not left:
        return True
    if op(y) in REPEATS:
        return _only_repeats(t, y, left) and _is_repeated(t, operand(y), left & set(t.flat(operand(y))))
    return op(y) in VIEWS | COPIES and y not in t.untyped and _is_repeated(t, operand(y), left)


def _before_repetition(y: Any) -> Any:
    while op(y) in {*REPEATS, *VIEWS, *COPIES}:
        y = operand(y)
    return y


def _only_repeats(t: Typing, y: fx.Node, rows: set[int]) -> bool:
    """Does each axis of rows that is new here count repetitions, and nothing else?"""
    x = operand(y)
    before = [1] * (rank_of(y) - rank_of(x)) + shape(x)
    for atoms, old, new in zip(t.atoms(y), before, shape(y), strict=True):
        made = [a for a in atoms if a not in t.flat(x)]
        times = quotient(new, old)
        if set(made) & rows and (times is None or quotient(t.size_of(made), times) != 1):
            return False
    return True


def _einsum_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    labels = einsum_labels(n)
    if labels is None:
        return "an einsum with '...' or a repeated letter"
    inputs, out = labels
    letters = {c: r.typing.atoms(n)[i] for i, c in enumerate(out)}
    for label, x in zip(inputs, operands(n, 1), strict=True):
        for c, atoms in zip(label, r.typing.atoms(x), strict=True):
            if any(a in s.axes for a in atoms) and (c not in letters or not set(atoms) <= set(s.axes)):
                return "an einsum over rows"
    return None


def _zeros(z: Zeros, n: fx.Node) -> Support:
    """A product with zeros is zero, for what is known beside the contracted dim."""
    bare = op(n) != "linear" or arg(n, "bias") is None
    return z.support_beside(n.args[0], -1) if bare else NOWHERE_KNOWN


def _matmul_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    y: Any = n.args[1]
    repeated = rank_of(y) > 2 and rank_of(x) > 1 and _is_repeated(e.typing, y, set(chosen.space.axes))
    if repeated or _is_of_sequences(e.typing, n, x, y, chosen.space):
        return _as_einsum(e, n, x, y, chosen)
    by_sequence = times(e.typing, n, chosen.space)
    if by_sequence is not None:
        return multiplied(e, n, by_sequence, chosen)
    free = e.an.rowwise.free(y, chosen.space)
    return e.call(aten.matmul.default, e.packed(x, chosen), e.dense(y) if free else e.packed(y, chosen))


def _as_einsum(e: Emitter, n: fx.Node, x: fx.Node, y: fx.Node, chosen: RowSet) -> fx.Node:
    """As an einsum: of rows, and of what is the same for all of them or for those of a sequence."""
    letters = by_letters(n)
    assert letters is not None
    axes, ((of_x, of_y), out) = chosen.space.axes, ([x.label for x in letters[0]], letters[1])
    kept = {out[d] for d, _ in e.kept(n, axes)} | {"z"}
    texts, values = [], []
    for of, v in ((of_x, x), (of_y, y)):
        dims = [(of[d], size) for d, size in e.kept(v, axes)]
        mine = [(letter, size) for letter, size in dims if letter in kept]  # others stand beside rows, and are one
        repeated = _is_repeated(e.typing, v, set(axes))
        value = _any_of(e, v, axes) if repeated else e.packed(v, chosen)
        if mine != dims or (repeated and shape(v) != [size for _, size in mine]):
            value = e.reshape(value, [*([] if repeated else [-1]), *[size for _, size in mine]])
        texts.append("".join(["" if repeated else "T", *[letter for letter, _ in mine]]))
        values.append(value)
    result = "".join(out[d] for d, _ in e.kept(n, axes))
    return e.call(aten.einsum.default, f"{','.join(texts)}->T{result}", values)


def _any_of(e: Emitter, v: fx.Node, axes: Sequence[int]) -> fx.Node:
    """Any of its repetitions."""
    value, atoms = e.dense(v), e.typing.flat(v)
    if set(atoms) & set(axes):  # as captured: of those in packed rows the first may be a pad
        value = e.reshape(v, [e.typing.axes.size(a) for a in atoms])
        for d, a in enumerate(atoms):
            value = e.call(aten.slice.Tensor, value, d, 0, 1) if a in axes else value
    return value


def _addmm_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """By the op itself, which rounds once; what lies between rows and the dims of a matrix counts as rows."""
    factors = ("mat1",) if op(n) == "addmm" else ("batch1", "batch2")
    axes, dims = chosen.space.axes, len(factors)

    def flat(x: fx.Node, packed: fx.Node) -> fx.Node:
        sizes = e.kept_sizes(x, axes)
        return packed if len(sizes) <= dims else e.reshape(packed, [-1, *sizes[-dims:]])

    added, term = operand(n), e.operand(n.args[0], n, chosen)
    given = {name: flat(x, e.packed(x, chosen)) for name, x in zip(factors, _factors(n), strict=False)}
    term = term if e.an.rowwise.free(added, chosen.space) else flat(added, term)
    y = e.again(n, self=term, **given)
    return y if len(e.kept(n, axes)) <= dims else e.reshape(y, [-1, *e.kept_sizes(n, axes)])


def _factors(n: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The factors of a product that is added to something."""
    return operand(n, 1), operand(n, 2)


def _einsum_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    labels = einsum_labels(n)
    assert labels is not None
    inputs, out = labels
    axes = chosen.space.axes
    found = times(e.typing, n, chosen.space)
    if found is not None:
        return multiplied(e, n, found, chosen)
    texts, values = [], []
    for label, x in zip(inputs, operands(n, 1), strict=True):
        if e.an.rowwise.free(x, chosen.space):
            texts.append(label)
            values.append(e.dense(x))
            continue
        texts.append("T" + "".join(label[d] for d, _ in e.kept(x, axes)))
        values.append(e.packed(x, chosen))
    row = "T" + "".join(c for c, d in zip(out, e.typing.atoms(n), strict=True) if not set(d) & set(axes))
    return e.call(aten.einsum.default, f"{','.join(texts)}->{row}", values)


row_op("linear", models=("input", "weight", "bias"),
       axes=_linear, mixes=_linear_mixes, zeros=_zeros, packed=first_packed)  # fmt: skip
row_op("mm", "mv", models=("self", "mat2", "vec"),
       axes=_matmul, mixes=_product_mixes, zeros=_zeros, packed=_matmul_packed)  # fmt: skip
row_op("matmul", models=("self", "other"),
       axes=_matmul, mixes=_product_mixes, zeros=_zeros, reads=moves.one_hot, packed=_matmul_packed)  # fmt: skip
row_op("bmm", models=("self", "mat2"),
       axes=_matmul, mixes=_product_mixes, reads=moves.one_hot, packed=_matmul_packed)  # fmt: skip
row_op("addmm", models=("self", "mat1", "mat2", "beta", "alpha"),
       axes=_add_product, mixes=_product_mixes, packed=_addmm_packed)  # fmt: skip
row_op("baddbmm", models=("self", "batch1", "batch2", "beta", "alpha"),
       axes=_add_product, mixes=_product_mixes, packed=_addmm_packed)  # fmt: skip
row_op("einsum", models=("equation", "tensors"),
       axes=_einsum, mixes=_einsum_mixes, reads=moves.one_hot, packed=_einsum_packed)  # fmt: skip
row_op("scaled_dot_product_attention", models=EVERY, axes=_attention)
