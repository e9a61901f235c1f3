"""Assign sequences to ranks so that none waits long for another.

    plan = Balancer().plan(costs, world=8)
    mine = plan.samples(rank)

Pure: the same costs give the same plan on every rank, so nothing has to be sent but costs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import OptionError, did_you_mean
from . import window
from .algorithms import Algorithm, Floats, Ints, karmarkar_karp, loads_of, lpt, snake, swapped
from .plan import Plan, WindowPlan

ENOUGH = 1.001  # times the least possible load: good enough to stop looking
_ONE: dict[str, Algorithm] = {"snake": snake, "lpt": lpt, "kk": karmarkar_karp}
ALGORITHMS = ("best", "snake", "lpt", "kk", "kk+swap", "given")


@dataclass(frozen=True)
class Balancer:
    """Plans steps, or windows of steps.

    algorithm    best (cheapest first, until one comes within 0.1 % of the bound), snake, lpt, kk, kk+swap, or given
    keep_counts  each rank ends up with as many samples as it came with
    """

    algorithm: str = "best"
    keep_counts: bool = True

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            known = ", ".join(ALGORITHMS)
            raise OptionError(f"algorithm {self.algorithm!r}: one of {known}{did_you_mean(self.algorithm, ALGORITHMS)}")

    def plan(self, costs: Any, world: int, per_rank: int | Sequence[int] | None = None, lengths: Any = None) -> Plan:
        """Ranks for the samples of one step; never worse than the order as given.

        `per_rank` says how many samples each rank holds as given: rank 0 the first ones, and so on; by default as
        evenly as possible. `lengths` count tokens where costs are not lengths.
        """
        began = time.perf_counter()
        values = _checked(costs, world)
        tokens = values.astype(np.int64) if lengths is None else _tokens(lengths, values)
        held = _held(len(values), world, per_rank)
        given = np.repeat(np.arange(world), held)
        ranks, name = self._assign(values, world, given, held if self.keep_counts else None)
        return Plan(ranks, values, tokens, given, world, name, time.perf_counter() - began)

    def plan_window(
        self,
        costs: Any,
        world: int,
        steps: int,
        lengths: Any = None,
        token_cap: int | None = None,
        seed: int | Sequence[int] = 0,
    ) -> WindowPlan:
        """Steps and ranks for the samples of several steps. Changes which samples, and how many, meet in a step.

        Steps come in an order drawn from the seed, since those with the longest sequences would come first otherwise.
        No rank gets more than `token_cap` tokens in a step.
        """
        began = time.perf_counter()
        values = _checked(costs, world)
        tokens = values.astype(np.int64) if lengths is None else _tokens(lengths, values)
        if steps < 1:
            raise OptionError(f"a window has at least 1 step, not {steps}")
        if len(values) < world * steps:
            raise OptionError(f"{len(values)} samples do not give {world} ranks one in each of {steps} steps")
        if token_cap is not None and token_cap < tokens.max():
            raise OptionError(f"token_cap={token_cap}: one sequence has {tokens.max()} tokens")
        bins = window.spread(values, tokens, world, steps, token_cap)
        given = np.repeat(np.arange(world), _held(len(values), world, None))
        plans, members = [], []
        random = np.random.default_rng(seed)
        for step in random.permutation(steps):
            inside = np.flatnonzero(bins // world == step)
            place = random.permutation(world)  # or rank 0 would always have the most to do
            ranks = place[bins[inside] % world]
            plans.append(Plan(ranks, values[inside], tokens[inside], given[inside], world, "window"))
            members.append(inside)
        return WindowPlan(tuple(plans), tuple(members), time.perf_counter() - began)

    def _assign(self, costs: Floats, world: int, given: Ints, counts: Ints | None) -> tuple[Ints, str]:
        best, name = given, "given"
        least = load = _most(costs, world, given)
        if self.algorithm == "given" or world == 1:
            return best, name
        bound = least_load(costs, world, counts) * ENOUGH
        for candidate in self._candidates(costs, world, counts):
            if load <= bound:
                break
            if candidate == "swap":
                ranks: Ints | None = swapped(costs, world, best, bound)
                candidate = f"{name}+swap"
            else:
                ranks = _ONE[candidate](costs, world, counts)
            if ranks is not None and (least := _most(costs, world, ranks)) < load:
                best, load, name = ranks, least, candidate
        return best, name

    def _candidates(self, costs: Floats, world: int, counts: Ints | None) -> Sequence[str]:
        if self.algorithm == "kk+swap":
            return ("kk", "swap")
        if self.algorithm != "best":
            return (self.algorithm,)
        if counts is None:
            return ("lpt",)
        heavy = costs.max() * world > costs.sum() / 2  # longest over half of a mean load: differencing does badly there
        return ("lpt", "kk", "swap") if heavy else ("kk", "lpt", "swap")


def least_load(costs: Floats, world: int, counts: Ints | None) -> float:
    """No assignment's largest load is below this: the mean, or the longest sequence with the company it must have."""
    company = 0.0
    if counts is not None and (fewest := int(counts[counts > 0].min())) > 1:
        company = float(np.partition(costs, fewest - 2)[: fewest - 1].sum())
    return max(float(costs.sum()) / world, float(costs.max()) + company)


def _most(costs: Floats, world: int, ranks: Ints) -> float:
    return float(loads_of(ranks, costs, world).max())


def _checked(costs: Any, world: int) -> Floats:
    values = np.array(costs, dtype=np.float64)
    if world < 1:
        raise OptionError(f"world must be at least 1, not {world}")
    if values.ndim != 1 or not len(values):
        raise OptionError(f"costs must be a list of at least one number, not of shape {values.shape}")
    if not np.isfinite(values).all() or (values < 0).any():
        wrong = int(np.argmin(np.isfinite(values) & (values >= 0)))
        raise OptionError(f"costs must be finite and not negative; that of sample {wrong} is {values[wrong]}")
    return values


def _tokens(lengths: Any, costs: Floats) -> Ints:
    tokens = np.array(lengths, dtype=np.int64)
    if tokens.shape != costs.shape:
        raise OptionError(f"{len(costs)} costs and {tokens.size} lengths do not go together")
    return tokens


def _held(samples: int, world: int, per_rank: int | Sequence[int] | None) -> Ints:
    if per_rank is None:
        held = np.full(world, samples // world)
        held[: samples % world] += 1
    elif isinstance(per_rank, int):
        held = np.full(world, per_rank)
    else:
        held = np.array(per_rank, dtype=np.int64)
    if held.shape != (world,) or (held < 0).any() or held.sum() != samples:
        raise OptionError(f"per_rank={per_rank} does not give {samples} samples to {world} ranks")
    return held
