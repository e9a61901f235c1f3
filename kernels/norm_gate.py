"""Layer norm and a gate in one pass: layer_norm(x) · gate, as an HSTU block ends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu import norm_gate as cpu
from .declare import accumulator, checked, declare, require, require_size, require_tensor

ops = torch.ops.turbogr

_ARGUMENTS = "Tensor x, Tensor gate, Tensor? weight, Tensor? bias"


def norm_gate(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """layer_norm over the last dim, times gate; and for the backward, mean and 1/deviation of each row."""
    _check(x, gate, weight, bias, eps)
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
    _check_backward(grad, x, gate, weight, bias, mean, rstd, wanted)
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
    _check(x, gate, weight, bias, eps)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=accumulator(x.dtype)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


def _backward_fake(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    _check_backward(grad, *arguments)
    x, gate, weight, bias, *_, wanted = arguments
    return cpu.gradients(x, gate, weight, bias, wanted)


# --- checks ------------------------------------------------------------------------------------------


def _check(x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    require_tensor(x, "norm_gate: x", max(x.dim(), 1))
    _check_like(gate, x, "norm_gate", "gate")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            require_tensor(vector, f"norm_gate: {name}", 1)
            require_size(vector.shape[0], x.shape[-1], f"norm_gate: length of {name}")


def _check_backward(
    grad: Tensor,
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    wanted: list[bool],
) -> None:
    _check(x, gate, weight, bias, 0.0)
    _check_like(grad, x, "norm_gate_backward", "grad")
    for name, vector in (("mean", mean), ("rstd", rstd)):
        require_tensor(vector, f"norm_gate_backward: {name}", x.dim() - 1, accumulator(x.dtype))
        for found, size in zip(vector.shape, x.shape[:-1], strict=True):
            require_size(found, size, f"norm_gate_backward: size of {name}")
    require(len(wanted) == 4, "norm_gate_backward: wanted has one entry each for x, gate, weight and bias")


def _check_like(found: Tensor, x: Tensor, op: str, name: str) -> None:
    require_tensor(found, f"{op}: {name}", x.dim(), x.dtype)
    for size, wanted in zip(found.shape, x.shape, strict=True):
        require_size(size, wanted, f"{op}: size of {name}")


# --- derivative --------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(*inputs[:4], mean, rstd)


def _backward(ctx: Any, grad: Tensor, *rest: Any) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:4])
    found = ops.norm_gate_backward(grad, *ctx.saved_tensors, wanted)
    return *(x if want else None for x, want in zip(found, wanted, strict=True)), None


declare(
    f"norm_gate({_ARGUMENTS}, float eps) -> (Tensor result, Tensor mean, Tensor rstd)",
    reference=norm_gate,
    cpu=checked(_check, cpu.norm_gate),
    fake=_fake,
    backward=_backward,
    save=_save,
)
declare(
    f"norm_gate_backward(Tensor grad, {_ARGUMENTS}, Tensor mean, Tensor rstd, bool[4] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    reference=norm_gate_backward,
    cpu=checked(_check_backward, cpu.norm_gate_backward),
    fake=_backward_fake,
)
