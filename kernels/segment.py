"""Softmax over the rows of each sequence: pooling a packed tensor with weights that add up to one per sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contract import INT64, REAL, Array, As, Ascending, Contract
from .cpu import segment as cpu
from .declare import accumulator, declare, runs

ops = torch.ops.turbogr


def softmax(x: Tensor, offsets: Tensor) -> Tensor:
    """Softmax of x[offsets[s]:offsets[s + 1]] along its rows; columns are independent."""
    result = x.new_zeros(x.shape)
    for first, last in runs(offsets):
        result[first:last] = x[first:last].softmax(0, dtype=accumulator(x.dtype))
    return result


def softmax_backward(grad: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    """out · (grad - sum of out · grad over the sequence), in float64: a shift of all scores has gradient zero."""
    result = out.new_zeros(out.shape)
    for first, last in runs(offsets):
        slope, weight = grad[first:last].double(), out[first:last].double()
        result[first:last] = weight * (slope - (weight * slope).sum(0, keepdim=True))
    return result


def _fake(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _backward_fake(grad: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    return out.new_empty(out.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ops.segment_softmax_backward(grad, *ctx.saved_tensors), None


_OFFSETS = Array("S+1", INT64, Ascending("T"))

declare(
    "segment_softmax(Tensor x, Tensor offsets) -> Tensor",
    Contract(x=Array("T ...F", REAL), offsets=_OFFSETS),
    reference=softmax,
    cpu=cpu.softmax,
    fake=_fake,
    backward=_backward,
    save=_save,
)
declare(
    "segment_softmax_backward(Tensor grad, Tensor out, Tensor offsets) -> Tensor",
    Contract(out=Array("T ...F", REAL), grad=Array("T ...F", As("out")), offsets=_OFFSETS),
    reference=softmax_backward,
    cpu=cpu.softmax_backward,
    fake=_backward_fake,
)
