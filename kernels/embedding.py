"""Rows of a table by id, and the gradient of the table: dense, or the rows that were asked for and their sums.

`padding_idx` names a row whose gradient is zero; -1 names none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contract import INT64, Array, Contract, Range, Whole
from .cpu import embedding as cpu
from .declare import accumulator, declare

ops = torch.ops.turbogr


# --- lookup ------------------------------------------------------------------------------------------


def embedding(weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    """weight[ids], for ids of any shape."""
    return weight.index_select(0, ids.reshape(-1)).view(*ids.shape, weight.shape[1])


def _fake(weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, ctx.padding_idx = inputs
    ctx.count = weight.shape[0]
    ctx.save_for_backward(ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    return ops.embedding_backward(grad, ids, ctx.count, ctx.padding_idx), None, None


# --- dense gradient ----------------------------------------------------------------------------------


def embedding_backward(grad: Tensor, ids: Tensor, count: int, padding_idx: int) -> Tensor:
    """`count` rows of zeros, with grad[i] added at ids[i] unless that is the padding."""
    rows, slopes = ids.reshape(-1), grad.reshape(ids.numel(), grad.shape[-1])
    total = grad.new_zeros((count, grad.shape[-1]), dtype=accumulator(grad.dtype))
    total.index_add_(0, rows, slopes.to(total.dtype))
    if padding_idx >= 0:
        total[padding_idx] = 0
    return total.to(grad.dtype)


def _dense_fake(grad: Tensor, ids: Tensor, count: int, padding_idx: int) -> Tensor:
    return grad.new_empty((count, grad.shape[-1]))


def _dense_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids, _, ctx.padding_idx = inputs
    ctx.save_for_backward(ids)


def _dense_backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    found = ops.embedding(slope, ids, ctx.padding_idx)
    if ctx.padding_idx >= 0:
        found = found.masked_fill((ids == ctx.padding_idx).unsqueeze(-1), 0)
    return found, None, None, None


# --- sparse gradient ---------------------------------------------------------------------------------


def coalesce(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Each number that occurs in rows, ascending, and the sum of x[i] over all i with rows[i] that number."""
    unique, place = torch.unique(rows, return_inverse=True)
    sums = x.new_zeros((unique.shape[0], *x.shape[1:]), dtype=accumulator(x.dtype))
    return unique, sums.index_add_(0, place, x.to(sums.dtype)).to(x.dtype)


def _coalesce_fake(x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return rows.new_empty(count), x.new_empty((count, *x.shape[1:]))


def _coalesce_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[0])
    ctx.save_for_backward(inputs[1], output[0])


def _coalesce_backward(ctx: Any, _: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, unique = ctx.saved_tensors
    return ops.gather_rows(grad, torch.searchsorted(unique, rows)), None


_IDS = (torch.int64, torch.int32)

declare(
    "embedding(Tensor weight, Tensor ids, int padding_idx) -> Tensor",
    Contract(weight=Array("V D"), ids=Array("...I", _IDS, Range("V")), padding_idx=Whole(-1, below="V")),
    reference=embedding,
    cpu=cpu.embedding,
    fake=_fake,
    backward=_backward,
    save=_save,
)
declare(
    "embedding_backward(Tensor grad, Tensor ids, SymInt count, int padding_idx) -> Tensor",
    Contract(
        count=Whole(0),
        ids=Array("...I", _IDS, Range("count")),
        grad=Array("...I D"),
        padding_idx=Whole(-1, below="count"),
    ),
    reference=embedding_backward,
    cpu=cpu.embedding_backward,
    fake=_dense_fake,
    backward=_dense_backward,
    save=_dense_save,
)
declare(
    "coalesce_rows(Tensor x, Tensor rows) -> (Tensor unique, Tensor sums)",
    Contract(x=Array("N ...F"), rows=Array("N", INT64, Range())),
    reference=coalesce,
    cpu=cpu.coalesce,
    fake=_coalesce_fake,
    backward=_coalesce_backward,
    save=_coalesce_save,
)
