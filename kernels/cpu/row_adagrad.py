"""Row-wise Adagrad, in C++."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .call import Arguments, address, call, fields
from .rows import along_first, threads_for


class RowAdagradArguments(Arguments):
    _fields_ = fields(
        "table sums rows gradient halves scales sizes changed",
        "total depth stride gradient_stride block count threads",
        "rate eps",
    )


def row_adagrad(
    library: ctypes.CDLL, table: Tensor, sums: Tensor, rows: Tensor, gradient: Tensor, rate: float, eps: float,
    half: tuple[Tensor, ...], block: int,
) -> None:  # fmt: skip
    """In place. `half` is empty, or rows in FP16, scales and sizes (HalfCopy)."""
    held, given, rows = along_first(table), along_first(gradient), rows.contiguous()
    copy: tuple[Tensor | None, ...] = (None,) * 4
    if half:
        copy = (*half, torch.zeros(half[1].shape[0], dtype=torch.uint8))
    arguments = RowAdagradArguments(
        held.start,
        sums.data_ptr(),
        rows.data_ptr(),
        given.start,
        *map(address, copy),
        held.length,
        held.width,
        held.stride,
        given.stride,
        block,
        rows.shape[0],
        threads_for(given.length * given.width),
        rate,
        eps,
    )
    call(library.turbogr_row_adagrad, arguments)
