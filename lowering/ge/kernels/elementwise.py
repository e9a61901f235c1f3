"""Element by element: arithmetic, comparisons, activations and their gradients, casts and copies."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..graph import Node
from .registry import Tensor, dtype_of, kernel, plain, require_default

aten = torch.ops.aten

plain({
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh,
    "Erf": torch.erf, "Erfc": torch.erfc, "Erfinv": torch.erfinv, "Exp": torch.exp, "Expm1": torch.expm1,
    "Floor": torch.floor, "Invert": torch.bitwise_not, "IsFinite": torch.isfinite, "IsInf": torch.isinf,
    "IsNan": torch.isnan, "Log": torch.log, "Log1p": torch.log1p, "LogicalNot": torch.logical_not, "Neg": torch.neg,
    "OnesLike": torch.ones_like, "Reciprocal": torch.reciprocal, "Round": torch.round, "Rsqrt": torch.rsqrt,
    "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Sqrt": torch.sqrt, "Square": torch.square,
    "Tan": torch.tan, "Trunc": torch.trunc, "ZerosLike": torch.zeros_like,
    "Add": torch.add, "AddV2": torch.add, "Sub": torch.sub, "Mul": torch.mul, "RealDiv": torch.true_divide,
    "Div": torch.true_divide, "FloorDiv": torch.floor_divide, "FloorMod": torch.remainder, "Mod": torch.fmod,
    "Pow": torch.pow, "Maximum": torch.maximum, "Minimum": torch.minimum, "Xlogy": torch.xlogy,
    "Equal": torch.eq, "NotEqual": torch.ne, "Less": torch.lt, "LessEqual": torch.le, "Greater": torch.gt,
    "GreaterEqual": torch.ge, "LogicalAnd": torch.logical_and, "LogicalOr": torch.logical_or,
    "BitwiseAnd": torch.bitwise_and, "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
    "LeftShift": torch.bitwise_left_shift, "RightShift": torch.bitwise_right_shift,
    "Relu": torch.relu, "Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "LogSigmoid": F.logsigmoid, "Mish": F.mish,
    "Softplus": F.softplus, "HardSwish": F.hardswish, "PRelu": lambda x, weight: torch.where(x > 0, x, weight * x),
    "SelectV2": torch.where, "Lerp": torch.lerp, "MaskedFill": lambda x, mask, value: torch.where(mask, value, x),
    "TruncateDiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "ClipByValueV2": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
    "AxpyV2": lambda a, b, alpha: a + alpha * b,
    "Sxpy": lambda a, b, alpha=None: a - b if alpha is None else a - alpha * b,
    "Addcmul": lambda a, b, c, value: a + value * b * c,
    "Addcdiv": lambda a, b, c, value: a + value * b / c,
})  # fmt: skip

# Gradients; the names of what they read follow GE's prototypes.
plain({
    "ReluGrad": lambda gradients, features: torch.where(features > 0, gradients, 0),
    "SigmoidGrad": lambda y, dy: dy * y * (1 - y),
    "TanhGrad": lambda y, dy: dy * (1 - y * y),
    "LogSigmoidGrad": lambda grads, features: grads * torch.sigmoid(-features),
    "SoftplusGrad": lambda gradients, features: gradients * torch.sigmoid(features),
    "HardSwishGrad": lambda grad, x: aten.hardswish_backward(grad, x),
    "GeluGrad": lambda dy, x, y: aten.gelu_backward(dy, x, approximate="tanh"),
    "Gelu": lambda x: F.gelu(x, approximate="tanh"),
})  # fmt: skip


@kernel("Cast")
def cast(node: Node, x: Tensor) -> Tensor:
    return x.to(dtype_of(node, "dst_type", x.dtype))


@kernel("Bitcast")
def bitcast(node: Node, x: Tensor) -> Tensor:
    return x.view(dtype_of(node, "type", x.dtype))


@kernel("Identity", "TensorMove", "IdentityN")
def copy(node: Node, *inputs: Tensor) -> tuple[Tensor, ...]:
    """A real copy: what reads it may write into it."""
    return tuple(x.clone() for x in inputs)


@kernel("Assign")
def assign(node: Node, ref: Tensor, value: Tensor) -> Tensor:
    return value.to(ref.dtype).expand_as(ref)


@kernel("Adds")
def add_number(node: Node, x: Tensor) -> Tensor:
    return (x + node.attribute("value")).to(x.dtype)


@kernel("Muls")
def multiply_by_number(node: Node, x: Tensor) -> Tensor:
    return (x * node.attribute("value")).to(x.dtype)


@kernel("Axpy")
def axpy(node: Node, x1: Tensor, x2: Tensor) -> Tensor:
    return (x1 + node.attribute("alpha") * x2).to(x1.dtype)


@kernel("NanToNum")
def nan_to_num(node: Node, x: Tensor) -> Tensor:
    return torch.nan_to_num(x, node.attribute("nan"), node.attribute("posinf"), node.attribute("neginf"))


@kernel("Swish")
def swish(node: Node, x: Tensor) -> Tensor:
    scale = node.attribute("scale", 1.0)
    return F.silu(x) if scale == 1.0 else x * torch.sigmoid(scale * x)


@kernel("SwishGrad")
def swish_gradient(node: Node, grad: Tensor, x: Tensor, y: Tensor) -> Tensor:
    require_default(node, scale=1.0)
    return aten.silu_backward(grad, x)


@kernel("GeluV2")
def gelu(node: Node, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=node.attribute("approximate", "none"))


@kernel("GeluGradV2")
def gelu_gradient(node: Node, dy: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(dy, x, approximate=node.attribute("approximate", "none"))


@kernel("Elu")
def elu(node: Node, x: Tensor) -> Tensor:
    return aten.elu(x, node.attribute("alpha", 1.0), node.attribute("scale", 1.0), node.attribute("input_scale", 1.0))


@kernel("EluGradV2")
def elu_gradient(node: Node, grads: Tensor, activations: Tensor) -> Tensor:
    alpha, scale, input_scale = (node.attribute(name, 1.0) for name in ("alpha", "scale", "input_scale"))
    return aten.elu_backward(grads, alpha, scale, input_scale, node.attribute("is_result", False), activations)


@kernel("LeakyRelu")
def leaky_relu(node: Node, x: Tensor) -> Tensor:
    return F.leaky_relu(x, node.attribute("negative_slope", 0.0))


@kernel("LeakyReluGrad")
def leaky_relu_gradient(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    return torch.where(features > 0, gradients, gradients * node.attribute("negative_slope", 0.0))


@kernel("HardSigmoid")
def hard_sigmoid(node: Node, x: Tensor) -> Tensor:
    return (x * node.attribute("alpha", 1 / 6) + node.attribute("beta", 0.5)).clamp(0, 1)


@kernel("HardSigmoidGrad")
def hard_sigmoid_gradient(node: Node, grads: Tensor, x: Tensor) -> Tensor:
    slope = node.attribute("alpha", 1 / 6)
    line = x * slope + node.attribute("beta", 0.5)
    return torch.where((line > 0) & (line < 1), grads * slope, 0)


@kernel("HardtanhGrad")
def hardtanh_gradient(node: Node, result: Tensor, grad: Tensor) -> Tensor:
    inside = (result > node.attribute("min_val", -1.0)) & (result < node.attribute("max_val", 1.0))
    return torch.where(inside, grad, 0)


@kernel("ThresholdV2")
def threshold(node: Node, x: Tensor, limit: Tensor, value: Tensor | None = None) -> Tensor:
    return torch.where(x > limit, x, torch.zeros_like(x) if value is None else value)


@kernel("ThresholdGradV2D")
def threshold_gradient(node: Node, gradients: Tensor, features: Tensor) -> Tensor:
    return torch.where(features > node.attribute("threshold"), gradients, 0)


@kernel("GLU")
def glu(node: Node, x: Tensor) -> Tensor:
    return F.glu(x, node.attribute("dim", -1))


@kernel("GLUGrad")
def glu_gradient(node: Node, gradient: Tensor, x: Tensor) -> Tensor:
    return aten.glu_backward(gradient, x, node.attribute("dim", -1))


@kernel("PReluGrad")
def prelu_gradient(node: Node, grads: Tensor, features: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    to_weight = torch.where(features > 0, 0, grads * features)
    return torch.where(features > 0, grads, grads * weights), to_weight
