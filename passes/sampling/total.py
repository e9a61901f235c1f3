"""Losses that are added up, as one op: when that is exact, and writing it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from ..common.cross_entropy import SIZE, Refused, Total, value_of
from .emit import Emitter, may_pad
from .logits import Logits, ids_of, root, same
from .losses import SampledLoss
from .products import SUMMED
from .scoring import Scoring

aten, ops = torch.ops.aten, torch.ops.turbogr
_KEEPS_ZERO = (
    aten._to_copy.default,
    aten.reshape.default,
    aten.squeeze.dim,
    aten.unsqueeze.default,
    aten.detach.default,
)
_PRODUCTS = (aten.mul.Tensor, aten.bitwise_and.Tensor, aten.logical_and.default)


def _require(condition: bool, id: str, text: str, node: fx.Node, hint: str = "") -> None:
    if not condition:
        raise Refused(id, text, node, hint)


def check(loss: SampledLoss, total: Total | None) -> Total:
    """The sum, if the op computes just that; else the reason why scores are all that is fused."""
    node, own, many = loss.node, loss.positive, loss.negative
    text = "the loss of each position is used, not only their sum"
    _require(total is not None, "sampling-of-rows", text, node, "add the losses up with sum() or mean()")
    assert total is not None
    _require(
        own.scoring.rows is not None, "sampling-positive", "positives are not looked up in this graph", node,
        "look them up by their ids in the compiled function",
    )  # fmt: skip
    _check_alike(own, many, node)
    if many.hits is not None:
        _require(
            is_hit_mask(many.hits.mask, ids_of(own.scoring), ids_of(many.scoring)), "sampling-mask",
            "logits are masked by something else than negatives that are the positive", many.hits.mask,
        )  # fmt: skip
    _check_padding(loss, total)
    check_readers(loss)
    return total


def _check_alike(own: Logits, many: Logits, node: fx.Node) -> None:
    assert own.scoring.rows is not None and many.scoring.rows is not None
    mine, theirs = own.scoring.rows, many.scoring.rows
    tables = [(t.node, t.eps, t.detached) for t in (mine.table, theirs.table)]
    text = "positives and negatives come from different tables, or are normalised differently"
    _require(tables[0] == tables[1], "sampling-positive", text, node)
    _require(not mine.factors and not theirs.factors, "sampling-positive", "rows have factors of their own", node)
    text = "positives and negatives are scored with different queries"
    _require(have_one_query(own.scoring, many.scoring), "sampling-positive", text, node)
    equal = own.factors == many.factors and math.isclose(own.whole_scale, many.whole_scale, rel_tol=1e-12)
    equal = equal and own.scoring.product.eps == many.scoring.product.eps
    _require(equal, "sampling-positive", "scores of positives and of negatives have different factors", node)


def have_one_query(a: Scoring, b: Scoring) -> bool:
    """The same numbers, cut into the same vectors."""
    return query_of(a) is query_of(b) and all([n for n in s.of_query if n][-1] == SUMMED for s in (a, b))


def query_of(s: Scoring) -> fx.Node:
    at = root(s.product.operands[0])
    while at.target in (aten.expand.default, aten.repeat.default):
        at = root(at.args[0])
    return at


def is_hit_mask(mask: fx.Node, own: fx.Node | None, many: fx.Node | None) -> bool:
    """positive ids == ids of negatives."""
    mask = root(mask)
    if mask.target is not aten.eq.Tensor or own is None or many is None:
        return False
    # Each id of a positive stands before all negatives of its position.
    return any(same(a, own) and same(b, many) and _is_column(a) for a, b in (mask.args[:2], mask.args[1::-1]))


def _is_column(node: Any) -> bool:
    value = tensor(node)
    return value is not None and value.dim() > 1 and isinstance(value.shape[-1], int) and value.shape[-1] == 1


def _check_padding(loss: SampledLoss, total: Total) -> None:
    own, many = loss.positive.scoring.rows, loss.negative.scoring.rows
    assert own is not None and many is not None
    hint = "draw negatives with randint(padding_idx + 1, ...), and weigh positions by (ids != padding_idx)"
    text = "ids may name padding_idx, a row that must get no gradient"
    _require(not may_pad(many), "sampling-padding", text, loss.node, hint)
    never = not may_pad(own) or vanishes(total.share, ids_of(loss.positive.scoring), own.table.padding)
    _require(never, "sampling-padding", text, loss.node, hint)


def vanishes(weights: Any, ids: Any, padding: int) -> bool:
    """Is the weight zero wherever the id is the padding?"""
    if not isinstance(weights, fx.Node) or weights.op != "call_function":
        return False
    target, ids = weights.target, root(ids)
    if target in _KEEPS_ZERO:
        return vanishes(weights.args[0], ids, padding)
    if target in _PRODUCTS:
        return any(vanishes(x, ids, padding) for x in weights.args[:2])
    if target is aten.ne.Scalar or (target is aten.gt.Scalar and padding == 0):
        return bool(weights.args[1] == padding) and same(weights.args[0], ids)
    if target in (ops.gather_rows.default, aten.slice.Tensor, aten.select.int, aten.index_select.default):
        alike = isinstance(ids, fx.Node) and ids.target is target and weights.args[1:] == ids.args[1:]
        return bool(alike) and vanishes(weights.args[0], ids.args[0], padding)
    return False


def check_readers(loss: SampledLoss) -> None:
    members = {*loss.nodes, *loss.positive.scoring.nodes, *loss.negative.scoring.nodes}
    for node in loss.nodes:
        readers = [u for u in node.users if u not in members and u.target is not SIZE]
        text = f"%{node.name} is read by something else than the loss"
        _require(node is loss.node or not readers, "sampling-read-elsewhere", text, node)


# --- writing it --------------------------------------------------------------------------------------


def emit_total(loss: SampledLoss, total: Total, group: int = 1, half: bool = False) -> fx.Node:
    many = Emitter(loss.negative.scoring)
    w = many.w
    query = many.plain_query()
    for factor in (*loss.negative.learned, *many.rows.learned):
        query = w.call(aten.mul.Tensor, query, factor)
    dtype = value_of(loss.negative.scoring.product.node).dtype
    share = total.share
    if share is not None:
        share = share if value_of(share).dim() == 1 else w.call(aten.reshape.default, share, [-1])
        if not value_of(total.share).is_floating_point():
            share = w.call(aten._to_copy.default, share, dtype=dtype)
    ids = many.ids()
    each = many.size(loss.negative.scoring.negatives[0])
    if loss.together:
        own_ids, ids = w.call(aten.select.int, ids, 1, 0), w.call(aten.slice.Tensor, ids, 1, 1)
        each = w.plus(each, -1)
    else:
        own_ids = Emitter(loss.positive.scoring).ids()
    result = w.call(
        ops.sampled_loss_total.default, query, many.table(), own_ids, ids, share,
        loss.negative.whole_scale, many.rows.table.eps, hit_value(loss.negative, group), group, loss.kind,
        *(many.halves(ids, each) if half else ()),
    )  # fmt: skip
    if total.mean or total.over_all:
        result = w.call(aten.div.Tensor, result, _count(loss, many))
    return w.call(aten.neg.default, result) if total.sign < 0 else result


def _count(loss: SampledLoss, many: Emitter) -> Any:
    """Positions, or all their logits."""
    count = many.count(loss.negative.scoring.positions)
    if not loss.of_logits:
        return count
    each = many.size(loss.negative.scoring.negatives[0])
    return many.w.times(count, each if loss.together else many.w.plus(each, 1))


def hit_value(many: Logits, group: int) -> float:
    """The logit of a negative that is the positive: that of the loss; shared negatives are left out in any case."""
    if many.hits is not None:
        return many.hits.value
    return -math.inf if group > 1 else math.nan
