"""Results in the shape that eager has, made from packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ....graph.nodes import tensor
from ....kernels.declare import accumulator
from ..by_sequence import Operand, made, makes_matrix
from ..calls import LIKE, arg, is_tensor, op, product, rank_of, reduced_dims, shape, value_of
from ..deciding import Keeps, Leaves, Loses, Sums
from ..ops.losses import classes_second
from ..pooling import Pooled
from ..program import Rows, RowSet
from ..spaces import Space
from .values import Values

aten = torch.ops.aten


def filled(e: Values, n: fx.Node) -> fx.Node:
    """A constant in the shape of a value that need not be there."""
    value = tensor(n)
    assert value is not None
    sizes = [e.size(s) for s in shape(n)]
    return e.call(aten.full.default, sizes, LIKE.get(op(n), 0), dtype=value.dtype, device=value.device)


def kept(e: Values, n: fx.Node, decision: Keeps) -> fx.Node:
    """Rows of a value as the model's own tensor, whose size is their number."""
    x = e.packed(decision.source, e.set_of(decision.space, decision.rows, exact=True))
    features = shape(n)[1:]  # without a dim of size one that rows have
    return x if e.kept_sizes(decision.source, decision.space.axes) == features else e.reshape(x, [-1, *features])


def left(e: Values, decision: Leaves) -> fx.Node:
    """Rows that a value lives on, without gradients, or for each row where it is among them: -1 where it is not."""
    source, chosen = decision.source, e.homes.get(decision.source)
    if decision.place == 0:
        if chosen is not None:
            return e.call(aten.detach.default, e.packed(source, chosen))
        value = value_of(source)
        return e.call(aten.full.default, [1, e.size(shape(source)[-1])], 0, dtype=value.dtype, device=value.device)
    features = len(e.kept(source, chosen.space.axes)) if chosen is not None else 1
    leading = shape(source)[: rank_of(source) - features]
    axes = tuple(a for dim in e.typing.atoms(source)[: len(leading)] for a in dim)
    # An op along rows may run over more rows than are asked for: only what is asked for is right.
    if chosen is not None and (chosen.terms != e.an.wanted.get(source) or axes != chosen.space.axes):
        chosen = None

    def recipe(r: Rows) -> torch.Tensor:
        sizes = [r.batch.number(s) for s in leading]
        return r.places(chosen).view(sizes) if chosen is not None else torch.full(sizes, -1)

    return e.input("kept", ("kept", source), [e.fake_size(s) for s in leading], recipe)


def loss(e: Values, n: fx.Node, decision: Loses) -> fx.Node:
    """A loss over the rows that it does not ignore; dummies are ignored."""
    chosen = e.set_of(decision.space, decision.rows)
    given, targets = n.all_input_nodes[:2]
    scores, target = classes_second(e, given, chosen), e.packed(targets, chosen)
    dims = len(e.kept(targets, decision.space.axes))
    target = e.without_dummies(target, chosen, arg(n, "ignore_index"), dims)
    return e.call(n.target, scores, target, *n.args[2:], **n.kwargs)


def summed(e: Values, n: fx.Node, decision: Sums) -> fx.Node:
    """A sum or mean over columns of a value that is zero on the rows that were left out."""
    x: Any = n.args[0]
    chosen = e.homes.get(x) or e.set_of(decision.space, decision.rows)
    axes, gone = chosen.space.axes, reduced_dims(n)
    lost = {a for d in gone for a in e.typing.atoms(x)[d]}
    whole = set(chosen.space.sequence) <= lost
    y = _silenced(e, x, chosen) if whole and chosen.rounded else e.packed(x, chosen)
    others = [e.position(x, d, chosen) for d, _ in e.kept(x, axes) if d in gone]
    given, wanted = value_of(x).dtype, value_of(n).dtype
    # Eager rounds once, at the end: what several steps make is wider until then.
    inside = accumulator(wanted) if op(n) == "mean" or (others and not whole) else wanted
    if op(n) == "sum" and inside != wanted != given:  # cast before they are added up; for a mean, afterwards
        y, given = e.call(aten.to.dtype, y, wanted), wanted
    dims = [*([0] if whole else []), *others]
    dtype = {"dtype": inside} if inside != given else {}  # whole numbers and truth values are added up as i64
    if dims:
        y = e.call(aten.sum.dim_IntList, y, dims, **dtype)
    elif dtype:
        y = e.call(aten.to.dtype, y, inside)
    if not whole:
        y = e.scattered(y, chosen, chosen.space.sequence)
    if op(n) == "mean":
        y = e.call(aten.div.Tensor, y, e.size(product(shape(x)[d] for d in gone)))
    y = e.call(aten.to.dtype, y, wanted) if inside != wanted else y
    if whole:
        return e.reshape(y, shape(n))
    return e.padded(y, n, Space(chosen.space.sequence))


def _silenced(e: Values, x: fx.Node, chosen: RowSet) -> fx.Node:
    """A value that is zero on dummy rows. Of a loss times its weight the weight is: `fuse-loss` knows such sums."""
    dims = len(e.kept(x, chosen.space.axes))
    sides: list[Any] = [a for a in x.args[:2] if is_tensor(a)] if op(x) == "mul" else []
    weights = [a for a in sides if a not in e.an.meanings.tainted and _one_per_row(e, a, x, chosen)]
    if len(sides) == 2 and len(weights) == 1:
        other = sides[1 - sides.index(weights[0])]
        share = e.without_dummies(e.packed(weights[0], chosen), chosen, 0, 0)
        return e.call(x.target, e.operand(other, x, chosen), share)
    if dims or not value_of(x).is_floating_point():
        return e.without_dummies(e.packed(x, chosen), chosen, 0, dims)
    return e.call(aten.mul.Tensor, e.packed(x, chosen), e.call(aten.logical_not.default, e.dummies(chosen)))


def _one_per_row(e: Values, x: fx.Node, like: fx.Node, chosen: RowSet) -> bool:
    """Then each dim of the product runs over rows, too."""
    axes = chosen.space.axes
    return not e.kept(x, axes) and any(a in axes for a in e.typing.flat(x)) and rank_of(x) == rank_of(like)


def pooled(e: Values, n: fx.Node, pool: Pooled) -> fx.Node:
    """A product that contracts columns: of each row, then summed by sequence; or at once, where it makes a matrix."""
    left, right = pool.left, pool.right
    chosen = e.set_of(pool.space, e.an.rows_where(pool.space, pool.support))
    axes = pool.space.axes
    p, v, out = pool.equation
    operands = Operand(left, p), Operand(right, v)
    if makes_matrix(e.typing, *operands, out, pool.space):
        matrices = made(e, *operands, out, chosen)
        return e.padded(e.reshape(matrices, [-1, *e.kept_sizes(n, axes)]), n, Space(pool.space.sequence))

    def letters(label: str, x: fx.Node) -> str:
        return "T" + "".join(label[d] for d, _ in e.kept(x, axes))

    equation = f"{letters(p, left)},{letters(v, right)}->{letters(out, n)}"
    # Products of a half type would be rounded one by one, or vanish.
    wide, wanted = accumulator(value_of(n).dtype), value_of(n).dtype
    rows = [e.packed(x, chosen) for x in (left, right)]
    rows = rows if wide == wanted else [e.call(aten.to.dtype, x, wide) for x in rows]
    y = e.scattered(e.call(aten.einsum.default, equation, rows), chosen, pool.space.sequence)
    y = y if wide == wanted else e.call(aten.to.dtype, y, wanted)
    return e.padded(y, n, Space(pool.space.sequence))
