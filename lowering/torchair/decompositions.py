"""Ops that torchair has no converter for, taken apart into some that it has. Results are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _torch
from .exchanges import collectives

aten = torch.ops.aten


def decompositions() -> dict[Any, Callable[..., Any]]:
    """For AOTAutograd. torch's own serve where what they make has converters."""
    return {
        **_torch.decompositions(
            aten.binary_cross_entropy_with_logits,
            aten.softplus,
            aten.softplus_backward,
            aten.logit,
            aten.hardtanh,
            aten.native_group_norm_backward,
            aten.select_backward,  # torchair's converter writes into memory that it leaves as it is
        ),
        aten.index_put.default: index_put,
        aten._unsafe_index_put.default: index_put,
        aten.clamp_min.Tensor: torch.maximum,
        aten.clamp_max.Tensor: torch.minimum,
        aten.bucketize.Tensor: bucketize,
        aten.isnan.default: isnan,
        aten.all.dim: all_dim,
        aten.var.correction: variance,
        aten.randint.low: randint_from,
        aten.roll.default: roll,
        aten.xlogy.Tensor: xlogy,
        aten.nan_to_num.default: nan_to_num,
        **collectives(),
    }


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Integers over the leading dims, which are flattened: index_add and scatter have converters."""
    if any(i is None or i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    leading, rest = x.shape[: len(indices)], x.shape[len(indices) :]
    flat, count = torch.zeros((), dtype=torch.int64, device=x.device), 1
    for index, size in zip(indices, leading, strict=True):
        assert index is not None
        flat = flat * size + torch.where(index < 0, index + size, index)
        count = count * size
    values = values.expand(*flat.shape, *rest).reshape(-1, *rest)
    rows, places = x.reshape(count, *rest), flat.reshape(-1)
    if accumulate:
        return rows.index_add(0, places, values).reshape(x.shape)
    places = places.reshape(-1, *[1] * len(rest)).expand(values.shape)
    return rows.scatter(0, places, values).reshape(x.shape)


def bucketize(x: Tensor, bounds: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return torch.searchsorted(bounds, x, out_int32=out_int32, right=right)


def isnan(x: Tensor) -> Tensor:
    return x != x


def all_dim(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return ~torch.any(~x.to(torch.bool), dim, keepdim)


def variance(x: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Tensor:
    dims = list(range(x.dim())) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    count = 1
    for d in dims:
        count = count * x.shape[d]
    deviation = x - x.mean(dims, keepdim=True)
    return (deviation * deviation).sum(dims, keepdim=keepdim) / (count - (1 if correction is None else correction))


def randint_from(low: int, high: int, size: Sequence[int], **options: Any) -> Tensor:
    return torch.randint(high - low, size, **options) + low


def roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    if not dims:
        return roll(x.reshape(-1), shifts, [0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        first = (-shift) % size if size else 0
        x = torch.cat([x.narrow(dim, first, size - first), x.narrow(dim, 0, first)], dim)
    return x


def xlogy(x: Tensor, y: Tensor) -> Tensor:
    return torch.where(x == 0, torch.zeros_like(x), x * torch.log(y))


def nan_to_num(x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None) -> Tensor:
    if not x.is_floating_point():
        return x.clone()
    limits = torch.finfo(x.dtype)
    x = torch.where(x != x, torch.full_like(x, 0.0 if nan is None else nan), x)
    x = torch.where(x == torch.inf, torch.full_like(x, limits.max if posinf is None else posinf), x)
    return torch.where(x == -torch.inf, torch.full_like(x, limits.min if neginf is None else neginf), x)
