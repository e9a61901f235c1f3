"""From the logits of a loss back to the scores they are made of: factors, views, and masked hits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ...graph.nodes import PLACES_OF, tensor
from ...graph.shapes import same_size
from ...rules.pattern import arguments
from ..common.cross_entropy import _order, value_of
from .find import Found
from .norms import number_of
from .scoring import Scoring

aten, ops = torch.ops.aten, torch.ops.turbogr
_VIEWS = {
    aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default, aten.clone.default, aten.contiguous.default,
}  # fmt: skip


@dataclass(frozen=True)
class Hits:
    """Negatives that are the positive get this value."""

    mask: fx.Node
    value: float


@dataclass(frozen=True)
class Logits:
    """scale · scores, row by row as the scoring has them."""

    scoring: Scoring
    nodes: tuple[fx.Node, ...]  # from the scores on
    scale: float = 1.0
    learned: tuple[fx.Node, ...] = ()
    hits: Hits | None = None

    def times(self, factor: float) -> Logits:
        hits = None if self.hits is None else replace(self.hits, value=self.hits.value * factor)
        return self if factor == 1.0 else replace(self, scale=self.scale * factor, hits=hits)

    @property
    def whole_scale(self) -> float:
        return self.scale * (1.0 if self.scoring.rows is None else self.scoring.rows.scale)

    @property
    def factors(self) -> tuple[fx.Node, ...]:
        """In an order of their own: one that occurs twice is squared."""
        return tuple(sorted((*self.learned, *(() if self.scoring.rows is None else self.scoring.rows.learned))))


def logits_of(node: Any, found: Found) -> Logits | None:
    """None where these are not scores, or something else happens to them."""
    if tensor(node) is None:
        return None
    scoring = found.per_position.get(node) or found.single.get(node)
    if scoring is not None:
        return Logits(scoring, (node,)) if scoring.in_order else None
    if keeps_order(node):
        return _more(logits_of(node.args[0], found), node)
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        return _scaled(node, found)
    return _masked(node, found)


def _more(inner: Logits | None, node: fx.Node) -> Logits | None:
    return None if inner is None else replace(inner, nodes=(*inner.nodes, node))


def keeps_order(node: fx.Node) -> bool:
    """Shows the same numbers in the same order."""
    if node.target in _VIEWS:
        return True
    if node.target not in (aten.transpose.int, aten.permute.default):
        return False
    shape = value_of(node.args[0]).shape
    order = [d for d in _order(node) if not same_size(shape[d], 1)]
    return order == sorted(order)


def _scaled(node: fx.Node, found: Found) -> Logits | None:
    divides = node.target is aten.div.Tensor
    for x, by in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        number = number_of(by)
        learned = tensor(by) is not None and value_of(by).dim() == 0 and value_of(by).is_floating_point()
        if tensor(x) is not None and (number is not None or (learned and not divides)):
            inner = _more(logits_of(x, found), node)
            if inner is not None:
                return _times(inner, by, number, divides)
        if divides:
            break
    return None


def _times(inner: Logits, by: Any, number: float | None, divides: bool) -> Logits | None:
    if number is None:
        return replace(inner, learned=(*inner.learned, by)) if inner.hits is None else None
    if number == 0:
        return None
    return inner.times(1.0 / number if divides else number)


def scaled_by(node: fx.Node) -> float | None:
    """The number by which a node multiplies its first argument."""
    if node.target not in (aten.mul.Tensor, aten.div.Tensor) or tensor(node.args[0]) is None:
        return None
    number = number_of(node.args[1])
    if number is None or number == 0:
        return None
    return 1.0 / number if node.target is aten.div.Tensor else number


def _masked(node: fx.Node, found: Found) -> Logits | None:
    a = arguments(node)
    if node.target in (aten.where.ScalarSelf, aten.where.self):
        mask, value, x = a["condition"], a["self"], a["other"]
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        mask, value, x = a["mask"], a["value"], a["self"]
    elif node.target is aten.index_put.default and len(a["indices"]) == 1 and not a["accumulate"]:
        mask, value, x = a["indices"][0], a["values"], a["self"]
    else:
        return None
    number = number_of(value)
    inner = _more(logits_of(x, found), node)
    if number is None or inner is None or inner.hits is not None or value_of(mask).dtype != torch.bool:
        return None
    # A mask that broadcasts to more than the scores would change their shape.
    if value_of(node).dim() != value_of(x).dim() or math.isnan(number):
        return None
    return replace(inner, hits=Hits(mask, number))


def ids_of(s: Scoring) -> fx.Node | None:
    """The tensor of ids, where it is used as it is; of places among rows that were fetched, the ids fetched for."""
    if s.rows is None or len(s.rows.lookups) != 1:
        return None
    lookup = s.rows.lookups[0]
    index: Any = lookup.args[2 if lookup.target is aten.index_select.default else 1]
    ids = index[0] if isinstance(index, (list, tuple)) else index
    return ids.meta.get(PLACES_OF, ids)


# --- is this the same tensor? ------------------------------------------------------------------------


def root(node: Any) -> Any:
    """What a node shows the numbers of, in their order."""
    while isinstance(node, fx.Node) and node.op == "call_function" and _shows(node):
        node = node.args[0]
    return node


def _shows(node: fx.Node) -> bool:
    source = tensor(node.args[0]) if node.args else None
    if source is None or tensor(node) is None:
        return False
    if keeps_order(node):
        return True
    if node.target is aten._to_copy.default:
        return not source.is_floating_point() and value_of(node).dtype == torch.int64
    return False


def same(a: Any, b: Any, depth: int = 6) -> bool:
    """Surely the same numbers in the same order, dims of one aside."""
    a, b = root(a), root(b)
    if a is b:
        return True
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or depth == 0:
        return bool(type(a) is type(b) and not isinstance(a, fx.Node) and a == b)
    alike = a.op == b.op == "call_function" and a.target is b.target and not a.is_impure()
    if not alike or len(a.args) != len(b.args) or a.kwargs or b.kwargs or value_of_dim(a) != value_of_dim(b):
        return False
    return all(same(p, q, depth - 1) for p, q in zip(a.args, b.args, strict=True))


def value_of_dim(node: fx.Node) -> int:
    value = tensor(node)
    return -1 if value is None else value.dim()
