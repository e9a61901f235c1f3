"""Which function stands for which GE operator type, and how the functions read what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..dtypes import of_attribute
from ..graph import GraphError, Node

Tensor = torch.Tensor
Kernel = Callable[..., "Tensor | Sequence[Tensor | None]"]  # (node, *inputs); an input that is not fed is None

KERNELS: dict[str, Kernel] = {}


def kernel(*types: str) -> Callable[[Kernel], Kernel]:
    """Decorator: the function computes these types."""

    def register(function: Kernel) -> Kernel:
        for op in types:
            if op in KERNELS:
                raise ValueError(f"GE operator {op} has a kernel already")
            KERNELS[op] = function
        return function

    return register


def plain(functions: dict[str, Callable[..., Any]]) -> None:
    """Types without attributes that are one function of torch's."""
    for op, function in functions.items():
        kernel(op)(_without_node(function))


def _without_node(function: Callable[..., Any]) -> Kernel:
    return lambda node, *inputs: function(*inputs)


def integers(tensor: Tensor) -> list[int]:
    return [int(v) for v in tensor.reshape(-1).tolist()]


def integer(tensor: Tensor) -> int:
    return integers(tensor)[0]


def dtype_of(node: Node, name: str, default: torch.dtype) -> torch.dtype:
    """An attribute that names a dtype, whether GE's prototype calls it a type or a number."""
    value = node.attribute(name)
    found = of_attribute(value) if isinstance(value, int) else value
    if found is None and isinstance(value, int) and name in node.attributes:
        raise GraphError(f"{node}: attribute {name} is GE dtype {value}, which torch has no twin of")
    return found or default


def require_default(node: Node, **defaults: Any) -> None:
    """Of these attributes only the default is understood."""
    for name, value in defaults.items():
        if node.attribute(name, value) != value:
            raise GraphError(f"{node}: attribute {name}={node.attribute(name)!r} is not simulated, only {value!r} is")
