"""The softmax of positions as `sampled_softmax`, for targets that have no kernel for lookups inside of a product.

Rows are looked up and stored as before. What goes is the product with its padding to matrices, the mask of hits, the
concatenation and the softmax: one kernel does them, each position being a group of its own, or sharing one.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from ...graph.shapes import same_size
from ..common.cross_entropy import MEAN, NONE, Refused, value_of
from .emit import Emitter
from .logits import Logits, root
from .losses import SampledLoss
from .scoring import Scoring, scorings_of
from .total import check_readers, have_one_query

aten, ops = torch.ops.aten, torch.ops.turbogr
LEAST = -1e4  # a logit from here on down has no share in a softmax, as everywhere in turbogr


def check(loss: SampledLoss, multiple: int = 1, widest: int = 1 << 30) -> None:
    node, own, many = loss.node, loss.positive, loss.negative
    width = many.scoring.counts[2]
    if width % multiple != 0 or width > widest:
        text = f"rows have {width} numbers, and the kernel takes multiples of {multiple} up to {widest}"
        raise Refused("sampling-form", text, node, "another width for the table")
    if loss.kind != "softmax":
        raise Refused("sampling-form", "the kernel computes a softmax, not binary cross-entropies", node)
    if loss.together:
        text = "positives are scored together with negatives"
        raise Refused("sampling-form", text, node, "score them apart, and concatenate the scores")
    _positive(loss)
    equal = own.learned == many.learned and math.isclose(own.scale, many.scale, rel_tol=1e-12)
    if not equal or own.scoring.product.eps >= 0 or many.scoring.product.eps >= 0:
        raise Refused("sampling-form", "scores of positives and of negatives have different factors", node)
    if many.hits is not None:
        if many.hits.value > LEAST:
            text = f"hits get the logit {many.hits.value:g}; the kernel leaves them out"
            raise Refused("sampling-form", text, many.hits.mask, f"mask them with {LEAST:g} or less")
        if _compared(many) is None:
            text = "logits are masked by something else than negatives that are the positive"
            raise Refused("sampling-mask", text, many.hits.mask)
    check_readers(loss)


def _positive(loss: SampledLoss) -> Scoring:
    """The scoring of positives by the queries that score negatives: either operand may be the query."""
    for s in scorings_of(loss.positive.scoring.product.node):
        if have_one_query(s, loss.negative.scoring) and s.in_order:
            return s
    text = "positives and negatives are scored with different queries"
    raise Refused("sampling-positive", text, loss.node)


def _compared(many: Logits) -> tuple[fx.Node, fx.Node] | None:
    """Ids of positives and of negatives, where hits are where these are equal."""
    assert many.hits is not None
    mask = root(many.hits.mask)
    if mask.target is not aten.eq.Tensor:
        return None
    whole = value_of(many.scoring.product.node).numel()
    for a, b in (mask.args[:2], mask.args[1::-1]):
        if tensor(a) is None or tensor(b) is None or value_of(b).dtype != torch.int64 != value_of(a).dtype:
            continue
        column = isinstance(value_of(a).shape[-1], int) and value_of(a).shape[-1] == 1
        lead = same_size(value_of(a).numel() * value_of(b).shape[-1], whole)
        if column and lead and same_size(value_of(b).numel(), whole):
            return a, b
    return None


def check_shared(loss: SampledLoss) -> None:
    """Positives have to be known by their ids, to be left out where a neighbour's negative is one of them."""
    if loss.negative.hits is None and loss.positive.scoring.rows is None:
        text = "negatives are not shared: positives are not looked up in this graph, so hits cannot be left out"
        raise Refused("logits-not-shared", text, loss.node, "look them up by their ids in the compiled function")


def emit(loss: SampledLoss, share: int = 1) -> fx.Node:
    many, own = Emitter(loss.negative.scoring), Emitter(_positive(loss))
    w = many.w
    query = many.plain_query()
    for factor in loss.negative.learned:
        query = w.call(aten.mul.Tensor, query, factor)
    negative = many.operand()
    offsets = _offsets(many, value_of(loss.negative.scoring.product.node).device, share)
    each = w.call(aten.mul.Tensor, offsets, many.size(loss.negative.scoring.negatives[0]))
    ids: list[Any] = [None, None]
    if loss.negative.hits is not None:
        compared = _compared(loss.negative)
        assert compared is not None
        ids = [w.call(aten.reshape.default, x, [-1]) for x in compared]
    elif share > 1:
        ids = [Emitter(loss.positive.scoring).ids(), w.call(aten.reshape.default, many.ids(), [-1])]
    both = w.call(
        ops.sampled_softmax.default, query, own.operand(), negative, offsets, each, *ids, None, loss.negative.scale
    )
    losses = w.call(operator.getitem, both, 0)
    if loss.reduction != NONE:
        return w.call(aten.mean.default if loss.reduction == MEAN else aten.sum.default, losses)
    losses = w.call(aten.neg.default, losses) if loss.sign < 0 else losses
    shape = list(value_of(loss.node).shape)
    return losses if len(shape) == 1 else w.call(aten.reshape.default, losses, _shape(shape, many))


def _shape(shape: list[Any], many: Emitter) -> list[Any]:
    """One size may be left open, others are those of positions."""
    unknown = [i for i, s in enumerate(shape) if not isinstance(s, int)]
    names = [n for n in many.s.positions if not isinstance(many.known(n), int)]
    if len(unknown) == 1:
        return [-1 if i in unknown else s for i, s in enumerate(shape)]
    left = iter(names)
    return [many.size(next(left)) if i in unknown else s for i, s in enumerate(shape)]


def _offsets(many: Emitter, device: torch.device, share: int) -> fx.Node:
    """Where groups of positions begin, and the number of positions: 0, 1, 2, ... where each is a group."""
    w, count = many.w, many.count(many.s.positions)
    if share == 1:
        return w.range(w.plus(count, 1), device)
    rounded = w.plus(count, share - 1)
    groups = rounded // share if isinstance(rounded, int) else w.call(operator.floordiv, rounded, share)
    first = w.call(aten.mul.Tensor, w.range(w.plus(groups, 1), device), share)
    return w.call(aten.clamp.default, first, None, count)
