"""Gradient of a table whose rows were looked up and multiplied with queries: a sum for each row, in a fixed order."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .contract import INT64, REAL, Array, Range, Whole, together
from .cpu import table_gradient as cpu
from .declare import accumulator, as_given, declare
from .lookup import GROUP, LOOKUP, parts


def table_gradient(
    slopes: Tensor, own_slopes: Tensor | None, query: Tensor, table: Tensor, ids: Tensor, own_ids: Tensor | None,
    group: int, eps: float,
) -> Tensor:  # fmt: skip
    """Gradient of the table where slopes[n, m] is that of the score of entry n of ids and member m of its group.

    Positions are in groups of `group`, the last of which may be shorter: entry n, at position n // K, meets all queries
    of its group. own_slopes[t] belongs to query t and row own_ids[t].
    """
    positions, each = ids.shape
    real = accumulator(query.dtype)
    total = table.new_zeros(table.shape, dtype=real)
    with as_given(query):
        wide, slopes = query.to(real), slopes.to(real).view(positions, each, group)
        for part in parts(positions, each * query.shape[1]):
            first = torch.arange(part.start, part.stop, device=ids.device) // group * group
            for member in range(min(group, positions)):
                there = first + member < positions
                one = wide[(first + member).clamp_max(max(positions - 1, 0))][there]
                rows = slopes[part, :, member][there][..., None] * one[:, None]
                total.index_add_(0, ids[part][there].reshape(-1), rows.flatten(0, 1))
        if own_slopes is not None and own_ids is not None:
            total.index_add_(0, own_ids, own_slopes.to(real)[:, None] * wide)
        if eps >= 0:
            named = ids.reshape(-1) if own_ids is None else torch.cat([ids.reshape(-1), own_ids])
            named = named.unique()
            total[named] = through_norm(total[named], table[named].to(real), eps)
    return total.to(table.dtype)


def through_norm(grad: Tensor, rows: Tensor, eps: float) -> Tensor:
    """Gradient of rows from that of rows / max(|rows|, eps)."""
    size = rows.norm(dim=-1, keepdim=True)
    along = (grad * rows).sum(-1, keepdim=True)
    return torch.where(size < eps, grad / eps, grad / size - along / size * (rows / size) / size)


def _table_fake(slopes: Tensor, own_slopes: Tensor | None, query: Tensor, table: Tensor, *rest: Any) -> Tensor:
    return table.new_empty(table.shape)


def _kernel(
    library: ctypes.CDLL, slopes: Tensor, own_slopes: Tensor | None, query: Tensor, table: Tensor, ids: Tensor,
    own_ids: Tensor | None, group: int, eps: float,
) -> Tensor:  # fmt: skip
    real = accumulator(query.dtype)
    own_slopes = None if own_slopes is None else own_slopes.to(real)
    return cpu.table_gradient(library, slopes.to(real), own_slopes, query.to(real), table, ids, own_ids, group, eps)


def _table_flops(slopes: Tensor, own_slopes: Any, query: Tensor, *rest: Any, out_val: Any = None) -> Any:
    pairs = slopes.shape[0] * slopes.shape[1] + (0 if own_slopes is None else query.shape[0])
    return 2 * pairs * query.shape[1]


declare(
    "lookup_table_gradient(Tensor slopes, Tensor? own_slopes, Tensor query, Tensor table, Tensor ids, "
    "Tensor? own_ids, int group, float eps) -> Tensor",
    LOOKUP.extended(
        together("own_slopes", "own_ids"),
        group=Whole(1, GROUP),
        slopes=Array("T*K group", REAL),
        own_slopes=Array("T", REAL),
        own_ids=Array("T", INT64, Range("V")),
    ),
    reference=table_gradient,
    cpu=_kernel,
    storage=lambda slopes, own_slopes, query, table, *rest: table.dtype,
    fake=_table_fake,
    flops=_table_flops,
)
