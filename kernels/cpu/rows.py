"""Rows gathered and added up by number in C++, and what other row-wise kernels share."""

from __future__ import annotations

import ctypes
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from .call import TYPES, Arguments, call, fields

WORTH_THREADS = 32768  # numbers


class Rows(NamedTuple):
    """A tensor as rows: each of `width` numbers one behind the other, `stride` numbers from one row to the next."""

    tensor: Tensor
    length: int
    width: int
    stride: int

    @property
    def start(self) -> int:
        return self.tensor.data_ptr()


def along_first(x: Tensor) -> Rows:
    """x[0], x[1], ...; a copy only where the numbers of a row are apart."""
    count, *rest = x.shape
    width = prod(rest)
    if x.is_contiguous():
        return Rows(x, count, width, width)
    if x[0].is_contiguous():
        return Rows(x, count, width, x.stride(0))
    return Rows(x.contiguous(), count, width, width)


def along_last(x: Tensor) -> Rows:
    """Rows of the last dim, whatever dims lead; a copy only where there is no one stride from row to row."""
    *rest, width = x.shape
    count = prod(rest)
    if x.is_contiguous():
        return Rows(x, count, width, width)
    *strides, step = x.stride()
    if step == 1 and all(strides[i] == strides[i + 1] * rest[i + 1] for i in range(len(rest) - 1)):
        return Rows(x, count, width, strides[-1])
    return Rows(x.contiguous(), count, width, width)


def empty_like(x: Tensor) -> Tensor:
    """Room for a tensor of this shape, contiguous; three times as fast as `new_empty`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def threads_for(numbers: int) -> int:
    return torch.get_num_threads() if numbers > WORTH_THREADS else 1


# --- gather ------------------------------------------------------------------------------------------


class GatherArguments(Arguments):
    _fields_ = fields("x rows result", "count width stride threads")


def gather(library: ctypes.CDLL, x: Tensor, rows: Tensor) -> Tensor:
    return gather_into(x.new_empty((rows.shape[0], *x.shape[1:])), library, x, rows)


def gather_into(result: Tensor, library: ctypes.CDLL, x: Tensor, rows: Tensor) -> Tensor:
    """One row of x for each entry of rows, in the order of entries."""
    table, rows, size = along_first(x), rows.contiguous(), x.element_size()
    arguments = GatherArguments(
        table.start,
        rows.data_ptr(),
        result.data_ptr(),
        rows.numel(),
        table.width * size,
        table.stride * size,
        threads_for(result.numel()),
    )
    call(library.turbogr_gather_rows, arguments)
    return result


# --- scatter -----------------------------------------------------------------------------------------


class ScatterArguments(Arguments):
    _fields_ = fields("x rows result", "count limit width stride skip type threads")


def scatter(library: ctypes.CDLL, x: Tensor, rows: Tensor, count: int) -> Tensor:
    return scatter_into(x.new_empty((count, *x.shape[1:])), library, along_first(x), rows, -1)


def scatter_into(result: Tensor, library: ctypes.CDLL, x: Rows, rows: Tensor, skip: int) -> Tensor:
    """Rows of x added up in the rows of the result that the entries of `rows` name; the entry `skip` names none."""
    rows = rows.contiguous()
    arguments = ScatterArguments(
        x.start,
        rows.data_ptr(),
        result.data_ptr(),
        x.length,
        result.shape[0],
        x.width,
        x.stride,
        skip,
        TYPES[result.dtype],
        threads_for(result.numel() + x.length * x.width),
    )
    call(library.turbogr_scatter_rows, arguments)
    return result
