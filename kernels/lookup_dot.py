"""Scores of queries against rows of a table, looked up and multiplied in one go: no (T, K, D) tensor.

    score[t, k] = <query[t], row(ids[t, k])>
    row(i)      = table[i]                           where eps < 0
                = table[i] / max(|table[i]|, eps)    where eps >= 0, as F.normalize has it

Sums are in float32 for tensors of 16 bits. The gradient of the table is dense. Entries of `ids` are sorted, then each
row of it is written once, summed in the order of entries: the same bits for any number of threads.

`half`, `places` and `scales` (kernels/half_rows.py) stand in for rows of the table: scales[b] · half[places[t, k]] is
read instead of table[ids[t, k]], where b is the block of that row. The gradient still goes to the table, at `ids`.
Without `places`, `half` is a copy of the whole table, row by row.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .contract import REAL, Array, Flags
from .cpu import lookup_dot as cpu
from .declare import accumulator, as_given, declare
from .lookup import COPIED, Source, look_up, parts
from .table_gradient import table_gradient

ops = torch.ops.turbogr

# --- scores ------------------------------------------------------------------------------------------


def lookup_dot(
    query: Tensor, table: Tensor, ids: Tensor, eps: float, half: Tensor | None = None, places: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Scores (T, K), in the dtype of the query."""
    source = Source(table, half, places, scales)
    real = accumulator(query.dtype)
    scores = query.new_empty(ids.shape)
    with as_given(query):
        for part in parts(ids.shape[0], ids.shape[1] * query.shape[1]):
            rows = look_up(source, source.at(ids)[part], eps, real)
            scores[part] = torch.einsum("td,tkd->tk", query[part].to(real), rows).to(query.dtype)
    return scores


def _fake(query: Tensor, table: Tensor, ids: Tensor, eps: float, *half: Any) -> Tensor:
    return query.new_empty(ids.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, table, ids, ctx.eps, *half = inputs
    ctx.save_for_backward(query, table, ids, *half)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    query, table, ids, *half = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:2])
    found = ops.lookup_dot_backward(grad, query, table, ids, ctx.eps, wanted, *half)
    return (*(g if want else None for g, want in zip(found, wanted, strict=True)), *[None] * 5)


# --- gradients ---------------------------------------------------------------------------------------


def lookup_dot_backward(
    grad: Tensor, query: Tensor, table: Tensor, ids: Tensor, eps: float, wanted: list[bool],
    half: Tensor | None = None, places: Tensor | None = None, scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of query and table; empty where not wanted."""
    source = Source(table, half, places, scales)
    real = accumulator(query.dtype)
    query_grad, table_grad = (
        x.new_empty(x.shape if want else 0) for x, want in zip((query, table), wanted, strict=True)
    )
    with as_given(query):
        if wanted[0]:
            for part in parts(ids.shape[0], ids.shape[1] * query.shape[1]):
                rows = look_up(source, source.at(ids)[part], eps, real)
                query_grad[part] = torch.einsum("tk,tkd->td", grad[part].to(real), rows).to(query.dtype)
    if wanted[1]:
        table_grad = table_gradient(grad.reshape(-1, 1), None, query, table, ids, None, 1, eps)
    return query_grad, table_grad


def _backward_fake(
    grad: Tensor, query: Tensor, table: Tensor, ids: Tensor, eps: float, wanted: list[bool], *half: Any
) -> tuple[Tensor, Tensor]:
    query_grad, table_grad = (
        x.new_empty(x.shape if want else 0) for x, want in zip((query, table), wanted, strict=True)
    )
    return query_grad, table_grad


# --- kernels -----------------------------------------------------------------------------------------


def _kernel(library: ctypes.CDLL, query: Tensor, table: Tensor, ids: Tensor, eps: float, *half: Any) -> Tensor:
    wide = query.to(accumulator(query.dtype))
    return cpu.scores(library, wide, Source(table, *half), ids, eps).to(query.dtype)


def _backward_kernel(
    library: ctypes.CDLL, grad: Tensor, query: Tensor, table: Tensor, ids: Tensor, eps: float, wanted: list[bool],
    *half: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    query_grad, table_grad = (x.new_empty(0) for x in (query, table))
    if wanted[0]:
        real = accumulator(query.dtype)
        source = Source(table, *half)
        query_grad = cpu.query_gradient(library, grad.to(real), query.to(real), source, ids, eps).to(query.dtype)
    if wanted[1]:
        table_grad = ops.lookup_table_gradient(grad.reshape(-1, 1), None, query, table, ids, None, 1, eps)
    return query_grad, table_grad


def _storage(query: Tensor, table: Tensor, ids: Tensor, eps: float, *half: Any) -> torch.dtype:
    return Source(table, *half).rows.dtype


def _backward_storage(
    grad: Tensor, query: Tensor, table: Tensor, ids: Tensor, eps: float, wanted: list[bool], *half: Any
) -> torch.dtype:
    return Source(table, *half).rows.dtype


# --- FLOPs -------------------------------------------------------------------------------------------


def _flops(query: Tensor, table: Tensor, ids: Tensor, *rest: Any, out_val: Any = None) -> Any:
    return 2 * ids.shape[0] * ids.shape[1] * query.shape[1]


def _backward_flops(grad: Tensor, query: Tensor, table: Tensor, ids: Tensor, *rest: Any, out_val: Any = None) -> Any:
    return sum(rest[1]) * _flops(query, table, ids)


_HALF = "Tensor? half=None, Tensor? places=None, Tensor? scales=None"

declare(
    f"lookup_dot(Tensor query, Tensor table, Tensor ids, float eps, {_HALF}) -> Tensor",
    COPIED,
    reference=lookup_dot,
    cpu=_kernel,
    storage=_storage,
    fake=_fake,
    backward=_backward,
    save=_save,
    flops=_flops,
)
declare(
    "lookup_dot_backward(Tensor grad, Tensor query, Tensor table, Tensor ids, float eps, bool[] wanted, "
    f"{_HALF}) -> (Tensor, Tensor)",
    COPIED.extended(grad=Array("T K", REAL), wanted=Flags(("query", "table"))),
    reference=lookup_dot_backward,
    cpu=_backward_kernel,
    storage=_backward_storage,
    fake=_backward_fake,
    flops=_backward_flops,
)
