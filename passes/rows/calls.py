"""Reading the calls of a captured graph: op names, arguments by name, sizes."""

from __future__ import annotations

import operator
import string
from collections.abc import Callable, Container, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from ... import _torch
from ...graph.nodes import tensor
from ...graph.shapes import expression

Size: TypeAlias = "int | sympy.Expr"

VIEWS = {"reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "permute", "transpose", "t", "expand",
         "repeat", "tile", "broadcast_to", "expand_as", "view_as", "reshape_as", "movedim", "swapaxes"}  # fmt: skip
REPEATS = {"expand", "broadcast_to", "expand_as", "repeat", "tile", "repeat_interleave"}
COPIES = {"clone", "alias", "detach", "lift_fresh_copy", "contiguous"}
# The value does not depend on the tensor they are given, only the shape does.
LIKE = {"zeros_like": 0, "ones_like": 1, "new_zeros": 0, "new_ones": 1}
_SYNONYMS = {
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "negative": "neg", "not_equal": "ne",
    "greater": "gt", "less": "lt", "greater_equal": "ge", "less_equal": "le", "clip": "clamp", "absolute": "abs",
    "concat": "cat", "swapaxes": "transpose", "_unsafe_index": "index",
}  # fmt: skip
ROWS = "T"  # the letter of packed rows in an einsum
SPLITS = {"split", "split_with_sizes", "chunk", "tensor_split", "unbind"}


def op(node: Any) -> str:
    """Short name of an ATen op, one for all its synonyms; 'namespace::name' of others, 'getitem', or ''."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    return name_of(node.target)


@lru_cache(maxsize=4096)
def name_of(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.removeprefix("aten::")
        if torch.Tag.view_copy in target.tags:  # a view whose result has memory of its own
            name = name.removesuffix("_copy")
        return _SYNONYMS.get(name, name)
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


def unread(node: fx.Node, read: Container[str]) -> str | None:
    """An argument that differs from its default and is not among those that are read, as 'name=value'."""
    for name, value in given(node).items():
        default = _parameters(node.target)[name][1]
        if name not in read and not _alike(value, default):
            return f"{name}={'%' + value.name if isinstance(value, fx.Node) else value}"
    return None


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return not isinstance(a, fx.Node) and bool(a == b)


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


def given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call, by their names in the schema; those left out are not there."""
    return {**dict(zip(_parameters(node.target), node.args, strict=False)), **node.kwargs}


def again(node: fx.Node, changed: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the same call with some of them changed, placed as the schema places them."""
    target: Any = node.target
    schema = target._schema.arguments
    named = {**given(node), **changed}
    last = max((i for i, a in enumerate(schema) if a.name in named and not a.kwarg_only), default=-1)
    args = tuple(named.get(a.name, a.default_value) for a in schema[: last + 1])
    return args, {a.name: named[a.name] for a in schema if a.kwarg_only and a.name in named}


def operand(node: fx.Node, at: int = 0) -> fx.Node:
    """An argument that is a value of the graph."""
    found = node.args[at]
    assert isinstance(found, fx.Node), node
    return found


def operands(node: fx.Node, at: int = 0) -> list[fx.Node]:
    """An argument that is a list of values of the graph."""
    found = node.args[at]
    assert isinstance(found, (list, tuple)) and all(isinstance(x, fx.Node) for x in found), node
    return [x for x in found if isinstance(x, fx.Node)]


def piece_of(node: fx.Node) -> int:
    """Which result of several a getitem takes."""
    found = node.args[1]
    assert isinstance(found, int), node
    return found


def called(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target), node
    return node.target


def tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if tensor(n) is not None]


def is_tensor(value: Any) -> bool:
    return tensor(value) is not None


def value_of(node: Any) -> torch.Tensor:
    """The fake value of a node that is one tensor."""
    value = tensor(node)
    assert value is not None, node
    return value


def rank_of(node: Any) -> int:
    return value_of(node).dim()


def size(value: Any) -> Size:
    """A size as a number or an expression."""
    return value if isinstance(value, int) else folded(expression(value))


def folded(value: sympy.Expr) -> Size:
    return int(value) if value.is_Integer else value


def shape(node: Any) -> list[Size]:
    return [size(s) for s in value_of(node).shape]


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


@lru_cache(maxsize=65536)
def differ(a: Size, b: Size) -> bool:
    """Can two sizes never be equal?"""
    if a == b or (isinstance(a, int) and isinstance(b, int)):
        return a != b
    ratio = sympy.cancel(sympy.sympify(a) / sympy.sympify(b)) if b != 0 else sympy.nan
    return bool(ratio.is_number) and ratio not in (1, sympy.nan)


def product(sizes: Any) -> Size:
    result: Size = 1
    for s in sizes:
        result = result * s
    return folded(result) if isinstance(result, sympy.Expr) else result


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


def live(graph: fx.Graph) -> list[fx.Node]:
    """Nodes on whose values something depends: what nobody reads says nothing of rows."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in found or node.is_impure():  # inputs and the output are
            found.update([node, *node.all_input_nodes])
    return [node for node in graph.nodes if node in found]


# --- what some calls say -----------------------------------------------------------------------------


def swapped(n: fx.Node) -> tuple[int, int]:
    """Dims that a transpose exchanges."""
    if op(n) in ("t", "numpy_T"):
        return 0, 1
    first, second = (arg(n, name, arg(n, f"axis{name[-1]}")) for name in ("dim0", "dim1"))
    return first % rank_of(n), second % rank_of(n)


def padding(n: fx.Node) -> list[tuple[Any, Any]]:
    """(before, after) of each dim."""
    rank = rank_of(n)
    flat = list(arg(n, "pad"))
    pairs = [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
    return [(0, 0)] * (rank - len(pairs)) + pairs[::-1]


def joined_parts(n: fx.Node) -> list[fx.Node]:
    """Operands of a cat or stack; those of a cat that have no elements add nothing, whatever their rank."""
    parts: Any = n.args[0]
    return [p for p in parts if op(n) == "stack" or not is_void(p)] or list(parts)


def is_void(node: fx.Node) -> bool:
    """Has the value no elements, and do gradients reach what it is made of by another way, if at all?"""
    if not is_tensor(node) or 0 not in shape(node) or node.is_impure() or any(u.op == "output" for u in node.users):
        return False
    return all(
        any(is_tensor(u) and 0 not in shape(u) for u in x.users) or (x.op == "call_function" and is_void(x))
        for x in node.all_input_nodes
    )


def dim_of_cat(n: fx.Node) -> int:
    return arg(n, "dim", 0) % rank_of(n)


def einsum_labels(n: fx.Node) -> tuple[list[str], str] | None:
    """Labels of the operands and of the result, without the letter of packed rows; None where a letter is repeated
    within an operand."""
    equation = str(n.args[0]).replace(" ", "")
    left, arrow, out = equation.partition("->")
    inputs = left.split(",")
    operands: Any = n.args[1]
    free = [c for c in "ABCDEFGHIJKLMNOPQRS" if c not in equation]
    widest = max(rank_of(x) - len(label.replace("...", "")) for label, x in zip(inputs, operands, strict=True))
    for k, (label, x) in enumerate(zip(inputs, operands, strict=True)):
        count = rank_of(x) - len(label.replace("...", ""))
        inputs[k] = label.replace("...", "".join(free[widest - count : widest]))
    out = out.replace("...", "".join(free[:widest]))
    if any(len(set(label)) != len(label) for label in inputs):
        return None
    if not arrow:
        letters, first = "".join(inputs), free[:widest] if "..." in left else []
        out = "".join([*first, *sorted(c for c in set(letters) - set(first) if letters.count(c) == 1)])
    if ROWS in equation:
        other = next(c for c in string.ascii_letters if c != ROWS and c not in "".join(inputs))
        inputs, out = [label.replace(ROWS, other) for label in inputs], out.replace(ROWS, other)
    return inputs, out


def reduced_dims(n: fx.Node) -> list[int]:
    if op(n) in ("any", "all") and arg(n, "dim") in ([], ()):
        return []  # of these two alone, no dims are none
    dims = dims_of(n)
    return list(range(rank_of(n.args[0]))) if dims is None else dims


def counts_from_zero(n: Any) -> bool:
    """An arange from 0, possibly reshaped."""
    while op(n) in ("unsqueeze", "reshape", "clone", "_to_copy") or (op(n) == "add" and n.args[1] == 0):
        n = n.args[0]
    return op(n) == "arange" and arg(n, "start", 0) in (0, None) and arg(n, "step", 1) in (1, None)


def picking_mask(n: fx.Node) -> fx.Node | None:
    """The mask m when a node is x[m], x[nonzero(m)] or the like: it keeps the rows where m holds, in order."""
    if op(n) == "index_select":
        return _coordinates_of(arg(n, "index"), 0) if arg(n, "dim") == 0 else None
    indices: Any = n.args[1]
    if op(n) != "index" or not all(is_tensor(i) for i in indices):
        return None
    if len(indices) == 1 and value_of(indices[0]).dtype == torch.bool:
        return indices[0]
    masks = [_coordinates_of(i, k) for k, i in enumerate(indices)]
    mask = masks[0] if masks and all(m is masks[0] for m in masks) else None
    return mask if mask is not None and rank_of(mask) == len(indices) else None


def _coordinates_of(index: Any, k: int) -> fx.Node | None:
    """The mask whose k-th nonzero coordinates an index is."""
    while op(index) in ("clone", "_to_copy", "squeeze", "reshape"):
        index = index.args[0]
    if op(index) == "nonzero" and rank_of(index.args[0]) == 1:
        return index.args[0]
    if op(index) == "getitem" and index.args[1] == k:
        source = index.args[0]
        if op(source) in ("nonzero_numpy", "where"):
            return source.args[0]
        if op(source) == "unbind" and arg(source, "dim") in (1, -1) and op(source.args[0]) == "nonzero":
            return source.args[0].args[0]
    if op(index) == "select" and arg(index, "dim") in (1, -1) and arg(index, "index") == k:
        return index.args[0].args[0] if op(index.args[0]) == "nonzero" else None
    return None
