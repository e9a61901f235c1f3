"""Ranks that act as one: what the first decides holds for all, and what one says all hear. Also without any ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Together:
    """The ranks of a group, of the whole job by default; one process where no group was made."""

    def __init__(self, group: Any = None) -> None:
        self.many = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if self.many else 0
        self.count = dist.get_world_size(group) if self.many else 1

    def gather(self, mine: T) -> list[T]:
        """What each rank has, in the order of ranks."""
        if not self.many:
            return [mine]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def each(self, act: Callable[[], T]) -> list[T]:
        """What `act` returned on each rank, in the order of ranks; what it raised on one of them, on all."""
        outcomes = self.gather(_outcome(act))
        for _, failed in outcomes:
            if failed is not None:
                raise failed
        return [result for result, _ in outcomes]

    def decide(self, act: Callable[[], T]) -> T:
        """What `act` returned on the first rank, or raised there: on all of them, and after it is done."""
        outcome: list[Any] = _outcome(act) if self.rank == 0 else [None, None]
        if self.many:
            dist.broadcast_object_list(outcome, group_src=0, group=self.group or dist.group.WORLD)
        result, failed = outcome[0], outcome[1]
        if failed is not None:
            raise failed
        return result


def _outcome(act: Callable[[], Any]) -> list[Any]:
    try:
        return [act(), None]
    except Exception as error:
        return [None, error]
