"""Where held-out items stand among all of a catalogue, in memory that does not grow with it.

A table may be spread: each rank counts, for all users, which of its own rows score higher than the held-out item does.
What ranks exchange is users' vectors, and two whole numbers for each user. Scores are never stored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.standing import own_products, standing
from .ranks import Ranks

USERS = 1024  # whose vectors are held against a part of the rows that is in cache


def ranks_of(vectors: Tensor, targets: Tensor, table: Any, ranks: Ranks) -> Tensor:
    """How many items stand before each target, from 0; of equal ones, half do. The same on all ranks."""
    rows, first = _held(table)
    some = zip(vectors.split(USERS), targets.split(USERS), strict=True)
    found = [_counted(v, t, rows, first, ranks) for v, t in some]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def _counted(vectors: Tensor, targets: Tensor, rows: Tensor, first: int, ranks: Ranks) -> Tensor:
    places = targets - first
    mine = (places >= 0) & (places < len(rows))
    own = vectors.new_zeros(len(vectors))
    own[mine] = own_products(vectors[mine], rows[places[mine]])
    own = ranks.add_up(own)
    above, equal = standing(vectors, rows, own, places)
    counts = ranks.add_up(torch.stack([above, equal, torch.full_like(above, len(rows))]))
    standings = counts[0] + counts[1].double() / 2
    return torch.where(own.isnan(), counts[2].double(), standings)  # no number is no hit


def _held(table: Any) -> tuple[Tensor, int]:
    """Rows of items that this process has, and the id of the first one; no copy. Row 0 is padding."""
    layout, rank = table.table.layout, table.table.rank
    table.table.settle()
    first, count = layout.starts[rank], layout.valid(rank)[0]
    padding = int(first == 0)
    return table.shard[padding:count], first + padding
