"""AdamW on storage of 16 bits, in C++."""

from __future__ import annotations

import ctypes

from torch import Tensor

from .call import Arguments, call, fields
from .rows import threads_for


class AdamWArguments(Arguments):
    _fields_ = fields("value gradient mean square", "count seed threads", "first second rate keep correction eps")


def adamw_by_chance(library: ctypes.CDLL, tensors: tuple[Tensor, ...], seed: int, *numbers: float) -> None:
    """In place: value, gradient, mean and square, each contiguous; numbers as in AdamWArguments."""
    count = tensors[0].numel()
    arguments = AdamWArguments(*(x.data_ptr() for x in tensors), count, seed, threads_for(count), *numbers)
    call(library.turbogr_adamw_by_chance, arguments)
