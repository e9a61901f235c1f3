"""Moving rows: into a packed tensor, and back into a padded one. Each op is the derivative of the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contract import INT64, Array, Contract, Range, Whole
from .cpu import rows as cpu
from .declare import accumulator, declare

ops = torch.ops.turbogr


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows]; a row may be asked for many times."""
    return x.index_select(0, rows)


def _gather_fake(x: Tensor, rows: Tensor) -> Tensor:
    return x.new_empty((rows.shape[0], *x.shape[1:]))


def _gather_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, rows = inputs
    ctx.count = x.shape[0]
    ctx.save_for_backward(rows)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (rows,) = ctx.saved_tensors
    return ops.scatter_rows(grad, rows, ctx.count), None


def scatter(x: Tensor, rows: Tensor, count: int) -> Tensor:
    """Rows of zeros, but where x[i] lies at rows[i]: their sum, from the first on, so that minus zero stays."""
    total = x.new_zeros((count, *x.shape[1:]), dtype=accumulator(x.dtype))
    if total.is_floating_point():
        total.index_fill_(0, rows, -0.0)
    return total.index_add_(0, rows, x.to(total.dtype)).to(x.dtype)


def _scatter_fake(x: Tensor, rows: Tensor, count: int) -> Tensor:
    return x.new_empty((count, *x.shape[1:]))


def _scatter_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (rows,) = ctx.saved_tensors
    return ops.gather_rows(grad, rows), None, None


declare(
    "gather_rows(Tensor x, Tensor rows) -> Tensor",
    Contract(x=Array("R ...F", None), rows=Array("N", INT64, Range("R"))),
    reference=gather,
    cpu=cpu.gather,
    fake=_gather_fake,
    backward=_gather_backward,
    save=_gather_save,
)
declare(
    "scatter_rows(Tensor x, Tensor rows, SymInt count) -> Tensor",
    Contract(x=Array("N ...F", None), count=Whole(0), rows=Array("N", INT64, Range("count"))),
    reference=scatter,
    cpu=cpu.scatter,
    fake=_scatter_fake,
    backward=_scatter_backward,
    save=_scatter_save,
)
