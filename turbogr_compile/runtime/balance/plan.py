"""Which rank takes which sample, and how even that is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .algorithms import Floats, Ints, loads_of


class Imbalance(NamedTuple):
    """How uneven loads are; 0 is even. All ranks wait for the one with most to do."""

    over_mean: float  # max / mean - 1: the share by which a step takes longer than it had to
    spread: float  # (max - min) / max
    tokens: float  # max / mean - 1 of tokens: even costs do not mean even tokens, and memory follows tokens

    def __str__(self) -> str:
        return f"{self.over_mean:.1%} over the mean, spread {self.spread:.1%}, tokens {self.tokens:.1%} over their mean"


def imbalance_of(loads: Floats, tokens: Floats | None = None) -> Imbalance:
    """Of the loads of all ranks."""
    most = float(loads.max())
    return Imbalance(
        _over_mean(loads),
        (most - float(loads.min())) / most if most > 0 else 0.0,
        _over_mean(loads if tokens is None else tokens),
    )


def _over_mean(loads: Floats) -> float:
    mean = float(loads.mean())
    return max(float(loads.max()) / mean - 1.0, 0.0) if mean > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Plan:
    """The rank of each sample of a global batch. Equal on all ranks that computed it from the same costs."""

    ranks: Ints
    costs: Floats
    lengths: Ints
    given: Ints  # where samples were before
    world: int
    algorithm: str  # that won; 'given' where none was better than the order as it was
    seconds: float = field(default=0.0, compare=False)  # that planning took

    @cached_property
    def loads(self) -> Floats:
        return loads_of(self.ranks, self.costs, self.world)

    @cached_property
    def counts(self) -> Ints:
        """Samples of each rank."""
        return np.bincount(self.ranks, minlength=self.world)

    @cached_property
    def tokens(self) -> Ints:
        return loads_of(self.ranks, self.lengths, self.world).astype(np.int64)

    def samples(self, rank: int) -> Ints:
        """Indices into the global batch, in its order."""
        return np.flatnonzero(self.ranks == rank)

    @cached_property
    def imbalance(self) -> Imbalance:
        return imbalance_of(self.loads, loads_of(self.ranks, self.lengths, self.world))

    @cached_property
    def before(self) -> Imbalance:
        """Of the order as it was given."""
        tokens = loads_of(self.given, self.lengths, self.world)
        return imbalance_of(loads_of(self.given, self.costs, self.world), tokens)

    @property
    def floor(self) -> float:
        """What no assignment gets below: the longest sequence alone, over the mean load, minus 1."""
        mean = float(self.loads.mean())
        return max(float(self.costs.max()) / mean - 1.0, 0.0) if mean > 0 else 0.0

    @property
    def moved(self) -> int:
        """Samples that change their rank."""
        return int((self.ranks != self.given).sum())

    @cached_property
    def digest(self) -> int:
        """63 bits that ranks compare before they rely on each other's plan."""
        text = hashlib.blake2b(digest_size=8)
        for array in (self.ranks, self.given, self.lengths):
            text.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        text.update(f"{self.world} {self.algorithm}".encode())
        return int.from_bytes(text.digest(), "little") >> 1

    def facts(self) -> dict[str, Any]:
        """For logs, as JSON."""
        return {
            "samples": len(self.ranks),
            "world": self.world,
            "algorithm": self.algorithm,
            "imbalance": self.imbalance._asdict(),
            "before": self.before._asdict(),
            "floor": self.floor,
            "moved": self.moved,
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        out_of_reach = f"; no step of these sequences gets below {self.floor:.1%}" if self.floor > 0 else ""
        return (
            f"{len(self.ranks)} samples on {self.world} ranks by {self.algorithm}: {self.imbalance}; "
            f"before {self.before.over_mean:.1%}{out_of_reach}; planned in {self.seconds * 1e3:.1f} ms"
        )


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The step and the rank of each sample of a window of steps."""

    steps: tuple[Plan, ...]
    members: tuple[Ints, ...]  # of each step: indices into the window
    seconds: float = field(default=0.0, compare=False)

    def samples(self, step: int, rank: int) -> Ints:
        """Indices into the window."""
        return self.members[step][self.steps[step].samples(rank)]

    @property
    def imbalance(self) -> Imbalance:
        """Mean over the steps, which do not wait for each other."""
        return Imbalance(*np.mean([step.imbalance for step in self.steps], axis=0).tolist())

    @property
    def utilisation(self) -> float:
        """Share of the window's time that the average rank is busy."""
        loads = np.stack([step.loads for step in self.steps])
        return float(loads.sum() / (loads.max(1).sum() * loads.shape[1]))

    @property
    def digest(self) -> int:
        text = hashlib.blake2b(digest_size=8)
        for plan, members in zip(self.steps, self.members, strict=True):
            text.update(f"{plan.digest} ".encode() + members.tobytes())
        return int.from_bytes(text.digest(), "little") >> 1
