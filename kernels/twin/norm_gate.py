"""norm_gate and its backward, by the AscendC kernels in the twin."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.call import Arguments, fields
from ..cpu.norm_gate import gradients
from ..declare import require
from .launch import launch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 8192


class NormGateProblem(Arguments):
    _fields_ = fields("", "rows width bytes has_weight has_bias cores", "eps")


class NormGateBackwardProblem(Arguments):
    """`wanted` has a bit each for x, gate, weight and bias."""

    _fields_ = fields("", "rows width bytes has_weight has_bias wanted cores")


def norm_gate(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, cores: int
) -> tuple[Tensor, Tensor, Tensor]:
    _check("norm_gate", x)
    weight, bias = _vectors(x, weight, bias)
    result = x.new_empty(x.shape)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    problem = NormGateProblem(*_sizes(x), weight is not None, bias is not None, cores, eps)
    launch("norm_gate", _dtypes(x, weight, bias), [x, gate, weight, bias, result, mean, rstd], problem, outputs=3)
    return result, mean, rstd


def norm_gate_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wanted: list[bool],
    *,
    cores: int,
) -> tuple[Tensor, ...]:
    _check("norm_gate_backward", x)
    found = gradients(x, gate, weight, bias, wanted)
    weight, bias = _vectors(x, weight, bias)
    dtypes = _dtypes(x, weight, bias)
    # Vectors that had to be cast have their gradients cast back.
    outputs = [part if i < 2 else part.to(dtypes["WEIGHT"]) for i, part in enumerate(found)]
    bits = sum(1 << i for i, want in enumerate(wanted) if want)
    problem = NormGateBackwardProblem(*_sizes(x), weight is not None, bias is not None, bits, cores)
    tensors = [grad, x, gate, weight, bias, mean, rstd, *outputs]
    launch("norm_gate_backward", dtypes, tensors, problem, outputs=4)
    return tuple(to if to is part else to.copy_(part) for to, part in zip(found, outputs, strict=True))


# --- preparation -------------------------------------------------------------------------------------


def _check(op: str, x: Tensor) -> None:
    width = x.shape[-1]
    require(x.dtype in DTYPES, f"{op}: there is no AscendC kernel for {x.dtype}")
    require(0 < width <= WIDEST, f"{op}: rows of {width} numbers, and the AscendC kernel takes 1 to {WIDEST}")


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return x.numel() // x.shape[-1], x.shape[-1], x.element_size()


def _vectors(x: Tensor, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Weight and bias in one dtype: that of x, or else float32."""
    same = all(vector is None or vector.dtype == x.dtype for vector in vectors)
    return tuple(None if vector is None else vector.to(x.dtype if same else torch.float32) for vector in vectors)


def _dtypes(x: Tensor, *vectors: Tensor | None) -> dict[str, torch.dtype]:
    return {"X": x.dtype, "WEIGHT": next((vector.dtype for vector in vectors if vector is not None), x.dtype)}
