"""norm_gate by its AscendC kernels: forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..cpu.call import Arguments, fields
from ..cpu.norm_gate import gradients
from ..declare import require
from .launch import Report, launch

OPS = ("norm_gate", "norm_gate_backward")
WIDEST = 8192


class NormGateProblem(Arguments):
    _fields_ = fields("", "rows width bytes has_weight has_bias cores", "eps")


def norm_gate(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, cores: int
) -> tuple[Tensor, Tensor, Tensor]:
    return run_norm_gate(x, gate, weight, bias, eps, cores=cores)[0]


def run_norm_gate(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, cores: int
) -> tuple[tuple[Tensor, Tensor, Tensor], Report]:
    """What the op returns, and what the launch did."""
    _check(x)
    rows, width = _sizes(x)
    weight, bias = _vectors(x, weight, bias)
    result = x.new_empty(x.shape)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    problem = NormGateProblem(rows, width, x.element_size(), weight is not None, bias is not None, cores, eps)
    report = launch("norm_gate", _dtypes(x, weight, bias), [x, gate, weight, bias, result, mean, rstd], problem, outputs=3)
    return (result, mean, rstd), report


# --- preparation -------------------------------------------------------------------------------------


def _check(x: Tensor) -> None:
    require(x.dtype in (torch.float16, torch.bfloat16, torch.float32), f"norm_gate: no AscendC kernel for {x.dtype}")
    require(0 < x.shape[-1] <= WIDEST, f"norm_gate: rows of {x.shape[-1]}, and the kernel takes 1 to {WIDEST}")


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _vectors(x: Tensor, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Weight and bias in one dtype: that of x, or else float32."""
    same = all(vector is None or vector.dtype == x.dtype for vector in vectors)
    return tuple(None if vector is None else vector.to(x.dtype if same else torch.float32) for vector in vectors)


def _dtypes(x: Tensor, *vectors: Tensor | None) -> dict[str, torch.dtype]:
    return {"X": x.dtype, "WEIGHT": next((vector.dtype for vector in vectors if vector is not None), x.dtype)}
