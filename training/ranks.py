"""One process, or one of several that torchrun started: the same loop for both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks:
    """Which of how many; sums over all of them."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def several(self) -> bool:
        return self.count > 1

    def add_up(self, x: Tensor) -> Tensor:
        if self.several:
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Of all ranks, one behind the other; each has as much."""
        if not self.several:
            return x
        every = x.new_empty((self.count * len(x), *x.shape[1:]))
        dist.all_gather_into_tensor(every, x.contiguous())
        return every

    def meet(self) -> None:
        if self.several:
            dist.barrier()


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks of this job; torchrun says in the environment how to find them."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield Ranks()
        return
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo" if not torch.accelerator.is_available() else None)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        if made:
            dist.destroy_process_group()
