"""Which rank has which row of a table, and where: arithmetic without processes.

A row has an address: its number, scrambled where rows are spread by hash. A table that is split by columns has one
address per row and piece. Rank r has the addresses from `starts[r]` to `starts[r + 1]`, in order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...errors import OptionError
from .placements import ColumnWise, Placement, RowWise, TableWise

_GOLDEN = 0.6180339887498949
_LARGEST_HASHED = 2**31


@dataclass(frozen=True)
class Layout:
    """One table over so many ranks."""

    rows: int
    width: int
    ranks: int
    placement: Placement

    def __post_init__(self) -> None:
        if self.factor != 1 and self.rows >= _LARGEST_HASHED:
            raise OptionError(f"order='hash' takes tables below 2**31 rows, this one has {self.rows}: use 'block'")
        if isinstance(self.placement, TableWise) and not 0 <= self.placement.rank < self.ranks:
            raise OptionError(f"{self.placement.spec} names no rank of {self.ranks}")

    @cached_property
    def factor(self) -> int:
        """Row i has the address i * factor mod rows. Depends on the table alone, so that ranks may change."""
        if not (isinstance(self.placement, RowWise) and self.placement.order == "hash" and self.rows > 2):
            return 1
        found = int(self.rows * _GOLDEN)
        while math.gcd(found, self.rows) != 1:
            found += 1
        return found

    @property
    def pieces(self) -> int:
        """Into how many parts each row is cut."""
        return self.ranks if isinstance(self.placement, ColumnWise) else 1

    @property
    def piece(self) -> int:
        """Columns that one rank has."""
        return -(-self.width // self.pieces)

    @property
    def per_rank(self) -> int:
        """Addresses of one rank; the last one may have less to say."""
        return -(-self.rows // self.ranks) if isinstance(self.placement, RowWise) else self.rows

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First address of each rank, and the end."""
        if isinstance(self.placement, TableWise):
            return tuple(self.rows * (rank > self.placement.rank) for rank in range(self.ranks + 1))
        return tuple(min(rank * self.per_rank, self.rows * self.pieces) for rank in range(self.ranks + 1))

    def held(self, rank: int) -> int:
        """Rows that a rank allocates: those of the last one are padded to the others' number."""
        if isinstance(self.placement, TableWise):
            return self.rows if rank == self.placement.rank else 0
        return self.per_rank

    def valid(self, rank: int) -> tuple[int, int]:
        """Rows and columns of a rank that are part of the table."""
        rows = self.starts[rank + 1] - self.starts[rank]
        columns = self.piece if self.pieces == 1 else max(0, min(self.width - rank * self.piece, self.piece))
        return rows, columns

    # --- ids ---------------------------------------------------------------------------------------

    def addresses(self, ids: Tensor) -> Tensor:
        """Of each id; with one more dim where rows are cut into pieces."""
        spread = ids if self.factor == 1 else ids * self.factor % self.rows
        if self.pieces == 1:
            return spread
        return spread[..., None] + torch.arange(self.pieces, device=ids.device) * self.rows

    def wanted(self, addresses: Tensor) -> Tensor:
        """How many of ascending addresses each rank has."""
        starts = torch.tensor(self.starts, device=addresses.device)
        return torch.searchsorted(addresses, starts).diff()

    def local(self, addresses: Tensor) -> Tensor:
        """Rows of their owner's shard."""
        return addresses % self.per_rank if self.rows else addresses

    def ids(self, addresses: Tensor) -> Tensor:
        """Whose addresses these are."""
        inside = addresses % self.rows
        return inside if self.factor == 1 else inside * pow(self.factor, -1, self.rows) % self.rows

    def owner(self, id: int) -> list[tuple[int, int]]:
        """Ranks that have (a piece of) a row, and where in their shard."""
        address = id * self.factor % self.rows
        if isinstance(self.placement, TableWise):
            return [(self.placement.rank, address)]
        if self.pieces > 1:
            return [(rank, address) for rank in range(self.ranks)]
        return [divmod(address, self.per_rank)]

    # --- values ------------------------------------------------------------------------------------

    def cut(self, table: Tensor, rank: int) -> Tensor:
        """A rank's shard of a whole table, in memory of its own."""
        shard = table.new_zeros((self.held(rank), self.piece))
        rows, columns = self.valid(rank)
        if self.pieces > 1:
            first = rank * self.piece
            shard[:, :columns] = table[:, first : first + columns]
        elif self.factor != 1:
            addresses = torch.arange(self.starts[rank], self.starts[rank + 1], device=table.device)
            torch.index_select(table, 0, self.ids(addresses), out=shard[:rows])
        else:
            shard[:rows] = table[self.starts[rank] : self.starts[rank + 1]]
        return shard
