"""Which users meet in a step, and which rank takes them.

Every rank computes the same from lengths, seed and epoch; nothing is sent. An order arranges blocks of steps: the users
of a block, drawn at random, become an array (steps, ranks, batch) with each of them in it once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...errors import OptionError, did_you_mean
from ...runtime.balance import Balancer, Cost

Arrange = Callable[[np.ndarray, np.ndarray, int, int, np.random.Generator], np.ndarray]


def _as_drawn(users: np.ndarray, costs: np.ndarray, world: int, batch: int, random: np.random.Generator) -> np.ndarray:
    return users.reshape(-1, world, batch)


def _of_a_length(
    users: np.ndarray, costs: np.ndarray, world: int, batch: int, random: np.random.Generator
) -> np.ndarray:
    """Similar lengths meet in a step, every rank takes its share of them, and steps come in any order."""
    steps = users[np.argsort(costs, kind="stable")].reshape(-1, batch, world).transpose(0, 2, 1)
    return steps[random.permutation(len(steps))]


def _balanced(users: np.ndarray, costs: np.ndarray, world: int, batch: int, random: np.random.Generator) -> np.ndarray:
    """The users of each step stay in it; ranks get as much to do as each other."""
    size = world * batch
    steps = [
        [users[at + Balancer().plan(costs[at : at + size], world, batch).samples(rank)] for rank in range(world)]
        for at in range(0, len(users), size)
    ]
    return np.array(steps)


def _balanced_together(
    users: np.ndarray, costs: np.ndarray, world: int, batch: int, random: np.random.Generator
) -> np.ndarray:
    """Parts of `batch` users as even as can be; parts of similar cost meet in a step."""
    parts = len(users) // batch
    plan = Balancer().plan(costs, parts, batch)
    heaviest_first = np.argsort(-plan.loads, kind="stable")
    grouped = users[np.argsort(plan.ranks, kind="stable")].reshape(parts, batch)[heaviest_first]
    steps = grouped.reshape(-1, world, batch)[random.permutation(parts // world)]
    # Or rank 0 would always have the most to do.
    return np.stack([step[random.permutation(world)] for step in steps])


# Name: how many steps are arranged together, and how.
ORDERS: dict[str, tuple[int, Arrange]] = {
    "shuffled": (1, _as_drawn),
    "bucketed": (64, _of_a_length),
    "balanced": (1, _balanced),
    "window": (8, _balanced_together),
}


@dataclass
class Order:
    """Steps of an epoch, each an array (ranks, batch) of users. Users that fill no step wait for another epoch."""

    name: str
    lengths: np.ndarray
    batch: int
    world: int
    seed: int
    cost: Cost

    def __post_init__(self) -> None:
        if self.name not in ORDERS:
            raise OptionError(f"order {self.name!r}: one of {', '.join(ORDERS)}{did_you_mean(self.name, ORDERS)}")
        self._drawn: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return len(self.lengths) // (self.batch * self.world)

    def step(self, epoch: int, step: int) -> np.ndarray:
        together, arrange = ORDERS[self.name]
        number = step // together
        block = self._blocks.get((epoch, number))
        if block is None:
            size = together * self.batch * self.world
            users = self._users(epoch)[number * size : (number + 1) * size]
            random = np.random.default_rng((self.seed, epoch, number))
            block = arrange(users, self.cost(self.lengths[users]), self.world, self.batch, random)
            # Two are kept: who reads ahead is in the next one, who asks for weights is not.
            self._blocks = {**dict(list(self._blocks.items())[-1:]), (epoch, number): block}
        return block[step % together]

    def _users(self, epoch: int) -> np.ndarray:
        of, drawn = self._drawn
        if of != epoch:
            drawn = np.random.default_rng((self.seed, epoch)).permutation(len(self.lengths))
            drawn = drawn[: self.steps * self.batch * self.world]
            self._drawn = epoch, drawn
        return drawn
