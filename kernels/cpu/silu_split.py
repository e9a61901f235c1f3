"""silu_split in C++: one pass over x, forward and backward."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from .call import TYPES, Arguments, call, fields
from .rows import along_last, empty_like, threads_for


class SiluSplitArguments(Arguments):
    """`parts`, `sizes` and `strides` are arrays with one entry per part."""

    _fields_ = fields("x result parts sizes strides", "rows width stride count type threads")


def silu_split(library: ctypes.CDLL, x: Tensor, sizes: list[int]) -> list[Tensor]:
    parts = [x.new_empty((*x.shape[:-1], size)) for size in sizes]
    _run(library.turbogr_silu_split, x, None, parts, sizes, sizes)
    return parts


def silu_split_backward(library: ctypes.CDLL, grads: list[Tensor], x: Tensor, sizes: list[int]) -> Tensor:
    parts = [along_last(grad) for grad in grads]
    result = empty_like(x)
    _run(library.turbogr_silu_split_backward, x, result, [p.tensor for p in parts], sizes, [p.stride for p in parts])
    return result


def _run(
    function: Any,
    x: Tensor,
    result: Tensor | None,
    parts: list[Tensor],
    sizes: list[int],
    strides: list[int],
) -> None:
    value, count = along_last(x), len(parts)
    numbers = ctypes.c_int64 * count
    arguments = SiluSplitArguments(
        value.start,
        None if result is None else result.data_ptr(),
        ctypes.addressof(starts := numbers(*(part.data_ptr() for part in parts))),
        ctypes.addressof(widths := numbers(*sizes)),
        ctypes.addressof(steps := numbers(*strides)),
        value.length,
        value.width,
        value.stride,
        count,
        TYPES[x.dtype],
        threads_for(x.numel()),
    )
    call(function, arguments)
    del starts, widths, steps  # arrays that the arguments point at live until here
