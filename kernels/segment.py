"""Softmax over the rows of each sequence: pooling a packed tensor with weights that add up to one per sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu import segment as cpu
from .declare import accumulator, checked, declare, require_size, require_tensor, runs

ops = torch.ops.turbogr


def softmax(x: Tensor, offsets: Tensor) -> Tensor:
    """Softmax of x[offsets[s]:offsets[s + 1]] along its rows; columns are independent."""
    _check(x, offsets)
    result = x.new_zeros(x.shape)
    for first, last in runs(offsets, x.shape[0], "segment_softmax: offsets"):
        result[first:last] = x[first:last].softmax(0, dtype=accumulator(x.dtype))
    return result


def softmax_backward(grad: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    """out · (grad - sum of out · grad over the sequence), in float64: a shift of all scores has gradient zero."""
    _check_backward(grad, out, offsets)
    result = out.new_zeros(out.shape)
    for first, last in runs(offsets, out.shape[0], "segment_softmax: offsets"):
        slope, weight = grad[first:last].double(), out[first:last].double()
        result[first:last] = weight * (slope - (weight * slope).sum(0, keepdim=True))
    return result


def _fake(x: Tensor, offsets: Tensor) -> Tensor:
    _check(x, offsets)
    return x.new_empty(x.shape)


def _backward_fake(grad: Tensor, out: Tensor, offsets: Tensor) -> Tensor:
    _check_backward(grad, out, offsets)
    return out.new_empty(out.shape)


def _check(x: Tensor, offsets: Tensor) -> None:
    require_tensor(x, "segment_softmax: x", max(x.dim(), 1))
    require_tensor(offsets, "segment_softmax: offsets", 1, torch.int64)


def _check_backward(grad: Tensor, out: Tensor, offsets: Tensor) -> None:
    _check(out, offsets)
    require_tensor(grad, "segment_softmax_backward: grad", out.dim())
    for found, wanted in zip(grad.shape, out.shape, strict=True):
        require_size(found, wanted, "segment_softmax_backward: size of grad")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output, inputs[1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return ops.segment_softmax_backward(grad, *ctx.saved_tensors), None


declare(
    "segment_softmax(Tensor x, Tensor offsets) -> Tensor",
    reference=softmax,
    cpu=checked(_check, cpu.softmax),
    fake=_fake,
    backward=_backward,
    save=_save,
)
declare(
    "segment_softmax_backward(Tensor grad, Tensor out, Tensor offsets) -> Tensor",
    reference=softmax_backward,
    cpu=checked(_check_backward, cpu.softmax_backward),
    fake=_backward_fake,
)
