"""Sorting more interactions than fit in memory: split by user on the way in, sort part by part on the way out.

On disk, 24 bytes for each interaction; in memory, one part at a time (about 100 bytes for each of PART interactions),
and 5 bytes for each item id up to the largest (at most 640 MiB; 16 bytes for each item whose id is beyond).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PART = 1 << 22  # interactions that are sorted at a time, about
TABLE = 1 << 27  # item ids below are numbered by a table over all of them
FIELDS = 3  # user, item, time


@dataclass(frozen=True)
class Part:
    """Interactions of some users, by user and then time; those of the same time as they came."""

    users: np.ndarray
    lengths: np.ndarray
    items: np.ndarray  # original ids
    times: np.ndarray


class Parts:
    """Interactions in files, each of which has all of its users' interactions."""

    def __init__(self, folder: Path, count: int) -> None:
        self.count = max(1, min(count, 512))
        self._paths = [folder / f"part{number}" for number in range(self.count)]
        self._files = [path.open("wb") for path in self._paths]

    def add(self, users: np.ndarray, items: np.ndarray, times: np.ndarray) -> None:
        rows = np.stack([users, items, times], axis=1)
        if self.count == 1:
            self._files[0].write(rows.data)
            return
        part = (users % self.count).astype(np.uint16)
        rows = rows[np.argsort(part, kind="stable")]
        ends = np.cumsum(np.bincount(part, minlength=self.count))
        for file, first, last in zip(self._files, [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            if first < last:
                file.write(rows[first:last].data)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def sorted(self, min_length: int) -> Iterator[Part]:
        """Users with fewer interactions are left out. Each file goes when it was read."""
        self.close()
        for path in self._paths:
            rows = np.fromfile(path, dtype=np.int64).reshape(-1, FIELDS)
            path.unlink()
            yield _sorted(rows, min_length)


def _sorted(rows: np.ndarray, min_length: int) -> Part:
    users, items, times = rows.T
    order = by_user_and_time(users, times)
    users = users[order]
    first = np.flatnonzero(np.concatenate([[True], users[1:] != users[:-1]])) if len(users) else order
    lengths = np.diff(np.append(first, len(users)))
    enough = lengths >= min_length
    kept = order[np.repeat(enough, lengths)]
    return Part(users[first][enough], lengths[enough], items[kept], times[kept])


def by_user_and_time(users: np.ndarray, times: np.ndarray) -> np.ndarray:
    """A stable order; by one number for both where they fit, which takes half the time."""
    if not len(users):
        return np.empty(0, dtype=np.int64)
    since = times - times.min()
    bits = int(since.max()).bit_length()
    low, high = int(users.min()), int(users.max())
    if (high - low).bit_length() + bits < 63:
        return np.argsort((users - low) << bits | since, kind="stable")
    return np.lexsort((times, users))


class Numbering:
    """Items as they are met, numbered from 1 by their ids."""

    def __init__(self) -> None:
        self._met = np.zeros(0, dtype=bool)  # at each id below TABLE
        self._large = np.zeros(0, dtype=np.int64)  # other ids, sorted
        self._numbers: np.ndarray | None = None

    def meet(self, items: np.ndarray) -> None:
        small = items < TABLE
        if not small.all():
            self._large = np.union1d(self._large, items[~small])
            items = items[small]
        self._met = np.pad(self._met, (0, max(0, int(items.max(initial=-1)) + 1 - len(self._met))))
        self._met[items] = True
        self._numbers = None

    @property
    def ids(self) -> np.ndarray:
        return np.concatenate([np.flatnonzero(self._met), self._large])

    def number(self, items: np.ndarray) -> np.ndarray:
        """int32, for ids that were all met."""
        if self._numbers is None:
            self._numbers = np.cumsum(self._met, dtype=np.int32)
        small = items < TABLE
        if small.all():
            return self._numbers[items]
        numbers = np.empty(len(items), dtype=np.int32)
        numbers[small] = self._numbers[items[small]]
        first = 1 + (int(self._numbers[-1]) if len(self._numbers) else 0)
        numbers[~small] = first + np.searchsorted(self._large, items[~small])
        return numbers
