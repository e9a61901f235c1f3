"""What users did, in time order: the one form in which data reaches a training loop."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .problems import DataError, Problems


@dataclass(frozen=True, eq=False)
class Histories:
    """Jagged, user by user; user u has items[offsets[u] : offsets[u + 1]]. Arrays may be memory maps."""

    items: np.ndarray  # int32, 1..catalogue; 0 is for padding
    times: np.ndarray  # int64, seconds since 1970
    offsets: np.ndarray  # int64, users + 1
    users: np.ndarray  # original ids
    item_ids: np.ndarray  # the original id of item i is at [i - 1]
    problems: Problems = field(default_factory=Problems)

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.users) + 1 or int(self.offsets[-1]) != len(self.items):
            raise DataError(
                f"{len(self.users)} users, {len(self.offsets)} offsets up to {self.offsets[-1]}, {len(self.items)} "
                "items: offsets must be one more than users and end at the number of items"
            )
        if len(self.times) != len(self.items):
            raise DataError(f"{len(self.items)} items and {len(self.times)} times: give one time for each item")

    def __len__(self) -> int:
        """Users."""
        return len(self.users)

    @property
    def catalogue(self) -> int:
        """Different items; a table for them has one row more, for padding."""
        return len(self.item_ids)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def of(self, user: int) -> tuple[np.ndarray, np.ndarray]:
        """Items and times of the user at this place."""
        first, last = int(self.offsets[user]), int(self.offsets[user + 1])
        return self.items[first:last], self.times[first:last]

    def __str__(self) -> str:
        lengths = self.lengths
        return (
            f"{len(self):,} users, {self.catalogue:,} items, {len(self.items):,} interactions; "
            f"lengths: median {int(np.median(lengths))}, mean {lengths.mean():.1f}, longest {lengths.max()}"
        )
