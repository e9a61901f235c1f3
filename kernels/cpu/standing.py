"""Where products of rows stand among each other, in C++."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .call import Arguments, address, call, fields
from .rows import along_first, threads_for


class StandingArguments(Arguments):
    _fields_ = fields("queries rows own skip above equal", "count depth query_stride total row_stride threads")


def own_products(library: ctypes.CDLL, queries: Tensor, rows: Tensor) -> Tensor:
    own = queries.new_empty(queries.shape[0])
    call(library.turbogr_own_products, _arguments(queries, rows, own, None, None, None))
    return own


def standing(library: ctypes.CDLL, queries: Tensor, rows: Tensor, own: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    above, equal = (torch.zeros(queries.shape[0], dtype=torch.int64) for _ in range(2))
    call(library.turbogr_standing, _arguments(queries, rows, own.contiguous(), skip.contiguous(), above, equal))
    return above, equal


def _arguments(
    queries: Tensor, rows: Tensor, own: Tensor, skip: Tensor | None, above: Tensor | None, equal: Tensor | None
) -> StandingArguments:
    asked, held = along_first(queries), along_first(rows)
    return StandingArguments(
        asked.start,
        held.start,
        *map(address, (own, skip, above, equal)),
        asked.length,
        asked.width,
        asked.stride,
        held.length,
        held.stride,
        threads_for(asked.length * held.length),
    )
