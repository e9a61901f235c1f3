"""The ops behind `ShardedEmbedding`. Autograd sees rows: no gradient is as large as a shard.

`sharded_lookup` does everything itself and is right wherever a model runs: eager, any compiler, any backend. What
`expand-lookups` makes of it finds out about rows beforehand, and has only `fetch_rows` and an exchange in the graph.
Both hand gradients to the owners of the rows, and return a receipt for them (see table.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.contract import INT64, Array, Contract, Range
from ...kernels.declare import declare
from .routing import route
from .table import SLOTS, table_of

ops = torch.ops.turbogr


# --- the whole lookup --------------------------------------------------------------------------------


def sharded_lookup(shard: Tensor, receipts: Tensor, ids: Tensor, table: int) -> Tensor:
    """Rows of a table by id, wherever they are. All ranks must call, with ids of any number."""
    owner = table_of(table)
    way = route(owner, [ids])
    owner.settle()
    got = owner.exchange(shard.index_select(0, way.asked), way.received, way.sent)
    (place,) = way.places
    rows = got.index_select(0, place.reshape(-1))
    if owner.layout.pieces == 1:
        return rows.view(*ids.shape, owner.layout.width)
    whole = rows.view(*ids.shape, owner.layout.pieces * owner.layout.piece)
    return whole[..., : owner.layout.width].contiguous()


def _lookup_fake(shard: Tensor, receipts: Tensor, ids: Tensor, table: int) -> Tensor:
    return shard.new_empty((*ids.shape, table_of(table).layout.width))


def _lookup_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, ids, ctx.table = inputs
    ctx.save_for_backward(ids)


def _lookup_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    return None, ops.sharded_push(grad, ids, ctx.table), None, None


def sharded_push(grad: Tensor, ids: Tensor, table: int) -> Tensor:
    """Gradients of what was looked up, summed by row and handed to the owners of the rows."""
    owner = table_of(table)
    way, layout = route(owner, [ids]), owner.layout
    (place,) = way.places
    slopes = grad.reshape(-1, layout.width)
    if layout.pieces > 1:
        whole = slopes.new_zeros((slopes.shape[0], layout.pieces * layout.piece))
        whole[:, : layout.width] = slopes
        slopes = whole.view(-1, layout.piece)
    sums = slopes.new_zeros((sum(way.received), layout.piece)).index_add_(0, place.reshape(-1), slopes)
    return owner.put(way.asked, owner.exchange(sums, way.sent, way.received))


def _push_fake(grad: Tensor, ids: Tensor, table: int) -> Tensor:
    return grad.new_empty(SLOTS + 1, dtype=torch.float32)


# --- the part that stays in the graph ----------------------------------------------------------------


def fetch_rows(shard: Tensor, receipts: Tensor, asked: Tensor, table: int) -> Tensor:
    """Rows of this rank's shard; their gradients go into the table's journal."""
    owner = table_of(table)
    owner.settle()
    owner.calls += 1
    return shard.index_select(0, asked)


def _fetch_fake(shard: Tensor, receipts: Tensor, asked: Tensor, table: int) -> Tensor:
    return shard.new_empty((asked.shape[0], shard.shape[1]))


def _fetch_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, asked, ctx.table = inputs
    ctx.save_for_backward(asked)


def _fetch_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (asked,) = ctx.saved_tensors
    return None, ops.keep_rows(grad, asked, ctx.table), None, None


def keep_rows(grad: Tensor, asked: Tensor, table: int) -> Tensor:
    """Put gradients of rows into the table's journal."""
    # Copies: who runs the graph may use the memory of both again.
    return table_of(table).put(asked.clone(), grad.clone(memory_format=torch.contiguous_format))


declare(
    "sharded_push(Tensor grad, Tensor ids, int table) -> Tensor",
    Contract(ids=Array("...I", None), grad=Array("...I D", None)),
    reference=sharded_push,
    fake=_push_fake,
)
declare(
    "sharded_lookup(Tensor shard, Tensor receipts, Tensor ids, int table) -> Tensor",
    Contract(shard=Array("R D"), receipts=Array("...", None), ids=Array("...I", None)),
    reference=sharded_lookup,
    fake=_lookup_fake,
    backward=_lookup_backward,
    save=_lookup_save,
)
declare(
    "keep_rows(Tensor grad, Tensor asked, int table) -> Tensor",
    Contract(grad=Array("N D", None), asked=Array("N", INT64)),
    reference=keep_rows,
    fake=_push_fake,
)
declare(
    "fetch_rows(Tensor shard, Tensor receipts, Tensor asked, int table) -> Tensor",
    Contract(shard=Array("R D"), receipts=Array("...", None), asked=Array("N", INT64, Range("R"))),
    reference=fetch_rows,
    fake=_fetch_fake,
    backward=_fetch_backward,
    save=_fetch_save,
)
