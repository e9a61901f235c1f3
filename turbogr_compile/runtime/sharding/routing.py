"""Who asks whom for which rows: depends on ids alone, so it can be known before the step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..prologue import RanksApart
from .table import Table

_INT32 = 2**31


class Route(NamedTuple):
    """Of one or more lookups in one table."""

    asked: Tensor  # rows of my shard that the ranks ask for, rank by rank
    places: list[Tensor]  # for each lookup, where among the rows that I get each id finds its own
    sent: list[int]  # rows that I send to each rank
    received: list[int]  # and get of each


def route(table: Table, lookups: Sequence[Tensor], group: Any = None, turn: int | None = None) -> Route:
    """Each row is asked for once, however often it is looked up. All ranks of the group must call.

    Ranks that give a `turn` (how many calls were made so far) find out where theirs differ.
    """
    group, layout = group or table.group, table.layout
    for ids in lookups:
        check_ids(table, ids)
    addresses = [layout.addresses(ids.long()) for ids in lookups]
    flat = [a.reshape(-1) for a in addresses]
    unique, inverse = torch.unique(flat[0] if len(flat) == 1 else torch.cat(flat), return_inverse=True)
    parts = inverse.split([a.shape[0] for a in flat])
    places = [part.view(a.shape) for part, a in zip(parts, addresses, strict=True)]
    wanted = layout.wanted(unique)
    if turn is None:
        counts = torch.empty_like(wanted)
        dist.all_to_all_single(counts, wanted, group=group)
    else:
        counts = meet(table, wanted, group, turn, leaving=False)
    sent, received = counts.tolist(), wanted.tolist()
    local = layout.local(unique)
    if layout.per_rank < _INT32:
        local = local.int()
    asked = local.new_empty(sum(sent))
    dist.all_to_all_single(asked, local, sent, received, group=group)
    return Route(asked.long(), places, sent, received)


# --- ranks that must meet ----------------------------------------------------------------------------


def leave(table: Table, group: Any, turn: int) -> None:
    """In the place of a route: this rank has no further batch. Raises where another one has."""
    device = table.shard.device
    meet(table, torch.zeros(table.layout.ranks, dtype=torch.int64, device=device), group, turn, leaving=True)


def meet(table: Table, wanted: Tensor, group: Any, turn: int, leaving: bool) -> Tensor:
    """How many rows each rank wants of this one; each says with it what it is about to do, and all must do the same."""
    mine = [turn, int(leaving), zlib.crc32(table.name.encode())]
    words = torch.cat([wanted[:, None], wanted.new_tensor(mine).expand(len(wanted), -1)], 1)
    got = torch.empty_like(words)
    dist.all_to_all_single(got, words, group=group)
    said = got[:, 1:].tolist()
    for rank, theirs in enumerate(said):
        if theirs != mine:
            raise RanksApart(_apart(table, group, rank, theirs, mine))
    return got[:, 0].contiguous()


def _apart(table: Table, group: Any, rank: int, theirs: list[int], mine: list[int]) -> str:
    ranks = dist.get_process_group_ranks(group)
    me = ranks[dist.get_rank(group)]

    def does(words: list[int]) -> str:
        turn, leaving, name = words
        if leaving:
            return f"has no batch left (after {turn} lookups)"
        what = f"table {table.name!r}" if name == mine[2] else "another table"
        return f"asks for rows of {what} (after {turn} lookups)"

    return (
        f"ranks have come apart: rank {ranks[rank]} {does(theirs)}, and rank {me} {does(mine)}. All ranks must loop "
        "over `turbogr_compile.ahead` with the same number of batches, and leave the loop at the same one: use "
        "drop_last and a DistributedSampler, and let all ranks decide together when to stop"
    )


def check_ids(table: Table, ids: Tensor) -> None:
    """Before the exchange: the rank that has the wrong id says so, and not the owner of a row that does not exist."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"table {table.name!r}: ids must be int64 or int32, not {ids.dtype}")
    if ids.numel():
        least, most = (int(x) for x in ids.aminmax())
        if least < 0 or most >= table.layout.rows:
            wrong = least if least < 0 else most
            raise IndexError(f"table {table.name!r} has rows 0 to {table.layout.rows - 1}, and {wrong} was looked up")
