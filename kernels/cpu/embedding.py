"""Embeddings by the row kernels of rows.cpp."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .call import TYPES, Arguments, call, fields
from .rows import along_first, along_last, gather_into, scatter_into, threads_for


class CoalesceArguments(Arguments):
    _fields_ = fields("rows entries other unique unique_count", "count")


class SumArguments(Arguments):
    _fields_ = fields("x entries result", "entry_count rows width stride type threads")


def embedding(library: ctypes.CDLL, weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    result = weight.new_empty((*ids.shape, weight.shape[1]))
    return gather_into(result, library, weight, ids.to(torch.int64))


def embedding_backward(library: ctypes.CDLL, grad: Tensor, ids: Tensor, count: int, padding_idx: int) -> Tensor:
    result = grad.new_empty((count, grad.shape[-1]))
    rows = ids.to(torch.int64)
    return scatter_into(result, library, along_last(grad), rows, padding_idx)


def coalesce(library: ctypes.CDLL, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    rows, table, unique_count = rows.contiguous(), along_first(x), ctypes.c_int64()
    entries, other, unique = (rows.new_empty(rows.numel() * numbers) for numbers in (2, 2, 1))
    order = CoalesceArguments(
        rows.data_ptr(),
        entries.data_ptr(),
        other.data_ptr(),
        unique.data_ptr(),
        ctypes.addressof(unique_count),
        rows.numel(),
    )
    call(library.turbogr_coalesce_rows, order)
    unique = unique[: unique_count.value].clone()
    sums = x.new_empty((unique.numel(), *x.shape[1:]))
    arguments = SumArguments(
        table.start,
        entries.data_ptr(),
        sums.data_ptr(),
        rows.numel(),
        unique.numel(),
        table.width,
        table.stride,
        TYPES[x.dtype],
        threads_for(x.numel()),
    )
    call(library.turbogr_sum_rows, arguments)
    return unique, sums
