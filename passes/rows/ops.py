"""Reading the calls of a captured graph: op names, arguments by name, sizes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from ... import _torch
from ...graph.nodes import tensor
from ...graph.shapes import expression

Size: TypeAlias = "int | sympy.Expr"

# Row r of the result depends on row r of the operands alone, but torch does not tag them as pointwise.
_ALSO_POINTWISE = {
    "clone", "_to_copy", "to", "detach", "alias", "contiguous", "lift_fresh_copy", "dropout", "zeros_like", "ones_like",
    "full_like", "multiply", "type_as", "where", "masked_fill", "copy", "divide", "subtract", "true_divide", "fill",
    "gelu", "log_sigmoid", "softplus", "nan_to_num", "logical_or", "logical_and", "logical_not", "greater", "less",
    "greater_equal", "less_equal", "floor_divide", "not_equal", "negative", "absolute", "square", "clip",
}  # fmt: skip
_NOT_POINTWISE = {"bernoulli", "rand_like", "randn_like", "randint_like", "normal"}
VIEWS = {"reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "transpose", "t", "expand",
         "repeat", "tile", "broadcast_to", "expand_as", "view_as", "reshape_as", "movedim", "swapaxes"}  # fmt: skip
COPIES = {"clone", "alias", "detach", "lift_fresh_copy", "contiguous"}
# The value does not depend on the tensor they are given, only the shape does.
LIKE = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
SPLITS = {"split", "split_with_sizes", "chunk", "tensor_split", "unbind"}


def op(node: Any) -> str:
    """Short name of an ATen op, 'namespace::name' of others, 'getitem', or '' for what is not a call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    return _name(node.target)


@lru_cache(maxsize=4096)
def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.removeprefix("aten::")
    return "getitem" if target is operator.getitem else getattr(target, "__name__", str(target))


@lru_cache(maxsize=4096)
def _parameters(target: torch._ops.OpOverload) -> dict[str, tuple[int, Any]]:
    return {a.name: (i, a.default_value if a.has_default_value() else None)
            for i, a in enumerate(target._schema.arguments)}  # fmt: skip


def arg(node: fx.Node, name: str, default: Any = None) -> Any:
    """Argument of a call by its name in the schema, or the schema's default; `default` where there is no such name."""
    if name in node.kwargs:
        return node.kwargs[name]
    known = _parameters(node.target) if isinstance(node.target, torch._ops.OpOverload) else {}
    if name not in known:
        return default
    index, value = known[name]
    return node.args[index] if index < len(node.args) else value


def dims_of(node: fx.Node, name: str = "dim") -> list[int] | None:
    """Dims an op works on, non-negative; None for 'all of them'."""
    value = arg(node, name)
    if value is None or value == []:
        return None
    rank = rank_of(node.args[0])
    return [d % rank if rank else d for d in (value if isinstance(value, (list, tuple)) else [value])]


def dim_of(node: fx.Node, name: str = "dim") -> int:
    dims = dims_of(node, name)
    return dims[0] if dims else 0


def is_pointwise(node: fx.Node) -> bool:
    name = op(node)
    if not name or name in _NOT_POINTWISE or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return name in _ALSO_POINTWISE or torch.Tag.pointwise in node.target.tags


def tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if tensor(n) is not None]


def is_tensor(value: Any) -> bool:
    return tensor(value) is not None


def rank_of(node: Any) -> int:
    value = tensor(node)
    assert value is not None, node
    return value.dim()


def size(value: Any) -> Size:
    """A size as a number or an expression."""
    return value if isinstance(value, int) else _number(expression(value))


def _number(value: sympy.Expr) -> Size:
    return int(value) if value.is_Integer else value


def shape(node: Any) -> list[Size]:
    value = tensor(node)
    assert value is not None, node
    return [size(s) for s in value.shape]


@lru_cache(maxsize=65536)
def quotient(a: Size, b: Size) -> Size | None:
    """a / b where that is provably a whole number."""
    if a == b:
        return 1
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    whole = sympy.cancel(sympy.sympify(a) / sympy.sympify(b))
    if whole.is_Integer or whole.is_Rational:
        return int(whole) if whole.is_Integer else None
    return whole if sympy.denom(whole) == 1 else None


def product(sizes: Any) -> Size:
    result: Size = 1
    for s in sizes:
        result = result * s
    return _number(result) if isinstance(result, sympy.Expr) else result


def number(value: Any) -> float | int | bool | None:
    """A plain number, or None."""
    return value if isinstance(value, (bool, int, float)) else None


def size_symbols(placeholders: Sequence[fx.Node]) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Inputs from which symbolic sizes can be read."""
    found: dict[sympy.Symbol, tuple[int, int | None]] = {}
    for index, node in enumerate(placeholders):
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            found.setdefault(value.node.expr, (index, None))
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    found.setdefault(size.node.expr, (index, dim))
    return found


def size_seen(graph: fx.Graph, value: Size) -> int | None:
    """A size as it was in the call that is being compiled; never adds a guard."""
    if isinstance(value, int):
        return value
    env = _torch.shape_env_of(graph)
    known = env.backed_var_to_val if env is not None else {}
    number = value.subs({s: known[s] for s in value.free_symbols if s in known})
    return int(number) if number.is_Integer else None
