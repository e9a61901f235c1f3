"""How old rows were when they were used: what semi-async training counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Staleness:
    """How old the rows of one table were when they were used, as one rank saw it."""

    delays: Counter[int] = field(default_factory=Counter)  # lookups, by how many updates their rows had missed
    again: int = 0  # lookups whose rows were fetched again, because they were too old
    fetched: int = 0  # rows of this shard that were handed out ahead
    stale: int = 0  # of these, those that an update changed before they were used

    @property
    def stale_row_fraction(self) -> float:
        return self.stale / self.fetched if self.fetched else 0.0

    @property
    def largest_delay(self) -> int:
        return max(self.delays, default=0)

    def overtaken(self, asked: Tensor, updated: Tensor) -> None:
        self.fetched += asked.numel()
        self.stale += int(torch.isin(asked, updated).sum())
