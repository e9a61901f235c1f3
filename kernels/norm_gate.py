"""Layer norm and a gate in one pass: layer_norm(x) · gate, as an HSTU block ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contract import REAL, Array, As, Contract, Flags, Number
from .cpu import norm_gate as cpu
from .declare import accumulator, declare

ops = torch.ops.turbogr

_ARGUMENTS = "Tensor x, Tensor gate, Tensor? weight, Tensor? bias"


def norm_gate(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_norm over the last dim, times gate; and for the backward, mean and 1/deviation of each row."""
    wide = x.to(accumulator(x.dtype))
    mean = wide.mean(-1)
    rstd = ((wide - mean.unsqueeze(-1)).square().mean(-1) + eps).rsqrt()
    result = _affine(_normal(x, mean, rstd), weight, bias) * gate
    return result.to(x.dtype).contiguous(), mean.contiguous(), rstd.contiguous()


def norm_gate_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    """Gradients of x, gate, weight and bias; a tensor without elements where nobody wants one."""
    normal = _normal(x, mean, rstd)
    slope = grad.to(normal.dtype) * gate  # of the layer norm's result
    inner = slope if weight is None else slope * weight  # of the normalised row
    shift = inner.mean(-1, keepdim=True) + normal * (inner * normal).mean(-1, keepdim=True)
    width = x.shape[-1]
    found = (
        (inner - shift) * rstd.unsqueeze(-1),
        grad * _affine(normal, weight, bias),
        (slope * normal).reshape(-1, width).sum(0),
        slope.reshape(-1, width).sum(0),
    )
    empty = cpu.gradients(x, gate, weight, bias, wanted)
    return tuple(to if to.numel() == 0 else to.copy_(value) for to, value in zip(empty, found, strict=True))


def _normal(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (x.to(mean.dtype) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)


def _affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = normal if weight is None else normal * weight
    return scaled if bias is None else scaled + bias


def _fake(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _backward_fake(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    x, gate, weight, bias, *_, wanted = arguments
    return cpu.gradients(x, gate, weight, bias, wanted)


# --- derivative --------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(*inputs[:4], mean, rstd)


def _backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:4])
    found = ops.norm_gate_backward(grad, *ctx.saved_tensors, wanted)
    return *(x if want else None for x, want in zip(found, wanted, strict=True)), None


_CONTRACT = Contract(
    nonzero="D",
    x=Array("...B D", REAL),
    gate=Array("...B D", As("x")),
    weight=Array("D", REAL),
    bias=Array("D", REAL),
)

declare(
    f"norm_gate({_ARGUMENTS}, float eps) -> (Tensor result, Tensor mean, Tensor rstd)",
    _CONTRACT.extended(eps=Number()),
    reference=norm_gate,
    cpu=cpu.norm_gate,
    fake=_fake,
    backward=_backward,
    save=_save,
)
declare(
    f"norm_gate_backward(Tensor grad, {_ARGUMENTS}, Tensor mean, Tensor rstd, bool[4] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _CONTRACT.extended(
        grad=Array("...B D", As("x")),
        mean=Array("...B", As("x", sums=True)),
        rstd=Array("...B", As("x", sums=True)),
        wanted=Flags(("x", "gate", "weight", "bias")),
    ),
    reference=norm_gate_backward,
    cpu=cpu.norm_gate_backward,
    fake=_backward_fake,
)
