"""The same numbers, laid out in memory in ways that kernels have to cope with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from turbogr_compile.kernels.cpu.build import library

# What only the C++ kernels promise.
COMPILED = pytest.mark.skipif(library(torch.float32) is None, reason="no C++ kernels here")


def plain(x: Tensor) -> Tensor:
    return x.contiguous()


def misaligned(x: Tensor) -> Tensor:
    """One number behind an aligned address."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def sliced(x: Tensor) -> Tensor:
    """Rows of a wider tensor, which holds NaN elsewhere: one stride from row to row, numbers of a row together."""
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), float("nan"))
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


def apart(x: Tensor) -> Tensor:
    """Numbers of a row are not neighbours."""
    return x.new_empty((*x.shape, 2))[..., 1].copy_(x)


def turned(x: Tensor) -> Tensor:
    """The first dim is the last in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (plain, misaligned, sliced, apart, turned)}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
