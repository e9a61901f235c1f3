"""Balancing over several steps at once: where one sequence alone exceeds a step's mean, no single step can be even."""

from __future__ import annotations

import heapq

import numpy as np

from ...errors import OptionError
from .algorithms import Floats, Ints, descending

EVEN = 1.01  # of the mean: costs beyond this have a step of their own kind


def spread(costs: Floats, tokens: Ints, world: int, steps: int, cap: int | None) -> Ints:
    """The bin of each sample; bins `world * s` and the following are step s, heaviest step first.

    The better of two ways, by the time that all steps take: fill all bins alike and let bins of similar load meet in a
    step; or, first, give each sequence that is too long for a bin a step that is filled up to it on all ranks.
    """
    plain = _sorted_bins(costs, fill(costs, tokens, world * steps, cap), world * steps)
    levelled = _levelled(costs, tokens, world, steps, cap)
    if levelled is None or _time(costs, plain, world, steps) <= _time(costs, levelled, world, steps):
        return plain
    return levelled


def fill(costs: Floats, tokens: Ints, bins: int, cap: int | None) -> Ints:
    """Longest first into the bin with least in it that has room for the tokens."""
    order = descending(costs)
    heap = [(0.0, at) for at in range(bins)]
    room = [cap if cap is not None else int(tokens.sum())] * bins
    chosen = np.empty(len(costs), dtype=np.int64)
    for sample, cost, need in zip(order.tolist(), costs[order].tolist(), tokens[order].tolist(), strict=True):
        full = []
        while heap and room[heap[0][1]] < need:
            full.append(heapq.heappop(heap))
        if not heap:
            raise OptionError(
                f"token_cap={cap} is too small: {int(tokens.sum())} tokens in {bins} parts, longest sequence "
                f"{int(tokens.max())}; raise it, or take fewer sequences in a step"
            )
        load, at = heap[0]
        chosen[sample] = at
        room[at] -= need
        heapq.heapreplace(heap, (load + cost, at))
        for entry in full:
            heapq.heappush(heap, entry)
    return chosen


def _levelled(costs: Floats, tokens: Ints, world: int, steps: int, cap: int | None) -> Ints | None:
    """Steps for the sequences that exceed the mean, then the rest as usual; None where there are none."""
    chosen = np.full(len(costs), -1, dtype=np.int64)
    left = descending(costs)
    step = 0
    while step < steps - 1 and len(left):
        mean = float(costs[left].sum()) / (world * (steps - step))
        if costs[left[0]] <= EVEN * mean:
            break
        kept = world * (steps - step - 1)  # no rank may be left without a sequence in a later step
        offered = left[: len(left) - kept]
        taken = _up_to(costs[offered], tokens[offered], world, float(costs[left[0]]), cap)
        chosen[offered[taken >= 0]] = taken[taken >= 0] + world * step
        left = left[chosen[left] < 0]
        step += 1
    if step == 0:
        return None
    bins = world * (steps - step)
    try:
        rest = fill(costs[left], tokens[left], bins, cap)
    except OptionError:  # what the first steps left out does not fit; the other way took it
        return None
    chosen[left] = _sorted_bins(costs[left], rest, bins) + world * step
    return chosen


def _up_to(costs: Floats, tokens: Ints, world: int, level: float, cap: int | None) -> Ints:
    """Which rank takes which of the samples, sorted by cost, without any rank exceeding the level; -1: none does."""
    heap = [(0.0, rank) for rank in range(world)]
    room = [cap if cap is not None else int(tokens.sum())] * world
    chosen = np.full(len(costs), -1, dtype=np.int64)
    limit = level * (1 + 1e-9)
    for sample, (cost, need) in enumerate(zip(costs.tolist(), tokens.tolist(), strict=True)):
        load, rank = heap[0]
        if load + cost > limit or room[rank] < need:
            continue
        chosen[sample] = rank
        room[rank] -= need
        heapq.heapreplace(heap, (load + cost, rank))
    return chosen


def _sorted_bins(costs: Floats, bins: Ints, number: int) -> Ints:
    """Renumbered by falling load."""
    place = np.empty(number, dtype=np.int64)
    place[descending(np.bincount(bins, costs, number))] = np.arange(number)
    return place[bins]


def _time(costs: Floats, bins: Ints, world: int, steps: int) -> float:
    return float(np.bincount(bins, costs, world * steps).reshape(steps, world).max(1).sum())
