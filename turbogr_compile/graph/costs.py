"""What a graph costs, as formulas in its symbolic sizes and as numbers at the sizes seen.

FLOPs count products (matrix products, attention, convolutions), two per multiply-add, as PyTorch's own counter does.
An op outside ATen without a registered formula is listed as unknown, never counted as zero.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from .shapes import expression
from .text import target_text

aten = torch.ops.aten
SEEN = "turbogr_seen"  # meta of an added input: its sizes in the batch seen at compile time
PAIRS = "turbogr_pairs"  # meta of a jagged attention: symbol and number of its pairs of query and key
MAX_OPERATIONS = 400  # beyond this a formula is printed unsimplified: simplification can explode


@dataclass
class Cost:
    flops: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    bytes: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    unknown: Counter[str] = field(default_factory=Counter)
    ops: Counter[str] = field(default_factory=Counter)
    nodes: int = 0


def cost(graph: fx.Graph) -> Cost:
    total = Cost()
    flops, moved = [], []
    for node in graph.nodes:
        total.nodes += 1
        if node.op != "call_function":
            continue
        name = target_text(node)
        total.ops[name] += 1
        counted = _flops(node)
        if counted is None:
            total.unknown[name] += 1
        else:
            flops.append(counted)
        moved.append(_bytes(node))
    total.flops, total.bytes = sympy.Add(*flops), sympy.Add(*moved)
    return total


def formula(expr: sympy.Expr) -> str:
    """Readable text of a cost."""
    if expr.is_number or sympy.count_ops(expr) > MAX_OPERATIONS:
        return str(expr)
    return str(sympy.factor(expr)) if sympy.count_ops(expr) < 40 else str(sympy.expand(expr))


def at_hints(expr: sympy.Expr, graph: fx.Graph) -> float | None:
    """The number for the sizes the compiler has seen; None where a size is only known at run time."""
    if expr.is_number:
        return float(expr)
    value = expr.subs(known_sizes(graph))
    return float(value) if value.is_number else None


def node_cost(node: fx.Node) -> tuple[sympy.Expr | None, sympy.Expr]:
    """FLOPs, None where no formula is known, and bytes."""
    return _flops(node), _bytes(node)


def known_sizes(graph: fx.Graph) -> dict[sympy.Symbol, int]:
    """Numbers of symbolic sizes in the batch seen at compile time."""
    from .. import _torch

    env = _torch.shape_env_of(graph)
    return {**(env.backed_var_to_val if env is not None else {}), **seen_sizes(graph)}


def seen_sizes(graph: fx.Graph) -> dict[sympy.Symbol, int]:
    """Sizes that only the run knows, as they were in the batch seen at compile time."""
    known: dict[sympy.Symbol, int] = {}
    for node in graph.nodes:
        pairs = node.meta.get(PAIRS)
        if pairs is not None and pairs[1] is not None:
            known[pairs[0]] = pairs[1]
        value = node.meta.get("val")
        if SEEN in node.meta and isinstance(value, torch.Tensor):
            for size, number in zip(value.shape, node.meta[SEEN], strict=True):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    known[size.node.expr] = number
    return known


def human(value: float | None, unit: str = "") -> str:
    """1.5 G for 1.5e9; '?' where unknown."""
    if value is None:
        return "?"
    if value == 0:
        return f"0 {unit}".rstrip()
    power = min(max(int(math.log10(abs(value)) // 3), 0), 5)
    return f"{value / 1000**power:.3g} {' kMGTP'[power].strip()}{unit}".rstrip()


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _prod(sizes: Any) -> sympy.Expr:
    return sympy.Mul(*[expression(s) for s in sizes])


def _flops(node: fx.Node) -> sympy.Expr | None:
    target = node.target
    packet = getattr(target, "overloadpacket", target)
    args = [_value(a) for a in node.args]
    out: Any = node.meta.get("val")
    if packet in _COMPOSITE and all(isinstance(a, torch.Tensor) for a in args[:2]):
        return _COMPOSITE[packet](args, out)
    if packet is aten.einsum:
        return _einsum(node)
    if PAIRS in node.meta:
        query, value = args[0], args[2]
        return (
            2
            * node.meta[PAIRS][0]
            * expression(query.shape[1])
            * (expression(query.shape[2]) + expression(value.shape[2]))
        )
    if packet in flop_registry:
        try:
            kwargs = {k: _value(v) for k, v in node.kwargs.items()}
            return expression(flop_registry[packet](*args, **kwargs, out_val=out))
        except Exception:
            return None
    if isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims", "prim"):
        return None
    return sympy.Integer(0)


def _linear(args: list[Any], out: torch.Tensor) -> sympy.Expr:
    return 2 * _prod(out.shape) * expression(args[0].shape[-1])


def _attention(args: list[Any], out: torch.Tensor) -> sympy.Expr:
    query, key, value = (a.shape for a in args[:3])
    pairs = _prod(query[:-1]) * expression(key[-2])
    return 2 * pairs * (expression(query[-1]) + expression(value[-1]))


def _convolution(args: list[Any], out: torch.Tensor) -> sympy.Expr:
    return 2 * _prod(out.shape) * _prod(args[1].shape[1:])


_COMPOSITE = {
    aten.linear: _linear, aten.matmul: _linear, aten.scaled_dot_product_attention: _attention,
    aten.conv1d: _convolution, aten.conv2d: _convolution,
}  # fmt: skip


def _einsum(node: fx.Node) -> sympy.Expr | None:
    """Two per point of the index space, for the usual product of two operands."""
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or "." in equation or not isinstance(operands, (list, tuple)):
        return None
    sizes: dict[str, Any] = {}
    for labels, operand in zip(equation.replace(" ", "").split("->")[0].split(","), operands, strict=False):
        sizes |= dict(zip(labels, _value(operand).shape, strict=False))
    return 2 * _prod(sizes.values()) if len(operands) == 2 else None


def _bytes(node: fx.Node) -> sympy.Expr:
    """Bytes read and written by an op that is not a view."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or _is_view(target):
        return sympy.Integer(0)
    values = [_value(n) for n in node.all_input_nodes]
    out = node.meta.get("val")
    values += list(out) if isinstance(out, (list, tuple)) else [out]
    return sympy.Add(*[_prod(v.shape) * v.element_size() for v in values if isinstance(v, torch.Tensor)])


def _is_view(target: torch._ops.OpOverload) -> bool:
    returns = target._schema.returns
    return (bool(returns) and returns[0].alias_info is not None and not target._schema.is_mutable) or (
        target in (aten.reshape.default, aten.detach.default)
    )
