"""Reading binary cross-entropies of a positive and its negatives, in any spelling that means just that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from ...graph.shapes import same_size
from ...rules.pattern import arguments
from ..common.cross_entropy import NONE, value_of
from .filled import filled_with, fillers
from .find import Found
from .logits import Logits, keeps_order, logits_of
from .losses import SampledLoss, are_pair, as_many, loss_of, pair_of

aten = torch.ops.aten


def sum_of_terms(node: fx.Node, found: Found) -> SampledLoss | None:
    """softplus(-positive) + softplus(negatives).sum(-1), also as logarithms of sigmoids."""
    a = arguments(node)
    if a["alpha"] != 1 or not as_many(node, a["self"], a["other"]):
        return None
    flip = -1.0 if node.target is aten.sub.Tensor else 1.0
    first, second = _term(a["self"], found), _term(a["other"], found)
    if first is None or second is None:
        return None
    second = (second[0] * flip, *second[1:])
    own, many = (first, second) if not first[2].scoring.negatives else (second, first)
    if own[0] != many[0] or own[1] != -1.0 or many[1] != 1.0 or not are_pair(own[2], many[2]):
        return None
    pair = (own[2], many[2], (*own[3], *many[3]), 0)
    return loss_of("bce", pair, node, (), own[0])


def _term(node: Any, found: Found) -> tuple[float, float, Logits, tuple[fx.Node, ...]] | None:
    """coefficient · softplus(sign · logits), summed over negatives: coefficient, sign, logits, nodes."""
    if tensor(node) is None:
        return None
    nodes, coefficient, summed = [node], 1.0, False
    while True:
        if node.target is aten.neg.default:
            coefficient = -coefficient
        elif node.target is aten.sum.dim_IntList and not summed:
            if arguments(node)["dim"] != [value_of(node.args[0]).dim() - 1] or arguments(node)["dtype"]:
                return None
            summed = not same_size(value_of(node.args[0]).shape[-1], 1)
        elif not keeps_order(node):
            break
        node = node.args[0]
        nodes.append(node)
    bent = _softplus(node)
    if bent is None:
        return None
    sign, inner = bent[1], bent[2]
    while inner.target is aten.neg.default:
        nodes.append(inner)
        sign, inner = -sign, inner.args[0]
    logits = logits_of(inner, found)
    if logits is None or bool(logits.scoring.negatives) != summed:
        return None
    return coefficient * bent[0], sign, logits, (*nodes, *bent[3], *logits.nodes)


def by_labels(node: fx.Node, found: Found) -> SampledLoss | None:
    """binary_cross_entropy_with_logits(cat([positive, negatives]), cat([ones, zeros])), added up."""
    a = arguments(node)
    pair, labels = pair_of(a["self"], found), a["target"]
    if pair is None or a["weight"] is not None or a["pos_weight"] is not None or a["reduction"] == NONE:
        return None
    if labels.target is not aten.cat.default or arguments(labels)["dim"] != value_of(labels).dim() - 1:
        return None
    parts = [filled_with(x) for x in labels.args[0]]
    wanted = [1.0, 0.0] if pair[3] == 0 else [0.0, 1.0]
    if parts != wanted or not same_size(value_of(labels.args[0][pair[3]]).shape[-1], 1):
        return None
    return replace(loss_of("bce", pair, node, fillers(labels), 1.0, a["reduction"]), of_logits=True)


def _softplus(node: Any) -> tuple[float, float, Any, tuple[fx.Node, ...]] | None:
    """coefficient · softplus(sign · x): coefficient, sign, x, and constants on the way."""
    a = arguments(node) if node.op == "call_function" else {}
    if node.target is aten.softplus.default and a["beta"] == 1 and a["threshold"] >= 20:
        return 1.0, 1.0, a["self"], ()
    if node.target is aten.log_sigmoid.default:
        return -1.0, -1.0, a["self"], ()
    if node.target is aten.binary_cross_entropy_with_logits.default:
        label = filled_with(a["target"])
        if label in (0.0, 1.0) and a["weight"] is None and a["pos_weight"] is None and a["reduction"] == NONE:
            return 1.0, -1.0 if label == 1.0 else 1.0, a["self"], fillers(a["target"])
    return None
