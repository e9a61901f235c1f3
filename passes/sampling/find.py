"""Which products of a graph score looked-up rows, and which of them may stop storing these rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from ..common.cross_entropy import SIZE, Refused, value_of
from .scoring import Scoring, check_types, read_elsewhere, scorings_of


@dataclass
class Found:
    """Scorings by the node that holds their result."""

    per_position: dict[fx.Node, Scoring] = field(default_factory=dict)  # rows of its own for each query
    shared: dict[fx.Node, Scoring] = field(default_factory=dict)  # spelled as if each query had its own
    single: dict[fx.Node, Scoring] = field(default_factory=dict)  # one vector for each query: positives
    products: dict[fx.Node, Scoring] = field(default_factory=dict)  # shared rows, as a matrix product already


def find(graph: fx.Graph, missed: Callable[[Refused, fx.Node], None]) -> Found:
    """All scorings; `missed` is told of those that stay as they are, with the reason."""
    found = Found()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        try:
            for scoring in scorings_of(node):
                if _sort(scoring, found):
                    break
        except Refused as reason:
            missed(reason, node)
    _join_singles(found)
    _drop_read_elsewhere(found.per_position, missed)
    return found


def _join_singles(found: Found) -> None:
    """Positives that are looked up together with negatives are scored apart from them as well."""
    lookups = {n for s in found.per_position.values() if s.rows for n in s.rows.lookups}
    for node, s in found.single.items():
        if s.rows is not None and lookups & set(s.rows.lookups):
            found.per_position[node] = s


def _sort(s: Scoring, found: Found) -> bool:
    if s.per_position:
        check_types(s)
        found.per_position[s.product.node] = s
    elif s.positions and not s.negatives and not s.sharing:
        found.single[s.product.node] = s
        return s.rows is not None
    elif s.sharing and s.negatives and (s.product.stores_pairs or (s.spread and s.rows is not None)):
        if (s.rows is not None and s.rows.factors) or s.product.eps >= 0:
            return False
        check_types(s)
        if any(u is not s.product.node for u in s.product.nodes[0].users) and len(s.product.nodes) > 1:
            return False
        found.shared[s.product.node] = s
    elif s.sharing and s.negatives and s.rows is not None:
        found.products[s.product.node] = s
    else:
        return False
    return True


def _drop_read_elsewhere(scorings: dict[fx.Node, Scoring], missed: Callable[[Refused, fx.Node], None]) -> None:
    """Rows that something else reads are stored anyway; then their other scores gain nothing either."""
    while (held := _first_held(scorings)) is not None:
        scoring, node, readers = held
        del scorings[scoring.product.node]
        named = ", ".join("the caller" if u.op == "output" else f"%{u.name}" for u in readers)
        text = f"looked-up rows %{node.name} are read by {named} too, so they have to be stored"
        hint = "look them up a second time for the other use, if scores alone need not store them"
        missed(Refused("rows-used-elsewhere", text, node, hint), scoring.product.node)


def _first_held(scorings: dict[fx.Node, Scoring]) -> tuple[Scoring, fx.Node, list[fx.Node]] | None:
    members = {n for s in scorings.values() for n in s.nodes}
    for s in scorings.values():
        node = read_elsewhere(s, members)
        if node is not None:
            return s, node, [u for u in node.users if u not in members and u.target is not SIZE]
    return None


def move_sizes(s: Scoring) -> None:
    """Who asks rows for a size asks somebody who stays."""
    going = set(s.nodes)
    for node in s.nodes:
        for user in [u for u in node.users if u.target is SIZE]:
            size = user.meta.get("val")
            other = _who_has(size, user, going)
            if other is not None:
                user.args = other


def _who_has(size: object, before: fx.Node, going: set[fx.Node]) -> tuple[fx.Node, int] | None:
    wanted = str(size)
    for node in before.graph.nodes:
        if node is before:
            return None
        value = node.meta.get("val")
        if node in going or not hasattr(value, "shape"):
            continue
        for dim, found in enumerate(value_of(node).shape):
            if not isinstance(found, int) and str(found) == wanted:
                return node, dim
    return None
