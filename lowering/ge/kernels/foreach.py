"""Lists of tensors at once, as fused optimizers use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..graph import Node
from .registry import Tensor, kernel

_UNARY: dict[str, Callable[..., Tensor]] = {
    "Abs": torch.abs, "Cos": torch.cos, "Cosh": torch.cosh, "Erf": torch.erf, "Erfc": torch.erfc,
    "Exp": torch.exp, "Expm1": torch.expm1, "Log": torch.log, "Log10": torch.log10, "Log1p": torch.log1p,
    "Log2": torch.log2, "Neg": torch.neg,
    "Sigmoid": torch.sigmoid, "Sin": torch.sin, "Sinh": torch.sinh, "Tan": torch.tan, "Tanh": torch.tanh,
}  # fmt: skip
_BINARY: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.true_divide, "Maximum": torch.maximum,
    "Minimum": torch.minimum, "Pow": torch.pow,
}  # fmt: skip
_ROUNDING = {1: torch.round, 2: torch.floor, 3: torch.ceil, 4: torch.round, 5: torch.trunc, 7: torch.frac}


def _lists(inputs: tuple[Tensor, ...], count: int) -> list[tuple[Tensor, ...]]:
    """Inputs that come as several lists of one length."""
    length = len(inputs) // count
    return [inputs[i * length : (i + 1) * length] for i in range(count)]


def _scalars(scalar: Tensor, count: int) -> list[Tensor]:
    """One for all tensors, or one for each."""
    flat = scalar.reshape(-1)
    return list(flat) if len(flat) == count else [flat[0]] * count


def _define() -> None:
    def unary(function: Callable[..., Tensor]) -> Any:
        return lambda node, *x: tuple(function(a) for a in x)

    def with_list(function: Callable[..., Tensor], has_alpha: bool) -> Any:
        def run(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
            alpha = inputs[-1] if has_alpha else 1
            first, second = _lists(inputs[:-1] if has_alpha else inputs, 2)
            return tuple(
                function(a, b * alpha if has_alpha else b).to(a.dtype) for a, b in zip(first, second, strict=True)
            )

        return run

    def with_scalar(function: Callable[..., Tensor]) -> Any:
        def run(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
            *x, scalar = inputs
            return tuple(function(a, s).to(a.dtype) for a, s in zip(x, _scalars(scalar, len(x)), strict=True))

        return run

    for name, function in _UNARY.items():
        kernel(f"Foreach{name}")(unary(function))
    for name, function in _BINARY.items():
        kernel(f"Foreach{name}List")(with_list(function, has_alpha=name in ("Add", "Sub")))
        kernel(f"Foreach{name}Scalar", f"Foreach{name}ScalarList")(with_scalar(function))


_define()


def _add_scaled(combine: Callable[[Tensor, Tensor], Tensor]) -> Any:
    def run(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
        *tensors, scalar = inputs
        x, x1, x2 = _lists(tuple(tensors), 3)
        scales = _scalars(scalar, len(x))
        return tuple((a + s * combine(b, c)).to(a.dtype) for a, b, c, s in zip(x, x1, x2, scales, strict=True))

    return run


kernel("ForeachAddcmulScalar", "ForeachAddcmulScalarList", "ForeachAddcmulList")(_add_scaled(torch.mul))
kernel("ForeachAddcdivScalar", "ForeachAddcdivScalarList", "ForeachAddcdivList")(_add_scaled(torch.true_divide))


@kernel("ForeachLerpScalar")
def lerp_by_one(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    *tensors, weight = inputs
    starts, ends = _lists(tuple(tensors), 2)
    return tuple(torch.lerp(a, b, weight.reshape(()).to(a.dtype)) for a, b in zip(starts, ends, strict=True))


@kernel("ForeachLerpList")
def lerp_by_each(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    starts, ends, weights = _lists(inputs, 3)
    return tuple(torch.lerp(a, b, w) for a, b, w in zip(starts, ends, weights, strict=True))


@kernel("ForeachNorm")
def norm(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    *x, order = inputs
    return tuple(torch.linalg.vector_norm(a, float(order)) for a in x)


@kernel("ForeachPowScalarAndTensor")
def power_of_number(node: Node, scalar: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.pow(scalar.reshape(()), a).to(a.dtype) for a in x)


@kernel("ForeachRoundOffNumber")
def round_off(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    *x, mode = inputs
    return tuple(_ROUNDING[int(mode)](a) for a in x)
