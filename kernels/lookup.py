"""Rows that are looked up in a table, and multiplied at once: what ops that do so have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .cpu.build import library
from .declare import HALF, require, require_size, require_tensor

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


# --- checks ------------------------------------------------------------------------------------------


def check_source(name: str, query: Tensor, ids: Tensor, source: Source) -> None:
    require_tensor(query, f"{name}: query", 2)
    require_tensor(source.table, f"{name}: table", 2)
    require_tensor(ids, f"{name}: ids", 2, torch.int64)
    require_size(source.table.shape[1], query.shape[1], f"{name}: width of table")
    require_size(ids.shape[0], query.shape[0], f"{name}: rows of ids")
    same = source.table.dtype == query.dtype
    mixed = source.table.dtype in HALF and query.dtype == torch.float32
    require(same or mixed, f"{name}: table is {source.table.dtype}, while query is {query.dtype}")
    if source.half is None:
        require(source.places is None and source.scales is None, f"{name}: places and scales come with half")
    else:
        _check_half(name, ids, source, source.half)
    for other in (ids, *source):
        if other is not None and other.device != query.device:
            raise ValueError(f"{name}: query is on {query.device}, another tensor on {other.device}")


def _check_half(name: str, ids: Tensor, source: Source, half: Tensor) -> None:
    require_tensor(half, f"{name}: half", 2)
    require(half.dtype in HALF, f"{name}: half must be float16 or bfloat16, not {half.dtype}")
    require(source.table.dtype == torch.float32, f"{name}: half stands in for a table of float32")
    require_size(half.shape[1], source.table.shape[1], f"{name}: width of half")
    if source.places is None:
        require_size(half.shape[0], source.table.shape[0], f"{name}: rows of half, where there are no places,")
    else:
        require_tensor(source.places, f"{name}: places", 2, torch.int64)
        for found, wanted in zip(source.places.shape, ids.shape, strict=True):
            require_size(found, wanted, f"{name}: size of places")
    if source.scales is not None:
        require_tensor(source.scales, f"{name}: scales", 1, torch.float32)
        rows, count = half.shape[0], source.scales.shape[0]
        if isinstance(rows, int) and isinstance(count, int):
            right = -(-rows // source.block) == count
            require(right, f"{name}: {count} scales are for no equal blocks of {rows} rows")


def check_ids(name: str, ids: Tensor, count: int, what: str = "ids") -> None:
    """Of real tensors."""
    if ids.numel():
        for worst in map(int, ids.aminmax()):
            if not 0 <= worst < count:
                raise IndexError(f"{name}: row {worst}, an entry of {what}, is out of range: there are {count} rows")


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


# --- kernels -----------------------------------------------------------------------------------------


def compiled(
    kernel: Callable[..., Any], reference: Callable[..., Any], storage: Callable[..., torch.dtype]
) -> Callable[..., Any]:
    """The kernel from the library for `storage` of the arguments: rows may be narrower than all other tensors."""

    def run(_: Any, *arguments: Any) -> Any:
        found = library(storage(*arguments))
        return reference(*arguments) if found is None else kernel(found, *arguments)

    return run
