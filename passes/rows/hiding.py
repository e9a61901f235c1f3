"""Rows that `masked_fill` and `where` never show: whatever they hold, another value stands in their place."""

from __future__ import annotations

from typing import Any

from torch import fx

from .calls import is_tensor, op
from .meaning import Holds, Predicate, Two
from .meanings import Meanings


def shown(n: fx.Node, meanings: Meanings) -> list[tuple[Any, frozenset[Predicate]]]:
    """Each operand that is chosen from, and predicates that hold wherever it is chosen."""
    if op(n) == "masked_fill":
        choices, mask = [(n.args[0], False)], n.args[1]
    elif op(n) == "where" and len(n.args) == 3:
        choices, mask = [(n.args[1], True), (n.args[2], False)], n.args[0]
    else:
        return []
    two = meanings.two(mask) if is_tensor(mask) else None
    return [(x, _where(two, chosen)) for x, chosen in choices]


def _where(two: Two | None, wanted: bool) -> frozenset[Predicate]:
    """Predicates that hold wherever a mask is as wanted."""
    kept = two.with_yes(lambda yes, no: bool(yes) is wanted and bool(no) is not wanted) if two is not None else None
    literals = kept.literals if kept is not None else frozenset()
    return frozenset(k.predicate for k in literals if isinstance(k, Holds))
