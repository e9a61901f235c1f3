"""Balanced batches from a dataset whose lengths are known: a batch sampler for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from ...errors import OptionError
from .balancer import Balancer
from .cost import Cost
from .plan import Plan
from .weights import loss_weight

Window = tuple[tuple[Plan, ...], tuple[np.ndarray, ...]]  # the plan of each step, and its samples in the dataset


class BalancedBatchSampler(Sampler[list[int]]):
    """Batches of one rank; all ranks build it alike, but for `rank`, and need not talk to each other.

        sampler = BalancedBatchSampler(lengths, per_rank=32, world=8, rank=rank, cost=Cost(0, 1, 1 / 2560))
        loader = DataLoader(dataset, batch_sampler=sampler)

    Each step draws `world * per_rank` samples, the same ones with and without balancing. `window=M` pools M steps and
    changes which samples meet in a step (see plan_window). Samples that do not fill a step are left out.
    """

    def __init__(
        self,
        lengths: Any,
        per_rank: int,
        world: int,
        rank: int,
        cost: Cost | None = None,
        balancer: Balancer | None = None,
        window: int = 1,
        token_cap: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        self.lengths = np.array(lengths, dtype=np.int64)
        self.per_rank, self.world, self.rank = per_rank, world, rank
        self.cost = cost or Cost()
        self.balancer = balancer or Balancer()
        self.window, self.token_cap, self.shuffle, self.seed = window, token_cap, shuffle, seed
        self.epoch = self.step = 0
        self._check()
        self._orders: dict[int, np.ndarray] = {}
        self._windows: dict[tuple[int, int], Window] = {}

    def _check(self) -> None:
        for name in ("per_rank", "world", "window"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.rank < self.world:
            raise OptionError(f"rank {self.rank} is not one of {self.world}")
        if not len(self):
            raise OptionError(
                f"{len(self.lengths)} samples do not fill a step of {self.world} ranks with {self.per_rank} each"
            )
        if self.token_cap is not None and self.window == 1:
            raise OptionError("token_cap needs window=2 or more: one step cannot hand sequences to another")

    def __len__(self) -> int:
        """Steps of an epoch."""
        return len(self.lengths) // (self.per_rank * self.world)

    def __iter__(self) -> Iterator[list[int]]:
        """From where the state says; afterwards the state is at the start of an epoch again."""
        while self.step < len(self):
            batch = self.indices(self.step)
            self.step += 1  # before the batch is out: a state taken now is after it
            yield batch
        self.step = 0

    def indices(self, step: int) -> list[int]:
        """Of this rank's samples in a step of this epoch."""
        plans, members = self._planned(self.epoch, step // self.window)
        at = step % self.window
        return members[at][plans[at].samples(self.rank)].tolist()

    def plan(self, step: int) -> Plan:
        """Of a step of this epoch: imbalance, floor, planning time."""
        return self._planned(self.epoch, step // self.window)[0][step % self.window]

    def weight(self, step: int, over: str = "tokens") -> float:
        """What this rank multiplies its mean loss with, where gradients are averaged over ranks."""
        return loss_weight(self.plan(step), self.rank, over)

    def set_epoch(self, epoch: int) -> None:
        """Another order of the samples; starts at its first step."""
        self.epoch, self.step = epoch, 0

    def state_dict(self, step: int | None = None) -> dict[str, int]:
        """Where it is. A DataLoader with workers asks ahead of the training loop: give the number of steps trained."""
        return {"epoch": self.epoch, "step": self.step if step is None else step, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["seed"] != self.seed:
            raise OptionError(f"the state is of seed {state['seed']}, and this sampler has seed {self.seed}")
        self.epoch, self.step = state["epoch"], state["step"]

    def _planned(self, epoch: int, number: int) -> Window:
        """Two windows are kept: a loader asks ahead of the loop that asks for weights."""
        key = epoch, number
        if key not in self._windows:
            self._windows[key] = self._plan_window(epoch, number)
            while len(self._windows) > 2:
                del self._windows[next(iter(self._windows))]
        return self._windows[key]

    def _plan_window(self, epoch: int, number: int) -> Window:
        size = self.per_rank * self.world
        first = number * self.window
        steps = min(self.window, len(self) - first)
        order = self._order(epoch)[first * size : (first + steps) * size]
        lengths = self.lengths[order]
        costs = self.cost(lengths)
        if self.window == 1:
            return (self.balancer.plan(costs, self.world, self.per_rank, lengths),), (order,)
        seed = (self.seed, epoch, number)
        found = self.balancer.plan_window(costs, self.world, steps, lengths, self.token_cap, seed)
        return found.steps, tuple(order[inside] for inside in found.members)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            random = np.random.default_rng((self.seed, epoch))
            count = len(self.lengths)
            self._orders = {epoch: random.permutation(count) if self.shuffle else np.arange(count)}
        return self._orders[epoch]
