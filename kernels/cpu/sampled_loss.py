"""Losses against sampled negatives in C++: one pass over looked-up rows, gradients included."""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING

from torch import Tensor

from .call import Arguments, address, call, fields
from .lookup import LOOKUP, Lookup
from .rows import threads_for

if TYPE_CHECKING:
    from ..sampled_loss import Inputs


class SampledLossArguments(Arguments):
    _fields_ = LOOKUP + fields(
        "query own own_ids ids weights loss total query_grad slopes own_slopes",
        "positions each group softmax masked threads",
        "scale hit",
    )


def sampled_loss(library: ctypes.CDLL, a: Inputs, own: Tensor, results: tuple[Tensor, ...], wanted: list[bool]) -> None:
    """Fills the results; `own` are rows of positives, in the precision of sums."""
    total, losses, query_grad, slopes, own_slopes = results
    lookup = Lookup(a.source, a.ids, a.eps)
    query, own, own_ids = (x.contiguous() for x in (a.query.to(a.real), own, a.positive_ids))
    weights = None if a.weights is None else a.weights.to(a.real).contiguous()
    arguments = SampledLossArguments(
        *lookup.fields,
        *map(address, (query, own, own_ids, lookup.ids, weights, losses, total)),
        address(query_grad if wanted[0] else None),
        *map(address, (slopes, own_slopes) if wanted[1] else (None, None)),
        *lookup.ids.shape,
        a.group,
        a.kind == "softmax",
        not math.isnan(a.hit_value),
        threads_for(lookup.ids.numel() * query.shape[1]),
        a.scale,
        a.hit_value,
    )
    call(library.turbogr_sampled_loss, arguments)
