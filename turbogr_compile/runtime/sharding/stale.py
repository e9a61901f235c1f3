"""Rows that are fetched a step before they are used, and gradients that are pushed a step after: semi-async training.

The line of a loop over `ahead` does, in this order, for batch after batch:

    push gradients of t-1, update the shard          during the forward of t
    route t+1, fetch the rows of t+1                 during the rest of t

Fetches and updates are on one line, so that what a fetch reads depends on nothing but the program: rows of t+1 have
seen the updates up to t-1. What is allowed is checked where rows are used, against counted updates. Rows that are older
than that (in the warm-up, without gradients, after two updates in one step) are fetched again. docs/semi-async.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import TurbogrError
from ...kernels.contract import INT64, Array, Contract
from ...kernels.declare import declare
from ..worker import in_turn
from .delays import Staleness
from .table import SLOTS, Sent, Table, sharded_tables, table_of

if TYPE_CHECKING:
    from torch import nn

ops = torch.ops.turbogr
NEVER = -1  # the version of rows that nobody fetched


class TooStale(TurbogrError):
    """Rows have missed more updates than was allowed."""


def staleness(model: nn.Module) -> dict[str, Staleness]:
    """Of each sharded table that was used, by name."""
    for t in sharded_tables(model):
        t.table.settle()
    return {t.name: t.table.staleness for t in sharded_tables(model) if t.table.staleness.delays}


def allowed(table: Table, bound: int, warmup: int, more: int = 0) -> int:
    """How many updates rows may have missed, now or after some more updates."""
    return bound if table.updates + more >= warmup else 0


def fetch(table: Table, asked: Tensor, sent: list[int], received: list[int]) -> tuple[Tensor, int]:
    """Rows as they are now, and how many updates they have seen. All ranks call."""
    rows = table.shard.index_select(0, asked)
    version = table.applied
    return table.exchange(rows, received, sent, table.ahead), version


# --- ops ---------------------------------------------------------------------------------------------


def stale_rows(
    shard: Tensor, receipts: Tensor, rows: Tensor, version: Tensor, asked: Tensor, sent: list[int], received: list[int],
    table: int, bound: int, warmup: int,
) -> Tensor:  # fmt: skip
    """Rows that were fetched before, if they are as new as they must be; else fetched now."""
    owner = table_of(table)
    owner.calls += 1
    most, seen, seeing = allowed(owner, bound, warmup), int(version), owner.staleness
    if seen == NEVER or owner.updates - seen > most:
        seeing.again += seen != NEVER
        rows, seen = in_turn(fetch, owner, asked, sent, received)
    delay = owner.updates - seen
    if delay > most:
        raise TooStale(
            f"rows of table {owner.name!r} have missed {delay} updates, and at most {most} is allowed: an update was "
            "not applied; look for an error before this one"
        )
    seeing.delays[delay] += 1
    return rows.clone()


def _stale_fake(
    shard: Tensor, receipts: Tensor, rows: Tensor, version: Tensor, asked: Tensor, sent: Any, received: Any, table: int,
    bound: int, warmup: int,
) -> Tensor:  # fmt: skip
    return torch.empty_like(rows)


def _stale_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, _, _, asked, ctx.sent, ctx.received, ctx.table, _, _ = inputs
    ctx.save_for_backward(asked)


def _stale_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (asked,) = ctx.saved_tensors
    receipt = ops.keep_sent(grad, asked, ctx.sent, ctx.received, ctx.table)
    return None, receipt, None, None, None, None, None, None, None, None


def keep_sent(grad: Tensor, asked: Tensor, sent: list[int], received: list[int], table: int) -> Tensor:
    """Put gradients of rows that came from other ranks into the table's journal; they travel when a step takes them."""
    # Copies: who runs the graph may use the memory of both again.
    values = grad.clone(memory_format=torch.contiguous_format)
    return table_of(table).put(asked.clone(), values, Sent(list(sent), list(received)))


def _keep_fake(grad: Tensor, asked: Tensor, sent: Any, received: Any, table: int) -> Tensor:
    return grad.new_empty(SLOTS + 1, dtype=torch.float32)


declare(
    "keep_sent(Tensor grad, Tensor asked, SymInt[] sent, SymInt[] received, int table) -> Tensor",
    Contract(grad=Array("N D", None), asked=Array("...", INT64)),
    reference=keep_sent,
    fake=_keep_fake,
)
declare(
    "stale_rows(Tensor shard, Tensor receipts, Tensor rows, Tensor version, Tensor asked, SymInt[] sent, "
    "SymInt[] received, int table, int bound, int warmup) -> Tensor",
    Contract(shard=Array("R D"), rows=Array("N D", None), asked=Array("_", INT64)),
    reference=stale_rows,
    fake=_stale_fake,
    backward=_stale_backward,
    save=_stale_save,
)
