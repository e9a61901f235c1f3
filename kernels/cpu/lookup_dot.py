"""Looked-up rows times queries in C++, and the gradient of the queries."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from torch import Tensor

from .call import Arguments, address, call, fields
from .lookup import LOOKUP, Lookup
from .rows import threads_for

if TYPE_CHECKING:
    from ..lookup import Source


class LookupDotArguments(Arguments):
    _fields_ = LOOKUP + fields("query ids scores query_grad", "positions each threads")


def scores(library: ctypes.CDLL, query: Tensor, source: Source, ids: Tensor, eps: float) -> Tensor:
    result = query.new_empty(ids.shape)
    _run(library, query.contiguous(), Lookup(source, ids, eps), result, None)
    return result


def query_gradient(
    library: ctypes.CDLL, slopes: Tensor, query: Tensor, source: Source, ids: Tensor, eps: float
) -> Tensor:
    result = query.new_empty(query.shape)
    _run(library, query, Lookup(source, ids, eps), slopes.contiguous(), result)
    return result


def _run(library: ctypes.CDLL, query: Tensor, lookup: Lookup, scores: Tensor, query_grad: Tensor | None) -> None:
    arguments = LookupDotArguments(
        *lookup.fields,
        address(query),
        address(lookup.ids),
        address(scores),
        address(query_grad),
        *lookup.ids.shape,
        threads_for(lookup.ids.numel() * query.shape[1]),
    )
    call(library.turbogr_lookup_dot, arguments)
