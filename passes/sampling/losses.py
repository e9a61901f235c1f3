"""The loss of sampled negatives, and the logits it is made of: those of a positive and of its negatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from ...graph.shapes import same_size
from ...rules.pattern import arguments
from ..common.cross_entropy import NONE, Loss, Total, total_of, value_of
from .find import Found
from .logits import Logits, ids_of, keeps_order, logits_of, scaled_by

aten = torch.ops.aten


@dataclass(frozen=True)
class SampledLoss:
    """A loss for each position: of its positive against its negatives."""

    kind: str  # softmax, bce
    positive: Logits
    negative: Logits
    node: fx.Node  # the losses, in the order of positions, or their sum or mean
    nodes: tuple[fx.Node, ...]  # what computes them from the scores on, with these
    sign: float = 1.0
    reduction: int = NONE
    of_logits: bool = False  # a mean is that of all logits, not of positions

    @property
    def together(self) -> bool:
        """Are positive and negatives scored together, the positive first?"""
        return self.positive is self.negative

    def total(self) -> Total | None:
        """Where they are added up, if they are."""
        stand_in = Loss(self.node, (), self.node, 0, self.node, reduction=self.reduction, sign=self.sign)
        return total_of(stand_in)


Pair = tuple[Logits, Logits, tuple[fx.Node, ...], int]  # positive, negatives, nodes, place of the positive


def loss_of(
    kind: str, pair: Pair, node: fx.Node, more: tuple[Any, ...], sign: float, reduction: int = NONE
) -> SampledLoss:
    positive, negative, nodes, _ = pair
    return SampledLoss(kind, positive, negative, node, tuple(dict.fromkeys((node, *more, *nodes))), sign, reduction)


# --- positive and negatives side by side ---------------------------------------------------------------


def pair_of(node: Any, found: Found) -> Pair | None:
    """cat([positive, negatives]) along the last dim, or the other way round."""
    if tensor(node) is None:
        return None
    nodes, scale = [node], 1.0
    while node.target is not aten.cat.default:
        factor = scaled_by(node)
        if factor is None and not keeps_order(node):
            return _together(node, nodes[:-1], scale, found)
        if not same_size(value_of(node).shape[-1], value_of(node.args[0]).shape[-1]):
            return _together(node, nodes[:-1], scale, found)
        scale *= 1.0 if factor is None else factor
        node = node.args[0]
        nodes.append(node)
    a = arguments(node)
    if a["dim"] != value_of(node).dim() - 1 or len(a["tensors"]) != 2:
        return None
    parts = [logits_of(x, found) for x in a["tensors"]]
    parts = [None if p is None else p.times(scale) for p in parts]
    for own, place in ((0, 0), (1, -1)):
        positive, negative = parts[own], parts[1 - own]
        if positive is None or negative is None or not are_pair(positive, negative):
            continue
        if same_size(value_of(a["tensors"][own]).shape[-1], 1):
            return positive, negative, (*nodes, *positive.nodes, *negative.nodes), place
    return None


def _together(node: fx.Node, nodes: list[fx.Node], scale: float, found: Found) -> Pair | None:
    """Scores of ids that were put side by side: the first is the positive's."""
    logits = logits_of(node, found)
    if logits is None or logits.hits is not None or len(logits.scoring.negatives) != 1:
        return None
    ids = ids_of(logits.scoring)
    if ids is None or ids.target is not aten.cat.default or len(ids.args[0]) != 2:  # type: ignore[arg-type]
        return None
    first = value_of(ids.args[0][0]).shape[-1]  # type: ignore[index]
    if arguments(ids)["dim"] != value_of(ids).dim() - 1 or not same_size(first, 1):
        return None
    logits = logits.times(scale)
    return logits, logits, (*nodes, *logits.nodes), 0


def are_pair(positive: Logits, negative: Logits) -> bool:
    return not positive.scoring.negatives and len(negative.scoring.negatives) == 1 and positive.hits is None


def as_many(*nodes: Any) -> bool:
    """Do all have the same number of entries? Then nothing was repeated to fit."""
    values = [tensor(n) for n in nodes]
    first = values[0]
    return first is not None and all(v is not None and same_size(v.numel(), first.numel()) for v in values)
