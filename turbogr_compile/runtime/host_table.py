"""A table that stays in host memory, of which a step sees the rows of its batch.

    table = HostTable(torch.empty(items, 128), device="npu")
    for batch in turbogr_compile.ahead(loader):
        rows, places = table.rows(batch["ids"])           # unique rows on the device, and where each id finds its own
        loss = step(F.embedding(places, rows), batch)
        loss.backward()
        table.apply(lambda ids, rows, gradient: rows - 0.1 * gradient)

In a loop over `ahead`, the rows of the next batch are gathered by the worker while the step runs, into a second buffer.
What `apply` writes meanwhile is fetched again before it is used, so that results are those of a table on the device.
With `staleness=1` it is not: rows are then as they were before the last update, always, and `apply` waits for a gather
under way before it writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .. import _torch
from ..errors import TurbogrError
from .ahead import Sight, sight_of

Update = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Rows(NamedTuple):
    """Rows of a batch, each once, on the device; `places` says, in the shape of the ids, which is whose."""

    rows: torch.Tensor
    places: torch.Tensor


@dataclass(eq=False)
class Gather:
    """Rows of a batch to come, in the making."""

    ids: torch.Tensor
    version: int | None
    batch: int
    values: Future[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    overtaken: list[torch.Tensor] = field(default_factory=list)  # ids of rows that were written since


class HostTable:
    """Rows in host memory, looked up and updated batch by batch."""

    def __init__(self, weight: torch.Tensor, *, device: torch.device | str = "cpu", staleness: int = 0) -> None:
        if weight.ndim != 2 or weight.device.type != "cpu":
            raise TurbogrError(f"a host table is a matrix in host memory, got {tuple(weight.shape)} on {weight.device}")
        if staleness not in (0, 1):
            raise TurbogrError(f"staleness is 0 (exact) or 1 (rows from before the last update), got {staleness}")
        self.weight, self.device, self.staleness = weight.detach(), torch.device(device), staleness
        self.ahead, self.at_once, self.refreshed = 0, 0, 0  # lookups gathered ahead, or not; rows fetched again
        self._used: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._gathers: weakref.WeakSet[Gather] = weakref.WeakSet()

    def rows(self, ids: torch.Tensor) -> Rows:
        """The rows of a batch's ids; their gradients are what `apply` gets."""
        sight = sight_of(ids)
        found = self._gathered(ids, sight) if sight is not None else None
        if found is None:
            self.at_once += 1
            found = self._gather(ids)
        unique, places, rows = found
        if sight is not None and not sight.ends:
            self._announce(sight.after(ids), sight)
        if torch.is_grad_enabled():
            self._used.append((unique, rows.requires_grad_()))
        return Rows(rows, places)

    @torch.no_grad()
    def apply(self, update: Update) -> None:
        """Write `update(ids, rows, gradient)` to the rows that gradients were computed for since the last time."""
        used, self._used = [(ids, r.grad) for ids, r in self._used if r.grad is not None], []
        if not used:
            return
        ids, where = torch.cat([ids for ids, _ in used]).unique(return_inverse=True)
        every = torch.cat([g.to("cpu") for _, g in used])
        gradient = every.new_zeros(len(ids), every.shape[1]).index_add_(0, where, every)
        updated = update(ids, self.weight.index_select(0, ids), gradient)
        for gather in list(self._gathers):
            if self.staleness:
                gather.values.exception()  # a row is old or new, never half of each
            gather.overtaken.append(ids)
        self.weight.index_copy_(0, ids, updated)

    # --- one batch ahead ---------------------------------------------------------------------------

    @torch.no_grad()
    def _gather(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        unique, places = ids.to("cpu").unique(return_inverse=True)
        return unique, places.to(self.device), self.weight.index_select(0, unique).to(self.device)

    def _announce(self, ids: Any, sight: Sight) -> None:
        if not isinstance(ids, torch.Tensor) or (self, id(ids)) in sight.announced:
            return
        gather = Gather(ids, _torch.version_of(ids), sight.batch + 1, sight.submit(self._gather, ids))
        self._gathers.add(gather)
        sight.announced[self, id(ids)] = gather

    def _gathered(self, ids: torch.Tensor, sight: Sight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        gather = sight.announced.pop((self, id(ids)), None)
        if gather is None or gather.version is None or gather.version != _torch.version_of(ids):
            return None
        self._gathers.discard(gather)
        try:
            unique, places, rows = gather.values.result()
        except Exception as error:
            raise TurbogrError(f"gathering rows ahead failed: {type(error).__name__}: {error}") from error
        self.ahead += 1
        if gather.overtaken and not self.staleness:
            old = torch.isin(unique, torch.cat(gather.overtaken)).nonzero().squeeze(1)
            self.refreshed += len(old)
            rows.index_copy_(0, old.to(self.device), self.weight.index_select(0, unique[old]).to(self.device))
        return unique, places, rows
