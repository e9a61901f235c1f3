"""What is said of a scoring: how ids are drawn, and its costs as formulas and as numbers at the sizes seen."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import fx

from ...graph.costs import at_hints, formula, human
from ...pipeline.context import Context
from ..common.cross_entropy import value_of
from . import META
from .drawing import Drawing, drawing_of
from .emit import leaf_ids
from .logits import keeps_order
from .scoring import Scoring

aten = torch.ops.aten
_COMPARISONS = (aten.eq.Tensor, aten.ne.Tensor)


def drawn(s: Scoring) -> Drawing:
    """Of the ids that negatives are looked up by; the most telling of several."""
    if s.rows is None:
        return Drawing("batch", s.product.operands[1])
    found = [drawing_of(x) for x in leaf_ids(s.rows)]
    return next((d for d in found if d.kind not in ("given", "computed")), found[-1])


def masks_hits(node: fx.Node, depth: int = 4) -> bool:
    """Are these ids compared with others?"""
    for user in node.users:
        if user.target in _COMPARISONS:
            return True
        looks_on = keeps_order(user) or user.target in (aten.expand.default, aten.slice.Tensor)
        if looks_on and depth and masks_hits(user, depth - 1):
            return True
    return False


def mark(s: Scoring) -> None:
    """Leave a word at the ids for passes that come later."""
    if s.rows is None:
        return
    _, each, _ = s.counts
    for node in leaf_ids(s.rows):
        found = drawing_of(node)
        node.meta[META] = {
            "drawn": found.kind, "draws": found.node.name, "per": "shared" if s.sharing else "position",
            "count": int(each) if each.is_number else None, "low": found.low, "high": found.high,
            "hits": masks_hits(node),
        }  # fmt: skip


def told(s: Scoring, graph: fx.Graph) -> str:
    """'512 negatives per position, drawn uniformly in the graph, hits masked'."""
    queries, each, _ = s.counts
    found = drawn(s)
    many = _count(each, graph)
    who = "shared by" if s.sharing else "each for"
    word = "rows" if found.kind in ("given", "computed") else "negatives"
    parts = [f"{many} {word} {who} {_count(queries, graph)} positions", found.text]
    if s.rows is not None and any(masks_hits(x) for x in leaf_ids(s.rows)):
        parts.append("hits masked")
    return ", ".join(parts)


def _count(expr: Any, graph: fx.Graph) -> str:
    """512, or u0 (260 in the batch seen)."""
    seen = at_hints(expr, graph)
    return str(expr) if expr.is_number or seen is None else f"{formula(expr)} ({int(seen)} in the batch seen)"


def costs(s: Scoring, graph: fx.Graph, ctx: Context, share: int = 1) -> str:
    """Memory between forward and backward, and FLOPs of both; `share` positions have their negatives together."""
    queries, each, width = s.counts
    item = value_of(s.product.node).element_size()
    # Rows are stored, once more where they are normalised, and once more where pairs are multiplied one by one.
    copies = 1 + (s.rows is not None and s.rows.table.eps >= 0) + s.product.stores_pairs
    before = copies * queries * each * width * item
    after = share * queries * each * item if not s.sharing else (each * width + queries * each) * item
    ctx.saved(bytes=before - after)
    flops = 6 * share * queries * each * width
    return (
        f"memory {cost(before, graph, 'B')} → {cost(after, graph, 'B')}; "
        f"forward and backward {cost(flops, graph, 'FLOP')}"
    )


def cost(expr: sympy.Expr, graph: fx.Graph, unit: str) -> str:
    value = human(at_hints(expr, graph), unit)
    return value if expr.is_number else f"{formula(expr)} = {value}"
