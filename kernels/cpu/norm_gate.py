"""norm_gate in C++: one pass over the rows, forward and backward."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .call import TYPES, Arguments, address, call, fields
from .rows import along_last, empty_like, threads_for


class NormGateArguments(Arguments):
    _fields_ = fields("x gate weight bias result mean rstd", "rows width x_stride gate_stride type threads", "eps")


class NormGateBackwardArguments(Arguments):
    """Gradients that nobody wants are NULL; those of weight and bias are in the precision of sums."""

    _fields_ = fields(
        "grad x gate weight bias mean rstd grad_x grad_gate grad_weight grad_bias",
        "rows width grad_stride x_stride gate_stride type threads",
    )


def norm_gate(
    library: ctypes.CDLL, x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    value, gates, weight, bias = along_last(x), along_last(gate), _vector(weight, real), _vector(bias, real)
    result, mean = empty_like(x), x.new_empty(x.shape[:-1], dtype=real)
    rstd = empty_like(mean)
    arguments = NormGateArguments(
        value.start,
        gates.start,
        address(weight),
        address(bias),
        result.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        value.length,
        value.width,
        value.stride,
        gates.stride,
        TYPES[x.dtype],
        threads_for(x.numel()),
        eps,
    )
    call(library.turbogr_norm_gate, arguments)
    return result, mean, rstd


def norm_gate_backward(
    library: ctypes.CDLL,
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    real = mean.dtype
    found = gradients(x, gate, weight, bias, wanted)
    wide = tuple(part if i < 2 else part.to(real) for i, part in enumerate(found))
    slopes, value, gates = along_last(grad), along_last(x), along_last(gate)
    weight, bias, mean, rstd = _vector(weight, real), _vector(bias, real), mean.contiguous(), rstd.contiguous()
    arguments = NormGateBackwardArguments(
        slopes.start,
        value.start,
        gates.start,
        address(weight),
        address(bias),
        mean.data_ptr(),
        rstd.data_ptr(),
        *(part.data_ptr() if part.numel() else None for part in wide),
        value.length,
        value.width,
        slopes.stride,
        value.stride,
        gates.stride,
        TYPES[x.dtype],
        threads_for(x.numel()),
    )
    call(library.turbogr_norm_gate_backward, arguments)
    return tuple(to if to is part else to.copy_(part) for to, part in zip(found, wide, strict=True))


def gradients(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, ...]:
    """Room for the gradients that are wanted, and tensors without elements for the others."""
    pairs = zip((x, gate, weight, bias), wanted, strict=True)
    return tuple(empty_like(like) if want and like is not None else x.new_empty(0) for like, want in pairs)


def _vector(x: Tensor | None, real: torch.dtype) -> Tensor | None:
    if x is None or (x.dtype == real and x.is_contiguous()):
        return x
    return x.to(real).contiguous()
