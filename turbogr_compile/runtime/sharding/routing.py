"""Who asks whom for which rows: depends on ids alone, so it can be known before the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .table import Table

_INT32 = 2**31


class Route(NamedTuple):
    """Of one or more lookups in one table."""

    asked: Tensor  # rows of my shard that the ranks ask for, rank by rank
    places: list[Tensor]  # for each lookup, where among the rows that I get each id finds its own
    sent: list[int]  # rows that I send to each rank
    received: list[int]  # and get of each


def route(table: Table, lookups: Sequence[Tensor], group: Any = None) -> Route:
    """Each row is asked for once, however often it is looked up. All ranks of the group must call."""
    group, layout = group or table.group, table.layout
    for ids in lookups:
        check_ids(table, ids)
    addresses = [layout.addresses(ids.long()) for ids in lookups]
    flat = [a.reshape(-1) for a in addresses]
    unique, inverse = torch.unique(flat[0] if len(flat) == 1 else torch.cat(flat), return_inverse=True)
    parts = inverse.split([a.shape[0] for a in flat])
    places = [part.view(a.shape) for part, a in zip(parts, addresses, strict=True)]
    wanted = layout.wanted(unique)
    counts = torch.empty_like(wanted)
    dist.all_to_all_single(counts, wanted, group=group)
    sent, received = counts.tolist(), wanted.tolist()
    local = layout.local(unique)
    if layout.per_rank < _INT32:
        local = local.int()
    asked = local.new_empty(sum(sent))
    dist.all_to_all_single(asked, local, sent, received, group=group)
    return Route(asked.long(), places, sent, received)


def check_ids(table: Table, ids: Tensor) -> None:
    """Before the exchange: the rank that has the wrong id says so, and not the owner of a row that does not exist."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"table {table.name!r}: ids must be int64 or int32, not {ids.dtype}")
    if ids.numel():
        least, most = (int(x) for x in ids.aminmax())
        if least < 0 or most >= table.layout.rows:
            wrong = least if least < 0 else most
            raise IndexError(f"table {table.name!r} has rows 0 to {table.layout.rows - 1}, and {wrong} was looked up")


def exchange(table: Table, rows: Tensor, receive: list[int], send: list[int]) -> Tensor:
    """Rows sent to each rank and got of each, in the dtype of the wire."""
    sent = rows.contiguous() if table.wire is None else rows.to(table.wire)
    got = sent.new_empty((sum(receive), *sent.shape[1:]))
    dist.all_to_all_single(got, sent, receive, send, group=table.group)
    return got.to(rows.dtype)
