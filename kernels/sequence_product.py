"""Products of packed rows by sequence: rows times the matrix of their sequence, and the matrix that rows make.

Each is the derivative of the other. Linear attention is both: sequence_outer(k, v), then sequence_mm(q, …).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contract import INT64, REAL, Array, As, Ascending, Contract
from .declare import as_given, declare, runs

ops = torch.ops.turbogr


def multiply(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """x[r, h] @ matrices[s, h] for each row r of sequence s; rows of none are zero."""
    result = x.new_zeros(x.shape[1], x.shape[0], matrices.shape[3])
    lines = x.transpose(0, 1)
    with as_given(x):
        for matrix, (first, last) in zip(matrices, runs(offsets), strict=True):
            if first < last:
                torch.bmm(lines[:, first:last], matrix, out=result[:, first:last])
    return result.transpose(0, 1).contiguous()


def outer(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """The sum of left[r, h]ᵀ right[r, h] over the rows of each sequence."""
    result = left.new_zeros(offsets.shape[0] - 1, left.shape[1], left.shape[2], right.shape[2])
    lines, others = left.permute(1, 2, 0), right.transpose(0, 1)
    with as_given(left):
        for matrix, (first, last) in zip(result, runs(offsets), strict=True):
            if first < last:
                torch.bmm(lines[:, :, first:last], others[:, first:last], out=matrix)
    return result


def _multiply_fake(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], matrices.shape[3])


def _outer_fake(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    return left.new_empty(offsets.shape[0] - 1, left.shape[1], left.shape[2], right.shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _multiply_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, matrices, offsets = ctx.saved_tensors
    wants_x, wants_matrices, _ = ctx.needs_input_grad
    return (
        ops.sequence_mm(grad, matrices.mT, offsets) if wants_x else None,
        ops.sequence_outer(x, grad, offsets) if wants_matrices else None,
        None,
    )


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    left, right, offsets = ctx.saved_tensors
    wants_left, wants_right, _ = ctx.needs_input_grad
    return (
        ops.sequence_mm(right, grad.mT, offsets) if wants_left else None,
        ops.sequence_mm(left, grad, offsets) if wants_right else None,
        None,
    )


def _multiply_flops(x: Tensor, matrices: Tensor, offsets: Tensor, *, out_val: Any = None) -> Any:
    return 2 * x.shape[0] * x.shape[1] * x.shape[2] * matrices.shape[3]


def _outer_flops(left: Tensor, right: Tensor, offsets: Tensor, *, out_val: Any = None) -> Any:
    return 2 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]


_OFFSETS = Array("S+1", INT64, Ascending("T"))

declare(
    "sequence_mm(Tensor x, Tensor matrices, Tensor offsets) -> Tensor",
    Contract(x=Array("T H K", REAL), matrices=Array("S H K E", As("x")), offsets=_OFFSETS),
    reference=multiply,
    fake=_multiply_fake,
    backward=_multiply_backward,
    save=_save,
    flops=_multiply_flops,
)
declare(
    "sequence_outer(Tensor left, Tensor right, Tensor offsets) -> Tensor",
    Contract(left=Array("T H D", REAL), right=Array("T H E", As("left")), offsets=_OFFSETS),
    reference=outer,
    fake=_outer_fake,
    backward=_outer_backward,
    save=_save,
    flops=_outer_flops,
)
