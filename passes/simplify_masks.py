"""Say what a mask does once."""

from __future__ import annotations

from ..graph.phases import Phase
from ..rules.rule import RuleSet

simplify_masks = RuleSet(
    "simplify-masks",
    phase=Phase.PRE_GRAD,
    doc="Say what a mask does once: no double negation, no row zeroed twice.",
    after=("remove-noops", "fold-views", "eliminate-common"),
)


@simplify_masks.rule(inputs="bool")
def not_not(m):
    return ~~m


@not_not.replace
def _(m):
    return m


@simplify_masks.rule(inputs="any, any")
def not_equal(a, b):
    """`~(a == b)` is one comparison."""
    return ~(a == b)


@not_equal.replace
def _(a, b):
    return a != b


@simplify_masks.rule(inputs="int")
def not_this_id(ids, *, value: int):
    """`~(ids == 0)` is one comparison."""
    return ~(ids == value)


@not_this_id.replace
def _(ids, *, value):
    return ids != value


@simplify_masks.rule(inputs="float, bool")
def zeroed_twice(x, m):
    """A bool mask is 0 or 1: multiplying by it again changes nothing, not even nan or infinity."""
    return x * m * m


@zeroed_twice.replace
def _(x, m):
    return x * m
