"""Batches for a training loop: always the same shape, and resumed exactly where a run stopped.

    batches = Batches(histories, batch=32, max_len=256, order="balanced", rank=rank, world=world)
    for batch in batches:                 # one epoch; the next loop is the next epoch
        loss = model(batch["ids"])
    state = batches.state_dict()

Every batch can be had by its number, at(epoch, step): nothing depends on what was asked for before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import OptionError, did_you_mean
from ...runtime.balance import Cost
from . import windows
from .histories import Histories
from .orders import Order

LAYOUTS = ("padded", "jagged")
_EVALUATED = 1 << 32  # epochs stay below: users of an evaluation are drawn apart from those of training


class Batches:
    """Batches of one rank. Ranks build it alike, but for `rank`: same number of steps, no sample twice in a step.

    order     shuffled; bucketed (similar lengths meet); balanced (ranks get equal work, steps keep their users);
              window (several steps are balanced together, which changes who meets in a step)
    hold_out  so many of the last items of each user are never in a training batch
    long      of a user with more than max_len items: the last ones, a random stretch, another each epoch, or all of
              them in chunks, each of which is a sample of its own (windows.py)
    layout    padded: ids and times (batch, max_len), zeros on the right; jagged: the same rows without the zeros,
              ids and times (tokens,), and offsets (batch + 1,)
    cost      of a sequence, for balancing; by default its length
    """

    def __init__(
        self,
        histories: Histories,
        batch: int = 32,
        max_len: int = 256,
        seed: int = 0,
        order: str = "shuffled",
        rank: int = 0,
        world: int = 1,
        hold_out: int = 1,
        long: str = "last",
        layout: str = "padded",
        cost: Cost | None = None,
    ) -> None:
        self.histories, self.batch, self.max_len, self.seed = histories, batch, max_len, seed
        self.order, self.rank, self.world, self.hold_out = order, rank, world, hold_out
        self.long, self.layout = long, layout
        self.epoch = self.step = 0
        self._check()
        trained = np.maximum(histories.lengths - hold_out, 0)
        users = np.flatnonzero(trained >= 2)  # one item predicts nothing
        cut = windows.chunks(users, trained[users], max_len, batch * world) if long == "chunks" else None
        self._users, self._starts, self._lengths = cut or windows.last(users, trained[users], max_len)
        self.cost = cost or Cost()
        self._order = Order(order, self._lengths, batch, world, seed, self.cost)
        if not len(self):
            raise OptionError(
                f"{len(users)} users with 2 items to train on do not fill a step of {world} ranks with {batch} "
                "each: take a smaller batch, or more users"
            )

    def _check(self) -> None:
        for name, least in (("batch", 1), ("max_len", 2), ("world", 1), ("hold_out", 0), ("seed", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 <= self.rank < self.world:
            raise OptionError(f"rank {self.rank} is not one of {self.world}")
        for name, known in (("long", windows.WAYS), ("layout", LAYOUTS)):
            given = getattr(self, name)
            if given not in known:
                raise OptionError(f"{name}={given!r}: one of {', '.join(known)}{did_you_mean(given, known)}")

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self._order.steps

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """The rest of this epoch; afterwards the next one has begun."""
        epoch = self.epoch
        while self.epoch == epoch:
            yield next(self)

    def __next__(self) -> dict[str, Tensor]:
        """Never ends: epoch follows epoch. A state taken afterwards is after this batch."""
        epoch, step = self.epoch, self.step
        self.epoch, self.step = (epoch, step + 1) if step + 1 < len(self) else (epoch + 1, 0)
        return self.at(epoch, step)

    def forever(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield next(self)

    def at(self, epoch: int, step: int) -> dict[str, Tensor]:
        """The batch of any step; where this one is stays as it is."""
        rows = [self._trained(sample, epoch) for sample in self._samples(epoch, step).tolist()]
        return _jagged(rows) if self.layout == "jagged" else _padded(rows, self.max_len)

    def users(self, epoch: int, step: int) -> np.ndarray:
        """Of this rank in a step: their places in the histories."""
        return self._users[self._samples(epoch, step)]

    def _samples(self, epoch: int, step: int) -> np.ndarray:
        if not 0 <= step < len(self):
            raise OptionError(f"step {step} is not one of the {len(self)} of an epoch")
        return self._order.step(epoch, step)[self.rank]

    @property
    def taken(self) -> int:
        """Batches so far, over all epochs."""
        return self.epoch * len(self) + self.step

    def weight(self, step: int, epoch: int | None = None) -> float:
        """What this rank multiplies its mean loss with, where gradients are averaged over ranks.

        Then they are those of the mean over all predictions of the step, whoever made them. A history of n items gives
        n - 1 predictions.
        """
        if not 0 <= step < len(self):
            raise OptionError(f"step {step} is not one of the {len(self)} of an epoch")
        of_rank = (self._lengths[self._order.step(self.epoch if epoch is None else epoch, step)] - 1).sum(1)
        return float(self.world * of_rank[self.rank] / of_rank.sum())

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Where it is. A loader that reads ahead gives the number of batches that were really trained on."""
        epoch, step = divmod(self.taken if taken is None else taken, len(self))
        return {"epoch": epoch, "step": step, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, mine in self._identity().items():
            if (stored := state.get(name)) != mine:
                raise OptionError(
                    f"the state is of batches with {name}={stored}, and these have {mine}: the rest of the epoch "
                    "would not be the one that was interrupted"
                )
        self.epoch, self.step = state["epoch"], state["step"]

    def _identity(self) -> dict[str, Any]:
        """What decides the order of batches; not the rank, whose states are all alike."""
        names = ("seed", "order", "batch", "max_len", "world", "hold_out", "long")
        interactions = len(self.histories.items)
        mine = {name: getattr(self, name) for name in names} | {"cost": list(dataclasses.astuple(self.cost))}
        return {**mine, "users": len(self._users), "items": interactions}

    def _trained(self, sample: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        user, left_out = int(self._users[sample]), int(self._starts[sample])
        if self.long == "random" and left_out > 0:
            left_out = int(np.random.default_rng((self.seed, epoch, user)).integers(left_out + 1))
        first = int(self.histories.offsets[user]) + left_out
        last = first + int(self._lengths[sample])
        return self.histories.items[first:last], self.histories.times[first:last]

    def evaluation(self, count: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Histories without their last item, and that item as "target" (batch,); the same ones each time.

        `count` users over all ranks, by default all. Ranks get the same number of batches of the same shape: rows that
        fill up the last one repeat another and have target 0, which is not to be counted.
        """
        chosen = self.evaluated(count)
        size = self.batch * self.world
        for at in range(0, len(chosen), size):
            mine = chosen[at : at + size][self.rank :: self.world]
            yield self._evaluated(mine.tolist(), fill=int(chosen[0]))

    def evaluated(self, count: int | None = None) -> np.ndarray:
        """Those users, by their places in the histories."""
        chosen = np.flatnonzero(self.histories.lengths >= 2)
        if count is not None and count < len(chosen):
            chosen = np.random.default_rng((self.seed, _EVALUATED)).permutation(chosen)[:count]
        if not len(chosen):
            raise OptionError("no user has 2 items: nothing to evaluate on")
        return chosen

    def _evaluated(self, users: list[int], fill: int) -> dict[str, Tensor]:
        target = torch.zeros(self.batch, dtype=torch.int64)
        rows = []
        for row, user in enumerate([*users, *[fill] * (self.batch - len(users))]):
            items, times = self.histories.of(user)
            rows.append((items[:-1][-self.max_len :], times[:-1][-self.max_len :]))
            if row < len(users):
                target[row] = int(items[-1])
        return {**_padded(rows, self.max_len), "target": target}


def _padded(rows: list[tuple[np.ndarray, np.ndarray]], width: int) -> dict[str, Tensor]:
    ids, times = np.zeros((2, len(rows), width), dtype=np.int64)
    for row, (items, when) in enumerate(rows):
        ids[row, : len(items)] = items
        times[row, : len(items)] = when
    return {"ids": torch.from_numpy(ids), "times": torch.from_numpy(times)}


def _jagged(rows: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
    offsets = np.cumsum([0, *(len(items) for items, _ in rows)], dtype=np.int64)
    return {
        "ids": torch.from_numpy(np.concatenate([items for items, _ in rows]).astype(np.int64)),
        "times": torch.from_numpy(np.concatenate([times for _, times in rows]).astype(np.int64)),
        "offsets": torch.from_numpy(offsets),
    }
