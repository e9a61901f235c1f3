"""What a process knows of one sharded table: layout, groups, and the gradients of its rows that wait for a step.

Ops name a table by its number. Gradients are handed over outside of autograd, since they are as large as the rows that
were asked for, not as the shard: a backward op puts them into the table's journal and returns a receipt, which autograd
adds up in `receipts.grad`. So what counts in a step is decided as for any parameter: `backward()` counts, twice if run
twice, `torch.autograd.grad` does not, and `zero_grad()` forgets.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import TurbogrError
from ..worker import current, on_line, without_gradient
from .delays import Staleness
from .layout import Layout

ops = torch.ops.turbogr
SLOTS = 1024  # gradients of one table that may wait for a step
# Outweighs the slot: two runs whose gradients are compared within rounding get other slots, and agree.
_WEIGHT = float(2**20)
_NUMBERS = itertools.count()


class RowGradient(NamedTuple):
    """Rows of a shard, each once, and the gradient of each; ascending where ranks exchange them."""

    rows: Tensor
    values: Tensor


class Sent(NamedTuple):
    """How many rows went to each rank and came of each: gradients go the way back."""

    sent: list[int]
    received: list[int]


class Kept(NamedTuple):
    """Gradients of rows of this shard; of rows that came from others as long as `way` says how to send them back."""

    rows: Tensor
    values: Tensor
    way: Sent | None = None


@dataclass(eq=False)
class Table:
    """One sharded table, as one rank sees it."""

    name: str
    layout: Layout
    group: Any  # the ranks that share the table; None where it is this process's own
    ahead: Any  # the same ranks, for exchanges that run beside the step
    replicas: Any = None  # the ranks that have the same rows as this one; None for no others
    scale: float = 1.0  # of gradients: one over the number of ranks where losses are means
    wire: torch.dtype | None = None
    padding: int = -1  # row of this shard that has no gradient
    number: int = field(default_factory=lambda: next(_NUMBERS))
    journal: dict[int, Kept] = field(default_factory=dict)
    home: Callable[[], Any] = field(default=lambda: None)  # the module that has the shard, while there is one
    calls: int = 0  # lookups that were taken apart and ran
    updates: int = 0  # steps that optimizers took
    applied: int = 0  # those of them that are in the shard
    handed: Tensor | None = None  # rows that were handed out since the last update, ahead of their use
    staleness: Staleness = field(default_factory=Staleness)
    half: Any = None  # a copy in FP16 (halves.py), where steps read one
    _pending: Future[None] | None = None  # the last update that is on the line

    def __post_init__(self) -> None:
        _TABLES[self.number] = self

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def shard(self) -> Tensor:
        module = self.home()
        if module is None:
            raise TurbogrError(f"the module of table {self.name!r} is gone")
        return module.shard

    def exchange(self, rows: Tensor, receive: list[int], send: list[int], group: Any = None) -> Tensor:
        """Rows sent to each rank and got of each, in the dtype of the wire."""
        sent = rows.contiguous() if self.wire is None else rows.to(self.wire)
        got = sent.new_empty((sum(receive), *sent.shape[1:]))
        dist.all_to_all_single(got, sent, receive, send, group=group or self.group)
        return got.to(rows.dtype)

    # --- gradients ---------------------------------------------------------------------------------

    def put(self, rows: Tensor, values: Tensor, way: Sent | None = None) -> Tensor:
        """Keep gradients of rows; the receipt says where."""
        if len(self.journal) == SLOTS:
            raise TurbogrError(
                f"table {self.name!r} has gradients of {SLOTS} lookups that no optimizer took: call step() or "
                "zero_grad() of the optimizer that was made for it"
            )
        slot = next(i for i in range(SLOTS) if i not in self.journal)
        self.journal[slot] = Kept(rows, values, way)
        receipt = values.new_zeros(SLOTS + 1, dtype=torch.float32)
        receipt[slot], receipt[SLOTS] = 1.0, _WEIGHT
        return receipt

    def take(self, receipts: Tensor | None, shard: Tensor) -> RowGradient | None:
        """What has gathered for a step, summed over all ranks; the journal is empty afterwards. None for nothing."""
        return self._total(self._counted(receipts), shard)

    def merge(self, receipts: Tensor | None) -> Tensor | None:
        """Receipts for what has gathered, as one gradient with each row once: for steps of many backwards."""
        if len(self.journal) < 2 or any(k.way for k in self.journal.values()):
            return receipts
        found = self._summed([(k.rows, k.values) for k in self._counted(receipts)])
        return None if found is None else self.put(*found)

    def update(self, receipts: Tensor | None, shard: Tensor, apply: Callable[[RowGradient], None]) -> None:
        """Apply what `take` gives; later, beside the next step, where the rows were fetched ahead of theirs."""
        self.settle()  # the update before, which is due: ranks find out in the same step that one failed
        kept, line = self._counted(receipts), current()
        self.updates += 1
        if line is None or not any(k.way for k in kept):
            self._update(kept, shard, apply)
        else:
            self._pending = line.submit(without_gradient, self._update, kept, shard, apply, keep=True)

    def settle(self) -> None:
        """Afterwards the shard has all updates. One that failed on the line fails here."""
        if self._pending is None or on_line():
            return
        error, self._pending = self._pending.exception(), None
        if error is not None:
            said = f"{type(error).__name__}: {error}"
            raise TurbogrError(f"an update of table {self.name!r} failed beside the step: {said}") from error

    def _update(self, kept: Sequence[Kept], shard: Tensor, apply: Callable[[RowGradient], None]) -> None:
        found = self._total(kept, shard)
        handed, self.handed = self.handed, None
        if handed is not None:
            self.staleness.overtaken(handed, (found or _nothing(shard)).rows)
        if found is not None and found.rows.numel():
            apply(found)
        self.applied += 1

    def counted(self, receipts: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and gradients that receipts stand for; they stay where they are."""
        return ((k.rows, k.values) for k in self._standing_for(receipts))

    def _counted(self, receipts: Tensor | None) -> list[Kept]:
        kept = list(self._standing_for(receipts))
        self.journal = {}
        return kept

    def _standing_for(self, receipts: Tensor | None) -> Iterator[Kept]:
        counts = receipts.tolist() if receipts is not None else [0.0] * SLOTS
        for slot, k in self.journal.items():
            if counts[slot]:
                yield k if counts[slot] == 1 else k._replace(values=k.values * counts[slot])

    def _total(self, kept: Sequence[Kept], shard: Tensor) -> RowGradient | None:
        found = self._summed([self._arrived(k) for k in kept])
        if self.replicas is not None:
            found = self._summed(gather(self.replicas, found or _nothing(shard)))
        if found is None:
            return None
        return RowGradient(found.rows, found.values * self.scale) if self.scale != 1 else found

    def _arrived(self, kept: Kept) -> tuple[Tensor, Tensor]:
        if kept.way is None:
            return kept.rows, kept.values
        return kept.rows, self.exchange(kept.values, kept.way.sent, kept.way.received, self.ahead)

    def _summed(self, parts: Sequence[tuple[Tensor, Tensor]]) -> RowGradient | None:
        """In the order of parts, which is that of lookups and, within each, of ranks."""
        if not parts:
            return None
        if self.group is None:
            return _together(self.padding, parts)
        rows, values = (torch.cat(each) for each in zip(*parts, strict=True))
        if self.padding >= 0:
            trained = rows != self.padding
            rows, values = rows[trained], values[trained]
        return RowGradient(*ops.coalesce_rows(values, rows))


def _together(padding: int, parts: Sequence[tuple[Tensor, Tensor]]) -> RowGradient:
    """Of parts that name each row once: the others' gradients are added to those of the largest, where they are."""
    largest = max(range(len(parts)), key=lambda i: parts[i][0].numel())
    rows, values = parts[largest]
    others = [part for i, part in enumerate(parts) if i != largest]
    if others:
        named, sums = ops.coalesce_rows(*(torch.cat(each) for each in zip(*((v, r) for r, v in others), strict=True)))
        place, known = _places(rows, named)
        at = place[known]
        values.index_copy_(0, at, values.index_select(0, at).add_(sums[known]))
        if not known.all():
            rows, values = torch.cat([rows, named[~known]]), torch.cat([values, sums[~known]])
    if padding >= 0:
        trained = rows != padding
        if not trained.all():
            rows, values = rows[trained], values[trained]
    return RowGradient(rows, values)


def _places(rows: Tensor, named: Tensor) -> tuple[Tensor, Tensor]:
    """Where among rows each named one is, and whether it is there."""
    if not len(rows):
        return torch.zeros_like(named), torch.zeros_like(named, dtype=torch.bool)
    order = None if bool((rows[1:] > rows[:-1]).all()) else rows.argsort()
    place = torch.searchsorted(rows, named, sorter=order).clamp_(max=len(rows) - 1)
    place = place if order is None else order[place]
    return place, rows[place] == named


def _nothing(shard: Tensor) -> RowGradient:
    return RowGradient(torch.zeros(0, dtype=torch.int64, device=shard.device), shard.new_zeros((0, shard.shape[1])))


_TABLES: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()


def table_of(number: int) -> Table:
    found = _TABLES.get(number)
    if found is None:
        raise TurbogrError(f"no sharded table has the number {number} in this process: its module is gone")
    return found


def gather(group: Any, mine: RowGradient) -> list[tuple[Tensor, Tensor]]:
    """What each rank of a group has, in the order of ranks; the same on all of them."""
    ranks = dist.get_world_size(group)
    count = torch.tensor([mine.rows.shape[0]], device=mine.rows.device)
    counts = count.new_empty(ranks)
    dist.all_gather_into_tensor(counts, count, group=group)
    sizes = counts.tolist()
    most = max(sizes)
    if not most:
        return []
    rows = _padded(mine.rows, most)
    values = _padded(mine.values, most)
    all_rows = [torch.empty_like(rows) for _ in range(ranks)]
    all_values = [torch.empty_like(values) for _ in range(ranks)]
    dist.all_gather(all_rows, rows, group=group)
    dist.all_gather(all_values, values, group=group)
    return [(r[:n], v[:n]) for r, v, n in zip(all_rows, all_values, sizes, strict=True)]


def _padded(x: Tensor, rows: int) -> Tensor:
    padded = x.new_zeros((rows, *x.shape[1:]))
    padded[: x.shape[0]] = x
    return padded


def sharded_tables(model: nn.Module) -> list[Any]:
    """The modules of a model that hold a sharded table, in the order of its modules."""
    return [m for m in model.modules() if isinstance(getattr(m, "table", None), Table)]
