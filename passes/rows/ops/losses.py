"""Losses, with or without reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ....graph.nodes import tensor
from ..calls import arg, rank_of, shape, tensors
from ..declaration import EVERY, row_op
from ..meaning import Predicate
from ..zeros import NOWHERE_KNOWN
from .pointwise import packed, zero_of_zeros

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..emit.values import Values
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..zeros import Support, Zeros


aten = torch.ops.aten


def _has_shares(n: fx.Node) -> bool:
    """Is the target a distribution over the classes?"""
    value = tensor(n.args[1])
    return value is not None and value.dtype.is_floating_point


def _class_dim(scores: Any) -> int:
    return 1 if rank_of(scores) > 1 else 0


def _cross_entropy(t: Typing, n: fx.Node) -> Dims | None:
    scores, target = t.dims(n.args[0]), t.dims(n.args[1])
    rows = [d for i, d in enumerate(scores) if i != _class_dim(n.args[0])]
    if _has_shares(n):
        for a, b in zip(scores, target, strict=True):
            t.join(a, b)
        return rows if rank_of(n) else []
    for a, b in zip(rows, target, strict=True):
        t.join(a, b)
    return list(target) if rank_of(n) else []


def _cross_entropy_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if rank_of(n) == 0:
        return "a mean or sum over rows"
    if r.on_rows(n.args[0], _class_dim(n.args[0]), s):
        return "a loss whose classes are rows"
    return None if r.covers(n.args[0], s) and r.covers(n.args[1], s) else "a loss of values with other rows"


def _cross_entropy_zeros(z: Zeros, n: fx.Node) -> Support:
    """Ignored rows have no loss."""
    target: Any = n.args[1]
    if not rank_of(n) or _has_shares(n) or not z.meanings.describes_rows(target):
        return NOWHERE_KNOWN
    return frozenset([Predicate(z.meanings.root(target), arg(n, "ignore_index"), False)])


def classes_second(e: Values, x: Any, chosen: RowSet) -> fx.Node:
    """Packed scores with the classes right after the rows, where a loss reads them."""
    y, at = e.packed(x, chosen), e.position(x, _class_dim(x), chosen)
    if at == 1:
        return y
    others = [i for i in range(1, 1 + len(e.kept(x, chosen.space.axes))) if i != at]
    return e.call(aten.permute.default, y, [0, at, *others])


def _cross_entropy_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    scores: Any = n.args[0]
    target: Any = n.args[1]
    if not _has_shares(n):
        e.note_lookup(target, shape(scores)[_class_dim(scores)], ignored=arg(n, "ignore_index"))
    classes = classes_second(e, target, chosen) if _has_shares(n) else e.packed(target, chosen)
    return e.again(n, self=classes_second(e, scores, chosen), target=classes)


def _loss(t: Typing, n: fx.Node) -> Dims:
    out = t.broadcast(tensors(n), max(rank_of(x) for x in tensors(n)))
    return out if rank_of(n) else []


def _loss_zeros(z: Zeros, n: fx.Node) -> Support:
    """Without weight there is no loss; of zeros a loss may be zero."""
    if not rank_of(n):
        return NOWHERE_KNOWN
    weight = arg(n, "weight")
    return zero_of_zeros(z, n) | (z.factor(weight) if isinstance(weight, fx.Node) else NOWHERE_KNOWN)


def _loss_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return "a mean or sum over rows" if rank_of(n) == 0 else r.aligned(n, s)


row_op("cross_entropy_loss", "nll_loss", "nll_loss_nd",
       models=("self", "target", "weight", "reduction", "ignore_index", "label_smoothing"), axes=_cross_entropy,
       mixes=_cross_entropy_mixes, zeros=_cross_entropy_zeros, packed=_cross_entropy_packed)  # fmt: skip
row_op("binary_cross_entropy_with_logits", "binary_cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss",
       "huber_loss", "kl_div", "soft_margin_loss",
       models=EVERY, axes=_loss, mixes=_loss_mixes, zeros=_loss_zeros, packed=packed)  # fmt: skip
