"""Rows of a table in FP16, with one power of two for each segment of rows: half the bytes to keep, move and read.

    scale  = 2^e, the least power of two with |x| < 2^15 · scale for all numbers x of the segment
    half   = x / scale, rounded to the nearest number of FP16
    scale · half stands for x

Two forms. `half_rows` narrows a whole table, a scale for each block of rows: a copy that stays, next to the table, and
is refreshed where the table changes. `quantize_rows` narrows rows that are looked up and moved, a scale for each jagged
segment of them. Both are arguments of `lookup_dot` and `sampled_loss_total`, which read them in place of the table,
multiply and add in FP32, and give the gradient to the table. The positive's row is read from the table.

Overflow is impossible: what is rounded is below 2^15, and FP16 goes to 65504. Let M be the largest number of a segment.
A number of at least 2^-14 · scale is rounded to 11 bits, a smaller one to a multiple of 2^-24 · scale, and scale is at
most 2^-14 · M. Multiplying by a power of two rounds nothing. So, for M of at least 2^-85,

    |scale · half - x| <= max(2^-11 · |x|, 2^-39 · M)

and, since products of FP16 with FP32 are added up in FP32 as those of FP32 are, a score has the error of FP32 plus

    |score' - score| <= 2^-11 · sum over d of |query[d] · x[d]|  +  2^-39 · M · sum over d of |query[d]|

which is at most 2^-11 · |query| · |x| · (1 + 2^-28 · sqrt(D) · M / |x|). For rows of unit norm and logits of
scale · <query, x>, logits move by at most scale · |query| · 2^-11, 0.0005 · scale · |query|; where the op itself
divides rows by their norm, which is rounded as well, by twice that. Infinite numbers and NaN stay what they are and do
not count for M.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .contract import INT64, Array, Ascending, Contract, Range, Whole
from .cpu import half_rows as cpu
from .cpu.build import library
from .declare import declare, require, runs

BLOCK = 64  # rows of a table that share a scale: the scales of a million rows fit into a cache


# --- reference ---------------------------------------------------------------------------------------


def scale_for(rows: Tensor) -> Tensor:
    """The least power of two that leaves all finite numbers below 2^15; not below 2^-100, so that it has an inverse."""
    sizes = rows.abs()
    sizes = sizes.masked_fill(~sizes.isfinite(), 0.0)
    most = sizes.amax() if sizes.numel() else rows.new_zeros(())
    exponent = (torch.frexp(most).exponent - 15).clamp_min(-100)
    return torch.where(most == 0, torch.ones_like(most), torch.ldexp(torch.ones_like(most), exponent))


def _narrow(rows: Tensor, bounds: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    half = rows.new_empty(rows.shape, dtype=torch.float16)
    scales = rows.new_ones(len(bounds))
    for number, (first, last) in enumerate(bounds):
        scales[number] = scale_for(rows[first:last])
        half[first:last] = (rows[first:last] / scales[number]).half()
    return half, scales


# --- a whole table -----------------------------------------------------------------------------------


def half_rows(table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The table in FP16, and a scale for each block of rows: equal blocks of `block` rows at most."""
    count, step = table.shape[0], rows_per_scale(table.shape[0], block)
    return _narrow(table, [(first, min(first + step, count)) for first in range(0, count, step)])


def rows_per_scale(count: int, most: int) -> int:
    """The size of blocks: as many as of `most` rows there would be, but equal: their number tells their size."""
    return -(-count // max(-(-count // most), 1)) or 1


def _fake(table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return table.new_empty(table.shape, dtype=torch.float16), table.new_empty(-(-table.shape[0] // block))


def _kernel(_: ctypes.CDLL, table: Tensor, block: int) -> tuple[Tensor, Tensor]:
    kernels = library(torch.float16)
    if kernels is None:
        return half_rows(table, block)
    half, scales = _fake(table, block)
    cpu.narrow(kernels, table, None, None, rows_per_scale(table.shape[0], block), half, scales)
    return half, scales


def refresh(half: Tensor, scales: Tensor, table: Tensor, block: int, ids: Tensor | None = None) -> None:
    """Brings a copy up to date, in place, where rows `ids` of the table have changed; everywhere without `ids`."""
    _REFRESH.check(half, scales, table, block, ids)
    count = -(-table.shape[0] // block)
    require(scales.shape[0] == count, f"refresh: number of scales must be {count}, not {scales.shape[0]}")
    block = rows_per_scale(table.shape[0], block)
    blocks = None if ids is None else (ids.reshape(-1) // block).unique()
    kernels = library(torch.float16) if table.device.type == "cpu" else None
    table = table.detach()
    if kernels is not None and half.is_contiguous() and scales.is_contiguous():
        cpu.narrow(kernels, table, None, None, block, half, scales, blocks)
        return
    for number in range(scales.shape[0]) if blocks is None else blocks.tolist():
        rows = slice(number * block, (number + 1) * block)
        scales[number] = scale_for(table[rows])
        half[rows] = (table[rows] / scales[number]).half()


# --- rows that are moved -----------------------------------------------------------------------------


def quantize_rows(table: Tensor, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """table[ids] in FP16, and a scale for each segment offsets[g]:offsets[g + 1] of ids.

    Ops that take `half` have scales for equal blocks: scales.repeat_interleave(offsets.diff()) gives one for each row.
    """
    return _narrow(table.index_select(0, ids), runs(offsets))


def _moved_fake(table: Tensor, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    half = table.new_empty((ids.shape[0], table.shape[1]), dtype=torch.float16)
    return half, table.new_empty(offsets.shape[0] - 1)


def _moved_kernel(_: ctypes.CDLL, table: Tensor, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    kernels = library(torch.float16)
    if kernels is None:
        return quantize_rows(table, ids, offsets)
    half, scales = _moved_fake(table, ids, offsets)
    cpu.narrow(kernels, table, ids, offsets, 1, half, scales)
    return half, scales


def _no_gradient(ctx: Any, *grads: Any) -> tuple[None, None, None]:
    """Rounding has none; ops that read the copy give theirs to the table."""
    return None, None, None


def _forget(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output)


_TABLE, _BLOCK = Array("V D", (torch.float32,)), Whole(1)
_REFRESH = Contract(
    table=_TABLE,
    half=Array("V D", (torch.float16,)),
    scales=Array("S", (torch.float32,)),
    block=_BLOCK,
    ids=Array("...I", INT64, Range("V")),
)
_REFRESH.bind("refresh(Tensor half, Tensor scales, Tensor table, int block, Tensor? ids) -> ()")

declare(
    "half_rows(Tensor table, int block) -> (Tensor half, Tensor scales)",
    Contract(table=_TABLE, block=_BLOCK),
    reference=half_rows,
    cpu=_kernel,
    fake=_fake,
    backward=lambda ctx, *grads: (None, None),
    save=_forget,
)
declare(
    "quantize_rows(Tensor table, Tensor ids, Tensor offsets) -> (Tensor half, Tensor scales)",
    Contract(table=_TABLE, ids=Array("N", INT64, Range("V")), offsets=Array("S+1", INT64, Ascending("N", whole=True))),
    reference=quantize_rows,
    cpu=_moved_kernel,
    fake=_moved_fake,
    backward=_no_gradient,
    save=_forget,
)
