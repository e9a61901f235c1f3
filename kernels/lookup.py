"""Rows that are looked up in a table, and multiplied at once: what ops that do so have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .contract import HALF, INT64, Array, Contract, Number, Range, Rule

MOST = 1 << 22  # numbers of looked-up rows that the reference holds at a time


class Source(NamedTuple):
    """What rows are read from: the table, or a narrower copy of some rows."""

    table: Tensor  # (V, D)
    half: Tensor | None = None  # (N, D), 16 bits
    places: Tensor | None = None  # int64, as many as there are ids; rows of `half`
    scales: Tensor | None = None  # float32 (S,), one for each ceil(N / S) rows

    @property
    def rows(self) -> Tensor:
        return self.table if self.half is None else self.half

    @property
    def block(self) -> int:
        """Rows that one scale is for."""
        count = 1 if self.scales is None else self.scales.shape[0]
        return max(-(-self.rows.shape[0] // max(count, 1)), 1)

    def at(self, ids: Tensor) -> Tensor:
        """Rows of `half` in place of `ids`, which are rows of the table."""
        return ids if self.places is None else self.places.view_as(ids)


# --- what must hold ----------------------------------------------------------------------------------

GROUP = 1 << 20  # positions that share negatives, at most

# Of ops that read rows of a table; those that read its narrow copy too have HALF_COPY beside it.
LOOKUP = Contract(
    Rule(
        "table.dtype is query.dtype or (table.dtype in HALF and query.dtype is torch.float32)",
        "table is {table.dtype}, while query is {query.dtype}",
    ),
    nonzero="D",
    query=Array("T D"),
    table=Array("V D"),
    ids=Array("T K", INT64, Range("V")),
    eps=Number(),
)
COPIED = LOOKUP.extended(
    Rule("half is not None or (places is None and scales is None)", "places and scales come with half", first=True),
    Rule("half is None or table.dtype is torch.float32", "half stands in for a table of float32"),
    Rule("half is None or places is not None or N == V", "half has {N} rows, and without places it has those of table"),
    Rule("scales is None or equal_blocks(N, S)", "{S} scales are for no equal blocks of {N} rows"),
    half=Array("N D", HALF),
    places=Array("T K", INT64, Range("N")),
    scales=Array("S", (torch.float32,)),
)


# --- rows, a part of them at a time ------------------------------------------------------------------


def parts(count: int, numbers: int) -> Iterator[slice]:
    """Positions in turn, so many that their rows are not more than MOST numbers."""
    step = max(1, MOST // max(numbers, 1))
    yield from (slice(first, min(first + step, count)) for first in range(0, count, step))


def look_up(source: Source, places: Tensor, eps: float, real: torch.dtype) -> Tensor:
    """row(i) for all places, in the precision of sums."""
    rows = source.rows.index_select(0, places.reshape(-1)).to(real)
    if source.scales is not None:
        rows = rows * source.scales[places.reshape(-1) // source.block, None]
    return normalized(rows, eps).view(*places.shape, rows.shape[-1])


def normalized(rows: Tensor, eps: float) -> Tensor:
    return rows if eps < 0 else rows / rows.norm(dim=-1, keepdim=True).clamp_min(eps)
