"""Reading a softmax over a positive and its negatives, in any spelling that means just that."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from ...graph.shapes import same_size
from ...rules.pattern import arguments
from ..common.cross_entropy import value_of
from .filled import filled_with, fillers
from .find import Found
from .logits import Logits, keeps_order, logits_of
from .losses import Pair, SampledLoss, are_pair, as_many, loss_of, pair_of

aten = torch.ops.aten


def picked(node: fx.Node, found: Found) -> SampledLoss | None:
    """log_softmax(...)[..., 0]: minus the losses."""
    a = arguments(node)
    source, dim = a["self"], a["dim"]
    pair = _log_softmax(source, found)
    if pair is None or dim != value_of(source).dim() - 1:
        return None
    return None if _place(node) != pair[3] else loss_of("softmax", pair, node, (source,), -1.0)


def _log_softmax(node: Any, found: Found) -> Pair | None:
    """Log-probabilities, perhaps with positions in other dims."""
    nodes: list[fx.Node] = []
    while isinstance(node, fx.Node) and keeps_order(node):
        if not same_size(value_of(node).shape[-1], value_of(node.args[0]).shape[-1]):
            return None
        nodes.append(node)
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.target is not aten.log_softmax.int:
        return None
    a = arguments(node)
    is_last = a["dim"] == value_of(node).dim() - 1
    same_type = value_of(node).dtype == value_of(a["self"]).dtype
    pair = pair_of(a["self"], found) if is_last and same_type else None
    return None if pair is None else (pair[0], pair[1], (*nodes, node, *pair[2]), pair[3])


def cross_entropy(node: fx.Node, found: Found) -> SampledLoss | None:
    a = arguments(node)
    logits, target = a["self"], a["target"]
    more: tuple[Any, ...] = ()
    if node.target is aten.nll_loss_nd.default:
        pair, more = _log_softmax(logits, found), (logits,)
    else:
        pair = pair_of(logits, found)
    if pair is None or value_of(logits).dim() != 2 or a["weight"] is not None or a.get("label_smoothing"):
        return None
    wanted = 0 if pair[3] == 0 else value_of(logits).shape[-1] - 1
    constant = filled_with(target)
    if constant is None or not isinstance(wanted, int) or constant != wanted or a["ignore_index"] == wanted:
        return None
    return loss_of("softmax", pair, node, (*more, *fillers(target)), 1.0, a["reduction"])


def difference(node: fx.Node, found: Found) -> SampledLoss | None:
    """logsumexp(...) - positive, or the other way round."""
    a = arguments(node)
    for log_sum, own, sign in ((a["self"], a["other"], 1.0), (a["other"], a["self"], -1.0)):
        if a["alpha"] != 1 or tensor(log_sum) is None or tensor(own) is None:
            continue
        nodes: list[fx.Node] = []
        while keeps_order(log_sum):
            nodes.append(log_sum)
            log_sum = log_sum.args[0]
        pair = _log_sum(log_sum, found)
        if pair is None:
            continue
        positive = logits_of(own, found) or _own_column(own, pair, found)
        if positive is None or positive.scoring is not pair[0].scoring or positive.scale != pair[0].scale:
            continue
        if pair[0] is pair[1] and positive.nodes[-1].target not in (aten.select.int, aten.slice.Tensor):
            continue
        if positive.hits is not None:
            continue  # in the sum it is none of them
        if positive.learned != pair[0].learned or not as_many(node, log_sum, own):
            continue
        return loss_of("softmax", pair, node, (*nodes, log_sum, *positive.nodes), sign)
    return None


def _own_column(node: Any, pair: Pair, found: Found) -> Logits | None:
    """The positive, picked from where it was put beside the negatives."""
    if isinstance(node, fx.Node) and node.target in (aten.select.int, aten.slice.Tensor):
        a = arguments(node)
        source, dim = a["self"], a["dim"]
        again = pair_of(source, found) if dim == value_of(source).dim() - 1 else None
        if again is not None and again == pair and _place(node) == pair[3]:
            return Logits(pair[0].scoring, (*pair[0].nodes, node), pair[0].scale, pair[0].learned)
    return None


def _log_sum(node: Any, found: Found) -> Pair | None:
    if not isinstance(node, fx.Node):
        return None
    if node.target is aten.logsumexp.default:
        return pair_of(node.args[0], found) if node.args[1] == [value_of(node.args[0]).dim() - 1] else None
    if node.target is aten.logaddexp.default:
        for own, rest in (node.args[:2], node.args[1::-1]):
            positive, inner = logits_of(own, found), rest
            while isinstance(inner, fx.Node) and keeps_order(inner):
                inner = inner.args[0]
            if positive is None or getattr(inner, "target", None) is not aten.logsumexp.default:
                continue
            many = inner.args[0]  # type: ignore[union-attr]
            negative = logits_of(many, found)
            last = inner.args[1] == [value_of(many).dim() - 1]  # type: ignore[union-attr]
            if negative is not None and last and are_pair(positive, negative) and as_many(node, own, rest):
                nodes = (rest, inner, *positive.nodes, *negative.nodes)
                return positive, negative, nodes, 0  # type: ignore[return-value]
    return None


def _place(node: fx.Node) -> int | None:
    """Which column select(-1, i) or [..., i:i + 1] takes: 0 for the first, -1 for the last."""
    a = arguments(node)
    width = value_of(node.args[0]).shape[-1]
    if node.target is aten.select.int:
        index = a["index"]
        return index if index in (0, -1) else (-1 if isinstance(width, int) and index == width - 1 else None)
    start, end = a["start"] or 0, a["end"]
    if a["step"] == 1 and start == 0 and end == 1:
        return 0
    last = start == -1 or (isinstance(width, int) and start == width - 1)
    return -1 if a["step"] == 1 and last and (end is None or end == width) else None
