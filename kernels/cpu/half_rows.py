"""Rows narrowed to 16 bits in C++."""

from __future__ import annotations

import ctypes

from torch import Tensor

from .call import Arguments, address, call, fields
from .rows import along_first, threads_for


class HalfRowsArguments(Arguments):
    _fields_ = fields("rows places offsets segments halves scales", "entries depth stride block count threads")


def narrow(
    library: ctypes.CDLL, table: Tensor, ids: Tensor | None, offsets: Tensor | None, block: int,
    half: Tensor, scales: Tensor, segments: Tensor | None = None,
) -> None:  # fmt: skip
    """Fills `half` and `scales`, which are contiguous; segments that are not asked for stay as they are."""
    rows = along_first(table)
    ids, offsets, segments = (None if x is None else x.contiguous() for x in (ids, offsets, segments))
    arguments = HalfRowsArguments(
        rows.start,
        *map(address, (ids, offsets, segments, half, scales)),
        half.shape[0],
        rows.width,
        rows.stride,
        block,
        (scales if segments is None else segments).shape[0],
        threads_for(half.numel()),
    )
    call(library.turbogr_half_rows, arguments)
