"""What a model has to beat: the items that most had, and those that most had after the same item.

    popularity   items by how often anybody had them
    markov       items by how often they came right after the user's last one; equal ones by popularity

Both are counted on what is trained on: histories without their last item, which is held out. Histories are read a part
at a time, and what is kept is a number for each item, and the pairs that begin with an evaluated user's last item.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .data import Histories

SOME = 1 << 24  # interactions that are read at a time


def baselines(histories: Histories, users: np.ndarray) -> dict[str, np.ndarray]:
    """How many items stand before the held-out one of each of these users, from 0; of equal ones, half do."""
    popularity = Popularity(histories)
    ends = np.asarray(histories.offsets)[users + 1]
    before, held_out = (np.asarray(histories.items[ends - back], dtype=np.int64) for back in (2, 1))
    return {"popularity": popularity.ranks(held_out), "markov": _after(histories, before, held_out, popularity)}


class Popularity:
    """How often each item was had, and how many items were had so often."""

    def __init__(self, histories: Histories) -> None:
        self.of = np.zeros(histories.catalogue + 1, dtype=np.int64)
        for items, first in _parts(histories):
            self.of += np.bincount(items[_trained(histories, first, len(items), 1)], minlength=len(self.of))
        items_with = np.bincount(self.of[1:])
        self._equal, self._above = items_with, items_with.sum() - items_with.cumsum()

    def standing(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Items that were had more often, and those that were had as often, these among them."""
        had = self.of[items]
        return self._above[had], self._equal[had]

    def ranks(self, items: np.ndarray) -> np.ndarray:
        above, equal = self.standing(items)
        return above + (equal - 1) / 2


def _after(histories: Histories, before: np.ndarray, targets: np.ndarray, popularity: Popularity) -> np.ndarray:
    size = histories.catalogue + 1
    pairs, counts = _pairs(histories, np.unique(before))
    above, equal = popularity.standing(targets)
    ranks = np.empty(len(targets))
    for user, (item, target) in enumerate(zip(before.tolist(), targets.tolist(), strict=True)):
        first, last = np.searchsorted(pairs, (item * size, (item + 1) * size))
        followers, often = pairs[first:last] - item * size, counts[first:last]
        had, wanted = popularity.of[followers], popularity.of[target]
        more, same = had > wanted, had == wanted
        own = often[followers == target].sum()
        if own:
            alike = often == own
            ranks[user] = (often > own).sum() + (alike & more).sum() + ((alike & same).sum() - 1) / 2
        else:  # behind all that ever followed
            ranks[user] = len(followers) + (above[user] - more.sum()) + (equal[user] - 1 - same.sum()) / 2
    return ranks


def _pairs(histories: Histories, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Neighbours that begin with one of these items, each once, as item * (catalogue + 1) + next; and how often."""
    size = histories.catalogue + 1
    wanted = np.zeros(size, dtype=bool)
    wanted[items] = True
    found = [np.empty(0, dtype=np.int64)]
    for part, first in _parts(histories):
        at = np.flatnonzero(wanted[part] & _trained(histories, first, len(part), 2))
        found.append(part[at].astype(np.int64) * size + histories.items[first + at + 1])
    pairs, counts = np.unique(np.concatenate(found), return_counts=True)
    return pairs, counts


def _parts(histories: Histories) -> Iterator[tuple[np.ndarray, int]]:
    """Items a part at a time, and the place of the first. Parts are as long as the catalogue, which each is held to."""
    some = max(SOME, histories.catalogue)
    for first in range(0, len(histories.items), some):
        yield np.asarray(histories.items[first : first + some]), first


def _trained(histories: Histories, first: int, count: int, behind: int) -> np.ndarray:
    """Which of these places have at least so many of the same user behind them."""
    kept = np.ones(count, dtype=bool)
    ends = np.asarray(histories.offsets[1:])
    for back in range(1, behind + 1):
        at = ends - back - first
        kept[at[(at >= 0) & (at < count)]] = False
    return kept
