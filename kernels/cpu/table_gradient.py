"""Gradient of a table from slopes of products with its rows, in C++."""

from __future__ import annotations

import ctypes

from torch import Tensor

from .call import TYPES, Arguments, address, call, fields
from .rows import along_first, threads_for


class TableGradientArguments(Arguments):
    _fields_ = fields(
        "slopes own_slopes query table ids own_ids result",
        "positions each depth stride limit group type threads",
        "eps",
    )


def table_gradient(
    library: ctypes.CDLL, slopes: Tensor, own_slopes: Tensor | None, query: Tensor, table: Tensor, ids: Tensor,
    own_ids: Tensor | None, group: int, eps: float,
) -> Tensor:  # fmt: skip
    """Slopes and query are in the precision of sums."""
    result = table.new_empty(table.shape)
    rows = along_first(table)
    slopes, query, ids = slopes.contiguous(), query.contiguous(), ids.contiguous()
    own_slopes = None if own_slopes is None else own_slopes.contiguous()
    own_ids = None if own_ids is None else own_ids.contiguous()
    arguments = TableGradientArguments(
        *map(address, (slopes, own_slopes, query, rows.tensor, ids, own_ids, result)),
        *ids.shape,
        rows.width,
        rows.stride,
        rows.length,
        group,
        TYPES[table.dtype],
        threads_for(table.numel() + slopes.numel() * rows.width),
        eps,
    )
    call(library.turbogr_table_gradient, arguments)
    return result
