"""Random numbers from a seed and an offset: the same for the same pair, though not those an NPU would draw."""

from __future__ import annotations

import torch

from ..graph import Node
from .registry import Tensor, dtype_of, integer, integers, kernel

_ALIGNMENT = 128  # bits; GE pads dropout masks to it


def generator(seed: Tensor, offset: Tensor | None) -> torch.Generator:
    """For one draw; neighbouring offsets are as unrelated as any."""
    mixed = integers(seed)[0] * 0x9E3779B97F4A7C15 + (integers(offset)[-1] if offset is not None else 0)
    mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9
    return torch.Generator().manual_seed((mixed ^ (mixed >> 32)) & (2**63 - 1))


def packed(keep: Tensor) -> Tensor:
    """Eight flags to the byte, lowest bit first, padded as GE pads them."""
    count = keep.numel()
    bits = torch.zeros(-(-count // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8)
    bits[:count] = keep.reshape(-1).to(torch.uint8)
    return (bits.reshape(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)


def unpacked(mask: Tensor, shape: torch.Size) -> Tensor:
    bits = (mask.reshape(-1, 1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.reshape(-1)[: shape.numel()].reshape(shape).bool()


@kernel("StatelessDropOutGenMask")
def dropout_mask(
    node: Node, shape: Tensor, prob: Tensor, seed: Tensor, seed1: Tensor, offset: Tensor | None = None
) -> Tensor:
    draws = torch.rand(torch.Size(integers(shape)).numel(), generator=generator(seed, offset))
    return packed(draws < float(prob))


@kernel("DropOutDoMask")
def apply_dropout_mask(node: Node, x: Tensor, mask: Tensor, keep_prob: Tensor) -> Tensor:
    return torch.where(unpacked(mask, x.shape), x / keep_prob, 0).to(x.dtype)


@kernel("StatelessRandomUniformV2")
def uniform(node: Node, shape: Tensor, key: Tensor, counter: Tensor, algorithm: Tensor) -> Tensor:
    dtype = dtype_of(node, "dtype", torch.float32)
    return torch.rand(integers(shape), generator=generator(key, counter), dtype=dtype)


@kernel("StatelessRandomNormalV2")
def normal(node: Node, shape: Tensor, key: Tensor, counter: Tensor, algorithm: Tensor) -> Tensor:
    dtype = dtype_of(node, "dtype", torch.float32)
    return torch.randn(integers(shape), generator=generator(key, counter), dtype=dtype)


@kernel("StatelessRandperm")
def permutation(node: Node, n: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    drawn = torch.randperm(integer(n), generator=generator(seed, offset))
    return drawn.to(dtype_of(node, "dtype", torch.int64))


@kernel("StatelessBernoulli")
def bernoulli(node: Node, shape: Tensor, prob: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    draws = torch.rand(integers(shape), generator=generator(seed, offset))
    return (draws < prob).to(dtype_of(node, "dtype", torch.float32))


@kernel("MultinomialWithReplacement")
def multinomial(node: Node, x: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    return torch.multinomial(x, node.attribute("numsamples"), True, generator=generator(seed, offset))
