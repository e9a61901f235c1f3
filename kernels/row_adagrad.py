"""Row-wise Adagrad of the rows that have a gradient, in place, and of a copy of them in FP16.

    sums[r]  += mean of gradient[i]^2                          where r = rows[i], each row once
    table[r] -= lr * gradient[i] / (sqrt(sums[r]) + eps)

The kernel visits each row once: finding it in a large table takes longer than all that is done to it. What changes in a
copy (half_copy.py) is written then, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import INT64, Array, As, Contract, Number, Range
from .cpu import row_adagrad as cpu
from .cpu.build import library
from .half_copy import HalfCopy

REALS = (torch.float32, torch.float64)
CHUNK = 1 << 17  # numbers of rows that are updated at a time, without kernels: all that is done happens in cache

_CONTRACT = Contract(
    table=Array("V D", REALS), sums=Array("V", As("table")), rows=Array("N", INT64, Range("V")),
    gradient=Array("N D", As("table")),
    lr=Number(), eps=Number(), nonzero="D",
)  # fmt: skip
_CONTRACT.bind("row_adagrad(Tensor table, Tensor sums, Tensor rows, Tensor gradient, float lr, float eps) -> ()")


def row_adagrad(
    table: Tensor, sums: Tensor, rows: Tensor, gradient: Tensor, lr: float, eps: float, copy: HalfCopy | None = None
) -> None:
    """`copy`, if any, is that of the table before, and afterwards of the table as it is then."""
    _CONTRACT.check(table, sums, rows, gradient, lr, eps)
    wide = torch.float16 if copy is not None else table.dtype  # the library that knows both
    kernels = library(wide) if table.device.type == "cpu" and table.is_contiguous() and sums.is_contiguous() else None
    if kernels is not None:
        half = () if copy is None else (copy.half, copy.scales, copy.sizes)
        cpu.row_adagrad(kernels, table, sums, rows, gradient, lr, eps, half, 1 if copy is None else copy.block)
        torch.autograd.graph.increment_version([table, sums, *half])
        return
    some = max(1, CHUNK // table.shape[1])
    for names, values in zip(rows.split(some), gradient.split(some), strict=True):
        squares = sums.index_select(0, names).add_(values.square().mean(1))
        root = squares.sqrt().add_(eps)[:, None].expand_as(values)
        table.index_copy_(0, names, table.index_select(0, names).addcdiv_(values, root, value=-lr))
        sums.index_copy_(0, names, squares)
    if copy is not None:
        copy.follow(table, rows)
