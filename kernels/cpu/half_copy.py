"""A copy in 16 bits that follows its table, in C++."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .call import Arguments, address, call, fields
from .rows import along_first, threads_for


class HalfCopyArguments(Arguments):
    _fields_ = fields("table rows halves scales sizes changed", "total depth stride block count threads")


def follow(
    library: ctypes.CDLL, table: Tensor, rows: Tensor | None, block: int, half: Tensor, scales: Tensor, sizes: Tensor
) -> None:
    """In place; the copy and what is known of it are contiguous."""
    held, rows = along_first(table), None if rows is None else rows.contiguous()
    changed = None if rows is None else torch.zeros(scales.shape[0], dtype=torch.uint8)
    count = held.length if rows is None else rows.shape[0]
    arguments = HalfCopyArguments(
        held.start,
        *map(address, (rows, half, scales, sizes, changed)),
        held.length,
        held.width,
        held.stride,
        block,
        count,
        threads_for(count * held.width),
    )
    call(library.turbogr_half_copy, arguments)
