"""A copy of a table in FP16 that follows the rows which an optimizer has changed.

    copy = HalfCopy(table)
    copy.follow(table)            # `half` and `scales` are those of half_rows(table, BLOCK)
    copy.follow(table, rows)      # bit for bit what a new copy would be, if only these rows have changed

A block of rows shares a scale, which follows from its largest row. The copy knows the size of each row, a power of two,
and so which scales change: that is rare, and then the whole block is narrowed anew. Otherwise only named rows are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .cpu import half_copy as cpu
from .cpu.build import library
from .half_rows import BLOCK, rows_per_scale

NOTHING = -128  # size of a row of zeros
_LEAST, _BITS = -100, 15


class HalfCopy:
    """Rows in FP16, a scale for each block of them, and the size of each row."""

    def __init__(self, table: Tensor) -> None:
        count = table.shape[0]
        self.block = rows_per_scale(count, BLOCK)
        self.half = table.new_empty(table.shape, dtype=torch.float16)
        self.scales = table.new_empty(-(-count // BLOCK), dtype=torch.float32)
        self.sizes = table.new_empty(count, dtype=torch.int8)

    def follow(self, table: Tensor, rows: Tensor | None = None) -> None:
        """Narrow rows that have changed, each named once; all without `rows`."""
        kernels = library(torch.float16) if table.device.type == "cpu" else None
        if kernels is not None:
            cpu.follow(kernels, table, rows, self.block, self.half, self.scales, self.sizes)
        else:
            self._follow(table, torch.arange(len(table), device=table.device) if rows is None else rows)
        # A backward that reads what an earlier forward saved is an error from now on.
        torch.autograd.graph.increment_version(self.half)

    def _follow(self, table: Tensor, rows: Tensor) -> None:
        self.sizes[rows] = sizes_of(table[rows])
        blocks = (rows // self.block).unique()
        every = (blocks[:, None] * self.block + torch.arange(self.block, device=rows.device)).clamp(max=len(table) - 1)
        size = self.sizes[every].amax(1) if len(blocks) else self.sizes[:0]
        power = torch.ldexp(torch.ones_like(size, dtype=torch.float32), size.int())
        self.scales[blocks] = torch.where(size == NOTHING, 1.0, power)
        every = every.reshape(-1)
        self.half[every] = (table[every] / self.scales[every // self.block, None]).half()


def sizes_of(rows: Tensor) -> Tensor:
    """The exponent of the scale that each row would have alone."""
    wide = rows.abs()
    most = wide.masked_fill(~wide.isfinite(), 0.0).amax(1) if rows.numel() else rows.new_zeros(len(rows))
    return torch.where(most == 0, NOTHING, (torch.frexp(most).exponent - _BITS).clamp_min(_LEAST)).to(torch.int8)
