"""Cancel views that undo each other."""

from __future__ import annotations

from ..graph.phases import Phase
from ..rules.rule import RuleSet

fold_views = RuleSet(
    "fold-views",
    phase=Phase.PRE_GRAD,
    doc="Cancel views that undo each other.",
    after=("remove-noops",),
)


@fold_views.rule()
def transpose_twice(x, *, a: int, b: int):
    return x.transpose(a, b).transpose(a, b)


@transpose_twice.replace
def _(x, *, a, b):
    return x


@fold_views.rule()
def unsqueeze_squeeze(x, *, dim: int):
    return x.unsqueeze(dim).squeeze(dim)


@unsqueeze_squeeze.replace
def _(x, *, dim):
    return x
