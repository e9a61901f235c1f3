"""Reading an L2 normalisation: x divided by max(norm of x, eps), in any spelling that means just that."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from ...rules.pattern import arguments
from ..common.cross_entropy import value_of

aten = torch.ops.aten
_NORMS = {aten.linalg_vector_norm.default, aten.linalg_norm.default, aten.norm.ScalarOpt_dim, aten.norm.Scalar}


def as_held(number: float, x: fx.Node) -> float | None:
    """The number, as a tensor of that type has it; None where it has none."""
    dtype = value_of(x).dtype
    if dtype.is_complex or not (dtype.is_floating_point or math.isfinite(number)):
        return None
    return float(torch.tensor(number, dtype=torch.float64).to(dtype))


def number_of(x: Any) -> float | None:
    """The value of a number, or of a constant of no dims."""
    if isinstance(x, (int, float)) and not isinstance(x, bool):
        return float(x)
    value = tensor(x)
    if value is None or value.dim() != 0:
        return None
    if x.op == "get_attr":
        found = x.graph.owning_module
        for name in str(x.target).split("."):
            found = getattr(found, name, None)
        is_number = isinstance(found, torch.Tensor) and not found.requires_grad
        return float(found) if is_number and not isinstance(found, torch.nn.Parameter) else None
    if x.target in (aten.full.default, aten.scalar_tensor.default):
        filled = arguments(x)["fill_value" if x.target is aten.full.default else "s"]
        return as_held(float(filled), x) if isinstance(filled, (int, float)) else None
    found = number_of(x.args[0]) if x.target in (aten._to_copy.default, aten.clone.default) else None
    return None if found is None else as_held(found, x)


def normalised(node: fx.Node, axis: int) -> tuple[fx.Node, float, list[fx.Node]] | None:
    """x, eps and the nodes in between, where `node` is x / max(norm of x along axis, eps); eps 0 for no maximum."""
    if node.target not in (aten.div.Tensor, aten.mul.Tensor):
        return None
    for x, by in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        if tensor(x) is None or tensor(by) is None or value_of(x).dim() != value_of(by).dim():
            continue
        read = _inverse if node.target is aten.mul.Tensor else _length
        found = read(by, x, axis)
        if found is not None:
            return x, found[0], [node, *found[1]]  # type: ignore[return-value]
        if node.target is aten.div.Tensor:
            break
    return None


Length = tuple[float, list[fx.Node]]  # eps, and what computes max(norm, eps)


def _length(node: Any, x: Any, axis: int) -> Length | None:
    """max(norm of x, eps)."""
    if tensor(node) is None:
        return None
    if _repeats(node) or _puts_back(node, axis):
        return _more(node, _length(node.args[0], x, axis))
    if node.target is aten.sqrt.default:
        return _rooted(node, _squares(node.args[0], x, axis))
    bound = _bounded(node)
    if bound is not None:
        inner = _length(bound[0], x, axis)
        return None if inner is None or inner[0] > bound[1] else (max(bound[1], 0.0), [node, *inner[1]])
    return (0.0, [node]) if _is_norm(node, x, axis) else None


def _inverse(node: Any, x: Any, axis: int) -> Length | None:
    """1 / max(norm of x, eps)."""
    if _repeats(node) or _puts_back(node, axis):
        return _more(node, _inverse(node.args[0], x, axis))
    if node.target is aten.rsqrt.default:
        return _rooted(node, _squares(node.args[0], x, axis))
    if node.target is aten.reciprocal.default:
        return _more(node, _length(node.args[0], x, axis))
    return None


def _more(node: fx.Node, found: Length | None) -> Length | None:
    return None if found is None else (found[0], [node, *found[1]])


def _rooted(node: fx.Node, found: Length | None) -> Length | None:
    return None if found is None else (math.sqrt(found[0]), [node, *found[1]])


def _squares(node: Any, x: Any, axis: int) -> Length | None:
    """max(sum of squares of x, eps). Equal to the norm's, except for rows of zeros, whose slope is not a number."""
    bound = _bounded(node)
    if bound is not None:
        return None if bound[1] < 0 else _raised(node, bound[1], _squares(bound[0], x, axis))
    if node.target is not aten.sum.dim_IntList or arguments(node)["dim"] != [axis]:
        return None
    square = node.args[0]
    if square.target is aten.pow.Tensor_Scalar and square.args[0] is x and square.args[1] == 2:
        return 0.0, [node, square]
    if square.target is aten.square.default and square.args[0] is x:
        return 0.0, [node, square]
    if square.target is aten.mul.Tensor and square.args[0] is x and square.args[1] is x:
        return 0.0, [node, square]
    return None


def _raised(node: fx.Node, least: float, found: Length | None) -> Length | None:
    return None if found is None or found[0] > least else (least, [node, *found[1]])


def _bounded(node: fx.Node) -> tuple[Any, float] | None:
    """max(something, number)."""
    if node.target is aten.clamp.default:
        a = arguments(node)
        if a["max"] is None and isinstance(a["min"], (int, float)):
            return a["self"], float(a["min"])
    if node.target is aten.maximum.default:
        for x, other in (node.args[:2], node.args[1::-1]):
            least = number_of(other)
            if least is not None:
                return x, least
    return None


def _repeats(node: fx.Node) -> bool:
    """Expands along dims it has."""
    return node.target is aten.expand.default and value_of(node).dim() == value_of(node.args[0]).dim()


def _puts_back(node: fx.Node, axis: int) -> bool:
    """Adds the dim that a norm without keepdim took away."""
    return bool(node.target is aten.unsqueeze.default and node.args[1] == axis)


def _is_norm(node: fx.Node, x: Any, axis: int) -> bool:
    if node.target not in _NORMS or node.args[0] is not x:
        return False
    a = arguments(node)
    order = a.get("ord", a.get("p"))
    dims = a.get("dim")
    two = order is None or (isinstance(order, (int, float)) and float(order) == 2.0)
    same_type = a.get("dtype") is None and value_of(node).dtype == value_of(x).dtype
    return bool(two and dims == [axis] and same_type)
