"""Row spaces, and how the rows of two spaces relate.

A row space is a pair of axis groups, sequences and columns, that the rows of padded values run over. A relation says,
for each row of one space, which row of another it reads; `index` answers for a batch, -1 meaning none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import fx

from .axes import Axis
from .calls import Size

if TYPE_CHECKING:
    from .sets import Batch


@dataclass(frozen=True)
class Space:
    sequence: tuple[Axis, ...]
    column: tuple[Axis, ...] = ()

    @property
    def axes(self) -> tuple[Axis, ...]:
        return self.sequence + self.column

    def includes(self, other: Space) -> bool:
        return set(other.axes) <= set(self.axes)


def _first_rows(batch: Batch, space: Space) -> torch.Tensor:
    """Row 0, for every row of a space; a space without axes has one row."""
    rows, columns = batch.extent(space)
    return torch.zeros(rows * columns, dtype=torch.int64)


@dataclass(frozen=True)
class Projected:
    """The row of a coarser space that a row belongs to."""

    out: Space
    into: Space

    def index(self, batch: Batch) -> torch.Tensor:
        at, flat = batch.coordinates(self.out), _first_rows(batch, self.out)
        for axis in self.into.axes:
            flat = flat * batch.size(axis) + at[axis]
        return flat

    def __str__(self) -> str:
        return "the row it belongs to"


@dataclass(frozen=True)
class Moved:
    """Column c reads column start + step * c; beyond the ends nothing, or around the corner."""

    out: Space
    into: Space
    start: Size
    step: int = 1
    wraps: bool = False

    def index(self, batch: Batch) -> torch.Tensor:
        rows, columns = batch.extent(self.out)
        there = batch.extent(self.into)[1]
        column = torch.arange(columns) * self.step + batch.number(self.start)
        column = column % there if self.wraps else column.where((column >= 0) & (column < there), -1)
        flat = torch.arange(rows)[:, None] * there + column
        return flat.where(column >= 0, -1).flatten()

    def __str__(self) -> str:
        if self.step == 1:
            return f"column + {self.start}" + (" around" if self.wraps else "")
        return f"{self.start} + {self.step} * column"


@dataclass(frozen=True)
class At:
    """Every row reads one fixed column of its sequence."""

    out: Space
    into: Space
    column: Size

    def index(self, batch: Batch) -> torch.Tensor:
        rows, columns = batch.extent(self.into)
        at = batch.number(self.column)
        return torch.arange(rows) * columns + at % columns

    def __str__(self) -> str:
        return f"column {self.column}"


def _named(
    batch: Batch, node: fx.Node, out: Space, count: int, from_end: bool, repeats: tuple[int, ...] = ()
) -> torch.Tensor:
    """What an index tensor names among `count` things, for every row; `repeats` are dims along which it is the same."""
    value = batch.values[node]
    for dim in repeats:
        first = value.narrow(dim, 0, 1)
        if value.stride(dim) != 0 and not torch.equal(value, first.expand_as(value)):
            batch.refuse(f"%{node} no longer names one row for all features")
        value = first
    chosen = batch.laid_out(node, value, out, repeats).flatten().long()
    chosen = chosen + count * (chosen < 0) if from_end else chosen
    if bool(((chosen < 0) | (chosen >= count)).any()):
        batch.refuse(f"%{node} names a row that does not exist")
    return chosen


@dataclass(frozen=True)
class Taken:
    """Rows read the columns that an index tensor names."""

    out: Space
    into: Space
    column: fx.Node
    from_end: bool = False  # negative numbers count from the end: x[i] allows that, gather does not
    repeats: tuple[int, ...] = ()  # dims along which the index tensor is an expansion

    def index(self, batch: Batch) -> torch.Tensor:
        columns = batch.extent(self.into)[1]
        chosen = _named(batch, self.column, self.out, columns, self.from_end, self.repeats)
        return Projected(self.out, Space(self.into.sequence)).index(batch) * columns + chosen

    def __str__(self) -> str:
        return f"column %{self.column}"


@dataclass(frozen=True)
class Part:
    """Rows at one index along an axis read the row of a coarser space they belong to; the others nothing."""

    out: Space
    into: Space
    axis: Axis
    at: int

    def index(self, batch: Batch) -> torch.Tensor:
        return Projected(self.out, self.into).index(batch).where(batch.coordinates(self.out)[self.axis] == self.at, -1)

    def __str__(self) -> str:
        return f"the row it belongs to, for part {self.at}"


@dataclass(frozen=True)
class Fixed:
    """Rows of a coarser space read the row of a finer one at a fixed index along an axis."""

    out: Space
    into: Space
    axis: Axis
    at: int

    def index(self, batch: Batch) -> torch.Tensor:
        here, flat = batch.coordinates(self.out), _first_rows(batch, self.out)
        for axis in self.into.axes:
            size = batch.size(axis)
            flat = flat * size + (here[axis] if axis != self.axis else self.at % size)
        return flat

    def __str__(self) -> str:
        return f"part {self.at}"


@dataclass(frozen=True)
class Numbered:
    """Rows read the rows that index tensors name: by flat number, or by sequence and column."""

    out: Space
    into: Space
    numbers: tuple[fx.Node, ...]
    from_end: bool = False

    def index(self, batch: Batch) -> torch.Tensor:
        rows, columns = batch.extent(self.into)
        counts = [rows * columns] if len(self.numbers) == 1 else [rows, columns]
        flat = _first_rows(batch, self.out)
        for node, count in zip(self.numbers, counts, strict=True):
            flat = flat * count + _named(batch, node, self.out, count, self.from_end)
        return flat

    def __str__(self) -> str:
        return f"row {', '.join(f'%{n}' for n in self.numbers)}"


Relation = Projected | Moved | At | Taken | Part | Fixed | Numbered
