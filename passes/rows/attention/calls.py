"""Calls of a captured graph, and declarations of what is modelled of them.

A rule names the arguments that it models. Any other argument that is off its schema's default makes the call unknown to
the rule: `div(rounding_mode="floor")` is not `div`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import fx

from ..calls import op
from .formula import Index, Size, size_of
from .language import Leaf, Number, Unknown

# Where a value lies, not what it is.
_OF_PLACE = {"memory_format", "device", "layout", "pin_memory", "non_blocking", "copy", "generator", "implicit"}
_RANDOM = {"dropout", "native_dropout", "bernoulli", "rand", "randn", "randint", "rand_like", "randn_like", "normal"}


class Unmodelled(Unknown):
    """An argument that no rule models."""


def is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or op(node) in _RANDOM


def value(node: fx.Node) -> Any:
    return node.meta["val"]


def shape(node: fx.Node) -> list[Size]:
    return [size_of(s) for s in value(node).shape]


@lru_cache(maxsize=4096)
def _schema(target: Any) -> tuple[tuple[str, Any, bool], ...]:
    if not isinstance(target, torch._ops.OpOverload):
        raise Unknown(str(target))
    return tuple(
        (a.name, a.default_value if a.has_default_value() else None, a.has_default_value())
        for a in target._schema.arguments
    )


def arguments(node: fx.Node, modelled: tuple[str, ...]) -> dict[str, Any]:
    """All arguments by name; Unmodelled where one that is not modelled is off its default."""
    found = {}
    for at, (name, default, has_default) in enumerate(_schema(node.target)):
        given = node.args[at] if at < len(node.args) else node.kwargs.get(name, default)
        found[name] = given
        if name in modelled or name in _OF_PLACE:
            continue
        if not has_default or isinstance(given, fx.Node) or given != default:
            raise Unmodelled(f"{op(node)} with {name}={given}")
    return found


@dataclass
class Call:
    """One call at one index, with its arguments by name and, for pointwise ops, the leaves of its operands."""

    node: fx.Node
    index: Index
    args: dict[str, Any] = field(default_factory=dict)
    leaves: dict[fx.Node, Leaf] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return op(self.node)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = value(self.node).dtype
        return dtype

    def operand(self, name: str) -> Any:
        """A leaf, or the plain value of an argument that is no tensor."""
        given = self.args[name]
        return self.leaves[given] if isinstance(given, fx.Node) else given

    def scalar(self, name: str) -> Any:
        """A number or None; Unknown where the argument is more."""
        given = self.operand(name)
        if isinstance(given, Number):
            return given.value
        if given is None or isinstance(given, (bool, int, float)):
            return given
        raise Unknown(f"{name} is no number")

    def dim(self, count: int, name: str = "dim") -> int:
        return int(self.args[name]) % count


@dataclass(frozen=True)
class Rule:
    apply: Callable[..., Any]
    models: tuple[str, ...]


_F = TypeVar("_F", bound=Callable[..., Any])


class Rules(dict[str, Rule]):
    """Op name -> what is known of it."""

    def of(self, *names: str, models: tuple[str, ...]) -> Callable[[_F], _F]:
        def register(function: _F) -> _F:
            for name in names:
                assert name not in self, name
                self[name] = Rule(function, models)
            return function

        return register
