"""An update of AdamW on parameters in bf16 with both moments in bf16, in one pass and in place.

Arithmetic is in fp32, and results are rounded up or down by chance, in proportion to how near they are. Chance is a
function of the seed and of a number's place: it depends neither on threads nor on what else draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import Array, Contract, Number
from .cpu import adamw as cpu
from .cpu.build import library

CHUNK = 1 << 20  # numbers that are widened at a time, without kernels
_BF16 = (torch.bfloat16,)
_CONTRACT = Contract(
    value=Array("N", _BF16), gradient=Array("N", _BF16), mean=Array("N", _BF16), square=Array("N", _BF16),
    eps=Number(),
)  # fmt: skip
_CONTRACT.bind(
    "adamw_by_chance(Tensor value, Tensor gradient, Tensor mean, Tensor square, int step, float lr, float first, "
    "float second, float eps, float decay, int seed) -> ()"
)


def adamw_by_chance(
    value: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, lr: float, first: float, second: float,
    eps: float, decay: float, seed: int,
) -> None:  # fmt: skip
    """Step `step`, from 1, with decay rates `first` and `second` of the moments; `seed` has 63 bits."""
    every = (value, gradient, mean, square)
    whole = [x.contiguous() for x in every]
    tensors = tuple(x.view(-1) for x in whole)
    _CONTRACT.check(*tensors, step, lr, first, second, eps, decay, seed)
    given = (1 - first, 1 - second, lr / (1 - first**step), 1 - lr * decay, 1 - second**step, eps)
    kernels = library(torch.bfloat16) if value.device.type == "cpu" else None
    if kernels is not None:
        cpu.adamw_by_chance(kernels, tensors, seed, *given)
        # A backward that reads what an earlier forward saved is an error from now on.
        torch.autograd.graph.increment_version([value, mean, square])
    else:
        for at in range(0, value.numel(), CHUNK):
            _update([x[at : at + CHUNK] for x in tensors], at, seed, *given)
    for x, found in zip(every, whole, strict=True):
        if x is not gradient and x is not found:
            x.copy_(found)


def _update(
    part: list[Tensor], at: int, seed: int, first: float, second: float, rate: float, keep: float, correction: float,
    eps: float,
) -> None:  # fmt: skip
    stored, gradient, stored_mean, stored_square = part
    gradient = gradient.float()
    mean = stored_mean.float().lerp_(gradient, first)
    square = stored_square.float().mul_(1 - second).addcmul_(gradient, gradient, value=second)
    root = (square / correction).sqrt_().add_(eps)
    value = stored.float().mul_(keep).addcdiv_(mean, root, value=-rate)
    places = torch.arange(at, at + len(stored), device=stored.device)
    chance = mixed(mixed(places + (seed & 0xFFFFFFFF)) ^ (seed >> 32))
    for target, x, some in (
        (stored, value, chance),
        (stored_mean, mean, chance >> 16),
        (stored_square, square, mixed(chance + 0x9E3779B9)),
    ):
        target.copy_(round_by_chance(x, some))


def mixed(x: Tensor) -> Tensor:
    """32 bits, in which each depends on all of those of x (the finalizer 'lowbias32')."""
    x = x & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def round_by_chance(x: Tensor, chance: Tensor) -> Tensor:
    """fp32 to bf16, by adding the low 16 bits of `chance` to those that bf16 lacks; not finite values stay."""
    bits = x.view(torch.int32) + (chance & 0xFFFF).int()
    return torch.where(x.isfinite(), (bits & -0x10000).view(torch.float32), x).bfloat16()
