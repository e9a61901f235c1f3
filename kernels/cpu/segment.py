"""segment_softmax in C++."""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from .call import TYPES, Arguments, call, fields
from .rows import along_first, empty_like, threads_for


class SegmentArguments(Arguments):
    _fields_ = fields("x grad result offsets", "rows width x_stride grad_stride bounds type threads")


def softmax(library: ctypes.CDLL, x: Tensor, offsets: Tensor) -> Tensor:
    return _run(library.turbogr_segment_softmax, x, None, offsets)


def softmax_backward(library: ctypes.CDLL, grad: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    return _run(library.turbogr_segment_softmax_backward, out, grad, offsets)


def _run(function: Any, x: Tensor, grad: Tensor | None, offsets: Tensor) -> Tensor:
    value, slopes = along_first(x), None if grad is None else along_first(grad)
    result, offsets = empty_like(x), offsets.contiguous()
    arguments = SegmentArguments(
        value.start,
        slopes and slopes.start,
        result.data_ptr(),
        offsets.data_ptr(),
        value.length,
        value.width,
        value.stride,
        slopes.stride if slopes else 0,
        offsets.numel(),
        TYPES[x.dtype],
        threads_for(x.numel()),
    )
    call(function, arguments)
    return result
