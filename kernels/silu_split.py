"""SiLU of a projection and its cut into parts, in one pass: what an HSTU block does to its four projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .contract import REAL, Array, Contract, Parts, Sizes
from .cpu import silu_split as cpu
from .declare import accumulator, declare

ops = torch.ops.turbogr


def silu_split(x: Tensor, sizes: list[int]) -> list[Tensor]:
    """silu(x) cut along its last dim into parts of these sizes, each contiguous."""
    wide = F.silu(x.to(accumulator(x.dtype))).to(x.dtype)
    return [part.clone(memory_format=torch.contiguous_format) for part in wide.split(sizes, -1)]


def _fake(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], size)) for size in sizes]


def silu_split_backward(grads: list[Tensor], x: Tensor, sizes: list[int]) -> Tensor:
    """Gradient of x from those of the parts: grad · s · (1 + x · (1 - s)), where s = sigmoid(x)."""
    wide = accumulator(x.dtype)
    value, grad = x.to(wide), torch.cat([part.to(wide) for part in grads], -1)
    share = value.sigmoid()
    return (grad * share * (1 + value * (1 - share))).to(x.dtype).contiguous()


def _backward_fake(grads: list[Tensor], x: Tensor, sizes: list[int]) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, ctx.sizes = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return ops.silu_split_backward(grads, *ctx.saved_tensors, ctx.sizes), None


_CONTRACT = Contract(x=Array("...B W", REAL), sizes=Sizes("W"))

declare(
    "silu_split(Tensor x, SymInt[] sizes) -> Tensor[]",
    _CONTRACT,
    reference=silu_split,
    cpu=cpu.silu_split,
    fake=_fake,
    backward=_backward,
    save=_save,
)
declare(
    "silu_split_backward(Tensor[] grads, Tensor x, SymInt[] sizes) -> Tensor",
    _CONTRACT.extended(grads=Parts("...B _", "sizes", like="x")),
    reference=silu_split_backward,
    cpu=cpu.silu_split_backward,
    fake=_backward_fake,
)
