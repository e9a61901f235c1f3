"""Ways to divide costs among ranks: each gives the rank of every sample, or None where it does not apply.

All are deterministic: ties go to the sample and to the rank that come first, and sums are of integers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Costs, and how many samples each rank takes; None: as many as it likes. The result: the rank of each sample.
Algorithm = Callable[[Floats, int, "Ints | None"], "Ints | None"]

UNITS = 1 << 40  # that the sum of all costs is divided into
SWAPS = 128


def snake(costs: Floats, world: int, counts: Ints | None) -> Ints | None:
    """Deal the samples out by falling cost, forth and back."""
    if counts is not None and not _even(counts):
        return None
    table = _blocks(costs, world)
    table[1::2] = table[1::2, ::-1].copy()
    return _ranks(table, len(costs), counts)


def lpt(costs: Floats, world: int, counts: Ints | None) -> Ints:
    """The most expensive sample left goes to the rank with least to do that still has room."""
    order = descending(costs)
    bits = max(world - 1, 1).bit_length()
    mask = (1 << bits) - 1
    # Load and rank in one number: comparing ints is what makes the heap fast enough.
    parts = (_units(costs)[order] << bits).tolist()
    room = [len(costs)] * world if counts is None else counts.tolist()
    heap = [rank for rank in range(world) if room[rank]]
    chosen = []
    for part in parts:
        least = heap[0]
        rank = least & mask
        chosen.append(rank)
        room[rank] -= 1
        if room[rank]:
            heapq.heapreplace(heap, least + part)
        else:
            heapq.heappop(heap)
    ranks = np.empty(len(costs), dtype=np.int64)
    ranks[order] = chosen
    return ranks


def karmarkar_karp(costs: Floats, world: int, counts: Ints | None) -> Ints | None:
    """Difference blocks of one sample per rank against each other, the widest first, until one is left."""
    if counts is not None and not _even(counts):
        return None
    table = _blocks(costs, world)
    padded = np.append(_units(costs), 0)  # the last one stands for "no sample"
    states = []
    for number, block in enumerate(table):
        sums = padded[block]
        states.append((int(sums[-1] - sums[0]), number, sums, block[None]))
    heapq.heapify(states)
    for number in range(len(table), 2 * len(table) - 1):
        _, _, sums, members = heapq.heappop(states)
        _, _, others, more = heapq.heappop(states)
        sums = sums + others[::-1]
        order = descending(sums)
        members = np.concatenate([members, more[:, ::-1]])[:, order]
        sums = sums[order]
        heapq.heappush(states, (int(sums[-1] - sums[0]), number, sums, members))
    return _ranks(states[0][3], len(costs), counts)


def swapped(costs: Floats, world: int, ranks: Ints, enough: float, limit: int = SWAPS) -> Ints:
    """Swap samples of the ranks with most and least to do while that helps, down to a load that is `enough`."""
    ranks = ranks.copy()
    loads = loads_of(ranks, costs, world)
    members: dict[int, Ints] = {}
    for _ in range(limit):
        most, least = int(loads.argmax()), int(loads.argmin())
        half = (loads[most] - loads[least]) / 2
        if loads[most] <= enough or half <= 0:
            break
        for rank in (most, least):
            if rank not in members:
                members[rank] = np.flatnonzero(ranks == rank)
        gain = costs[members[most]][:, None] - costs[members[least]][None, :]
        miss = np.where((gain > 0) & (gain < 2 * half), np.abs(gain - half), np.inf)
        if miss.size == 0 or not np.isfinite(best := miss.flat[at := int(miss.argmin())]) or best >= half:
            break
        i, j = divmod(at, miss.shape[1])
        mine, theirs = members[most][i], members[least][j]
        members[most][i], members[least][j] = theirs, mine
        ranks[mine], ranks[theirs] = least, most
        loads[most] -= gain[i, j]
        loads[least] += gain[i, j]
    return ranks


def loads_of(ranks: Ints, costs: NDArray, world: int) -> Floats:
    """Sum of the costs of each rank."""
    return np.bincount(ranks, costs, world).astype(np.float64)


def descending(values: NDArray) -> Ints:
    return np.argsort(-values, kind="stable")


def _units(costs: Floats) -> Ints:
    total = float(costs.sum())
    return np.rint(costs * (UNITS / total)).astype(np.int64) if total > 0 else np.zeros(len(costs), dtype=np.int64)


def _even(counts: Ints) -> bool:
    return int(counts.max()) - int(counts.min()) <= 1


def _blocks(costs: Floats, world: int) -> Ints:
    """Samples by falling cost, a row for every `world` of them; -1 fills the last row."""
    rows = max(-(-len(costs) // world), 1)
    table = np.full(rows * world, -1, dtype=np.int64)
    table[: len(costs)] = descending(costs)
    return table.reshape(rows, world)


def _ranks(table: Ints, samples: int, counts: Ints | None) -> Ints:
    """Columns become ranks; where counts differ, a column goes to a rank that takes as many samples."""
    world = table.shape[1]
    place = np.arange(world)
    if counts is not None:
        place[descending((table >= 0).sum(0))] = descending(counts)
    ranks = np.empty(samples + 1, dtype=np.int64)  # one more for the places that hold no sample
    ranks[table] = place[None, :]
    return ranks[:samples]
