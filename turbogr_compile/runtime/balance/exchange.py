"""Balancing batches that ranks have already loaded: lengths are gathered, every rank plans, samples move.

planner = Planner(cost)
plan = planner.plan(batch.lengths)                     # collective; or start() two steps ahead, result() when needed
batch = exchange(batch, plan)                          # collective
loss = model(batch) * loss_weight(plan, rank)
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import OptionError, TurbogrError
from .balancer import Balancer
from .cost import Cost
from .plan import Plan


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sequences of one rank without padding: `values` have a row per token, `samples` a row per sequence."""

    offsets: Tensor
    values: dict[str, Tensor] = field(default_factory=dict)
    samples: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, count = int(self.offsets[-1]), len(self.offsets) - 1
        for kind, tensors, wanted in (("values", self.values, rows), ("samples", self.samples, count)):
            for name, tensor in tensors.items():
                if len(tensor) != wanted:
                    raise OptionError(f"{kind}[{name!r}] has {len(tensor)} rows, and the offsets say {wanted}")

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    @classmethod
    def of_padded(cls, values: dict[str, Tensor], lengths: Tensor, samples: dict[str, Tensor] | None = None) -> Ragged:
        """From (sequences, columns, ...) padded on the right."""
        columns = next(iter(values.values())).shape[1]
        kept = torch.arange(columns, device=lengths.device) < lengths[:, None]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        return cls(offsets, {name: tensor[kept] for name, tensor in values.items()}, samples or {})

    def padded(self, columns: int | None = None, fill: float = 0) -> dict[str, Tensor]:
        """Back to (sequences, columns, ...), padded on the right."""
        lengths = self.lengths
        columns = int(lengths.max()) if columns is None and len(lengths) else columns or 0
        kept = torch.arange(columns, device=lengths.device) < lengths[:, None]
        wide = {}
        for name, tensor in self.values.items():
            wide[name] = tensor.new_full((len(lengths), columns, *tensor.shape[1:]), fill)
            wide[name][kept] = tensor
        return wide


class Planner:
    """Plans together with the other ranks of a group. All ranks call it in the same order."""

    def __init__(
        self, cost: Cost | None = None, balancer: Balancer | None = None, group: dist.ProcessGroup | None = None
    ) -> None:
        self.cost, self.balancer, self.group = cost or Cost(), balancer or Balancer(), group
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="turbogr-balance")

    def plan(self, lengths: Tensor) -> Plan:
        """Of the step whose lengths on this rank are given."""
        return self.start(lengths).result()

    def start(self, lengths: Tensor) -> Pending:
        """Gather lengths now, plan on a thread. Call result() in the same order on all ranks."""
        gathered = _gather(lengths, self.group)
        return Pending(self._threads.submit(self._plan, gathered), self.group, lengths.device)

    def _plan(self, gathered: list[np.ndarray]) -> Plan:
        lengths = np.concatenate(gathered)
        held = [len(part) for part in gathered]
        return self.balancer.plan(self.cost(lengths), len(gathered), held, lengths)


@dataclass(frozen=True, eq=False)
class Pending:
    """A plan that is being made."""

    future: Future[Plan]
    group: dist.ProcessGroup | None
    device: torch.device

    def result(self) -> Plan:
        """The plan, once all ranks have shown that theirs is the same."""
        plan = self.future.result()
        mine = torch.tensor([plan.digest], dtype=torch.int64, device=self.device)
        digests = [int(part[0]) for part in _all_gather(mine, self.group)]
        if others := [rank for rank, digest in enumerate(digests) if digest != plan.digest]:
            raise TurbogrError(
                f"rank {dist.get_rank(self.group)} and rank {others[0]} made different plans from the same lengths: "
                "give all ranks the same cost, balancer and version of turbogr and NumPy"
            )
        return plan


def exchange(batch: Ragged, plan: Plan, group: dist.ProcessGroup | None = None) -> Ragged:
    """The samples that the plan gives this rank, in the order of the global batch. Data only: no gradients."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    if world != plan.world:
        raise OptionError(f"the plan is for {plan.world} ranks, and the group has {world}")
    here = plan.given == rank
    lengths = plan.lengths[here]
    if not np.array_equal(lengths, batch.lengths.cpu().numpy()):
        raise OptionError(f"rank {rank}: the plan was made for other lengths than this batch has")
    target = plan.ranks[here]
    order = np.argsort(target, kind="stable")
    coming = plan.ranks == rank
    source = plan.given[coming]
    device = batch.offsets.device

    rows = _rows(np.concatenate([[0], lengths.cumsum()])[:-1][order], lengths[order])
    by_token = _splits(target, lengths, world), _splits(source, plan.lengths[coming], world)
    by_sample = _splits(target, None, world), _splits(source, None, world)
    offsets = np.concatenate([[0], plan.lengths[coming].cumsum()])
    return Ragged(
        torch.from_numpy(offsets).to(device, batch.offsets.dtype),
        {name: _move(t, torch.from_numpy(rows).to(device), *by_token, group) for name, t in batch.values.items()},
        {name: _move(t, torch.from_numpy(order).to(device), *by_sample, group) for name, t in batch.samples.items()},
    )


def _rows(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows of sequences one after another."""
    before = lengths.cumsum() - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def _splits(ranks: np.ndarray, sizes: np.ndarray | None, world: int) -> list[int]:
    return np.bincount(ranks, sizes, world).astype(np.int64).tolist()


def _move(
    tensor: Tensor, order: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    sent = tensor.detach()[order].contiguous()
    received = sent.new_empty((sum(receive), *sent.shape[1:]))
    dist.all_to_all_single(received, sent, receive, send, group=group)
    return received


def _gather(lengths: Tensor, group: dist.ProcessGroup | None) -> list[np.ndarray]:
    """Lengths of all ranks, which may have different numbers of them."""
    counts = [int(part[0]) for part in _all_gather(lengths.new_tensor([len(lengths)], dtype=torch.int64), group)]
    padded = lengths.new_zeros(max(counts), dtype=torch.int64)
    padded[: len(lengths)] = lengths
    return [part[:n].cpu().numpy() for part, n in zip(_all_gather(padded, group), counts, strict=True)]


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return parts
