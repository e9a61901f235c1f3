"""SiLU of a projection and its cut into parts, in one pass: what an HSTU block does to its four projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .cpu import silu_split as cpu
from .declare import accumulator, checked, declare, require, require_size, require_tensor

ops = torch.ops.turbogr


def silu_split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    """silu(x) cut along its last dim into parts of these sizes, each contiguous."""
    _check(x, sizes)
    wide = F.silu(x.to(accumulator(x.dtype))).to(x.dtype)
    return [part.clone(memory_format=torch.contiguous_format) for part in wide.split(sizes, -1)]


def _fake(x: Tensor, sizes: list[int]) -> list[Tensor]:
    _check(x, sizes)
    return [x.new_empty((*x.shape[:-1], size)) for size in sizes]


def _check(x: Tensor, sizes: list[int], name: str = "silu_split") -> None:
    require_tensor(x, f"{name}: x", max(x.dim(), 1))
    require(len(sizes) > 0, f"{name}: sizes must not be empty")
    require(all(not isinstance(size, int) or size >= 0 for size in sizes), f"{name}: no size may be negative: {sizes}")
    require_size(sum(sizes), x.shape[-1], f"{name}: sum of sizes")


def silu_split_backward(grads: list[Tensor], x: Tensor, sizes: list[int]) -> Tensor:
    """Gradient of x from those of the parts: grad · s · (1 + x · (1 - s)), where s = sigmoid(x)."""
    _check_backward(grads, x, sizes)
    wide = accumulator(x.dtype)
    value, grad = x.to(wide), torch.cat([part.to(wide) for part in grads], -1)
    share = value.sigmoid()
    return (grad * share * (1 + value * (1 - share))).to(x.dtype).contiguous()


def _backward_fake(grads: list[Tensor], x: Tensor, sizes: list[int]) -> Tensor:
    _check_backward(grads, x, sizes)
    return x.new_empty(x.shape)


def _check_backward(grads: list[Tensor], x: Tensor, sizes: list[int]) -> None:
    name = "silu_split_backward"
    _check(x, sizes, name)
    require(len(grads) == len(sizes), f"{name}: {len(grads)} grads for {len(sizes)} parts")
    for grad, size in zip(grads, sizes, strict=True):
        require_tensor(grad, f"{name}: grad", x.dim(), x.dtype)
        for found, wanted in zip(grad.shape, (*x.shape[:-1], size), strict=True):
            require_size(found, wanted, f"{name}: size of grad")


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, ctx.sizes = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return ops.silu_split_backward(grads, *ctx.saved_tensors, ctx.sizes), None


declare(
    "silu_split(Tensor x, SymInt[] sizes) -> Tensor[]",
    reference=silu_split,
    cpu=checked(_check, cpu.silu_split),
    fake=_fake,
    backward=_backward,
    save=_save,
)
declare(
    "silu_split_backward(Tensor[] grads, Tensor x, SymInt[] sizes) -> Tensor",
    reference=silu_split_backward,
    cpu=checked(_check_backward, cpu.silu_split_backward),
    fake=_backward_fake,
)
