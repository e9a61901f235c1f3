"""Moving rows: into a packed tensor, and back into a padded one. Each op is the derivative of the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu import rows as cpu
from .declare import accumulator, checked, declare, require, require_size, require_tensor

ops = torch.ops.turbogr


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; a row may be asked for many times."""
    _check_gather(x, rows)
    return x.index_select(0, rows)


def _gather_fake(x: Tensor, rows: Tensor) -> Tensor:
    _check_gather(x, rows)
    return x.new_empty((rows.shape[0], *x.shape[1:]))


def _check_gather(x: Tensor, rows: Tensor) -> None:
    require(x.dim() > 0, "gather_rows: x must have rows, found a tensor of 0 dims")
    require_tensor(rows, "gather_rows: rows", 1, torch.int64)


def _gather_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, rows = inputs
    ctx.count = x.shape[0]
    ctx.save_for_backward(rows)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (rows,) = ctx.saved_tensors
    return ops.scatter_rows(grad, rows, ctx.count), None


def scatter(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """`count` rows of zeros, with x[i] added at rows[i]."""
    _check_scatter(x, rows, count)
    total = x.new_zeros((count, *x.shape[1:]), dtype=accumulator(x.dtype))
    return total.index_add_(0, rows, x.to(total.dtype)).to(x.dtype)


def _scatter_fake(x: Tensor, rows: Tensor, count: int) -> Tensor:
    _check_scatter(x, rows, count)
    return x.new_empty((count, *x.shape[1:]))


def _check_scatter(x: Tensor, rows: Tensor, count: int) -> None:
    check_entries("scatter_rows", x, rows)
    if isinstance(count, int):
        require(count >= 0, f"scatter_rows: count must not be negative, found {count}")


def check_entries(name: str, x: Tensor, rows: Tensor) -> None:
    """One number for each row of x."""
    require(x.dim() > 0, f"{name}: x must have rows, found a tensor of 0 dims")
    require_tensor(rows, f"{name}: rows", 1, torch.int64)
    require_size(rows.shape[0], x.shape[0], f"{name}: length of rows")


def _scatter_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (rows,) = ctx.saved_tensors
    return ops.gather_rows(grad, rows), None, None


declare(
    "gather_rows(Tensor x, Tensor rows) -> Tensor",
    reference=gather,
    cpu=checked(_check_gather, cpu.gather),
    fake=_gather_fake,
    backward=_gather_backward,
    save=_gather_save,
)
declare(
    "scatter_rows(Tensor x, Tensor rows, SymInt count) -> Tensor",
    reference=scatter,
    cpu=checked(_check_scatter, cpu.scatter),
    fake=_scatter_fake,
    backward=_scatter_backward,
    save=_scatter_save,
)
