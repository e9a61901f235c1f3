"""How ops treat rows: one declaration per op, or family of ops, found by name.

Families of torch's own ops are in `ops`; users declare theirs by the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ...errors import RuleError
from .calls import arg, given, op, unread

if TYPE_CHECKING:
    from .axes import Dims, Typing
    from .emit import Emitter
    from .moves import Move, Moves
    from .program import RowSet
    from .rowwise import Rowwise
    from .spaces import Space
    from .spans import Span
    from .zeros import Support, Zeros

EVERY = frozenset({"*"})  # arguments: all of them are handed to the op unchanged, or read


@dataclass(frozen=True)
class Declaration:
    """What is known about an op. A part that is missing says that nothing is known."""

    models: frozenset[str]
    axes: Callable[[Typing, fx.Node], Dims | list[Dims | None] | None] | None = None
    mixes: Callable[[Rowwise, fx.Node, Space], str | None] | None = None
    zeros: Callable[[Zeros, fx.Node], Support] | None = None
    reads: Callable[[Moves, fx.Node], Move | None] | None = None
    packed: Callable[[Emitter, fx.Node, RowSet], Any] | None = None
    values: Mapping[str, Collection[str]] = field(default_factory=dict)  # arguments that may have only these, as text;
    # '#2' for any list of two
    spans: Callable[[Moves, fx.Node, Space], Span | None] | None = None

    def unread(self, node: fx.Node) -> str | None:
        """An argument of the call that has another value than its default, and that the declaration does not know."""
        for name, allowed in self.values.items():
            value = arg(node, name)
            length = f"#{len(value)}" if isinstance(value, (list, tuple)) else ""
            if str(value) not in allowed and length not in allowed:
                return f"{name}={value}"
        return None if self.models == EVERY else unread(node, self.models)


_DECLARED: dict[str, Declaration] = {}
_DERIVED: dict[str, Declaration] = {}
_FAMILIES: list[tuple[Callable[[torch._ops.OpOverload], bool], Declaration]] = []


def row_op(
    *names: str,
    models: Collection[str],
    axes: Callable[[Typing, fx.Node], Dims | list[Dims | None] | None] | None = None,
    mixes: Callable[[Rowwise, fx.Node, Space], str | None] | None = None,
    zeros: Callable[[Zeros, fx.Node], Support] | None = None,
    reads: Callable[[Moves, fx.Node], Move | None] | None = None,
    packed: Callable[[Emitter, fx.Node, RowSet], fx.Node] | None = None,
    spans: Callable[[Moves, fx.Node, Space], Span | None] | None = None,
) -> None:
    """Declare how ops treat rows.

    names   'namespace::name' of an op, the short name of an ATen op; 'name.overload' for one overload alone
    models  names of arguments that the declaration reads, or hands to the op unchanged; a call in which another
            argument is not at its default has no declaration
    axes    (typing, node): dims of the result as axes; a list of dims where the op has several results
    mixes   (check, node, space): why rows of the space are mixed, or None where each row is made from its own row
    zeros   (zeros, node): predicates outside of which the result, or every result, is exactly zero
    reads   (moves, node): which rows of the operands each row of the result reads; `node` is the piece of a result of
            several
    packed  (emitter, node, rows): the op on packed rows
    spans   (moves, node, space): which rows of its own sequence each row is computed from, for an op that runs along
            rows; `packed` is then called where it mixes rows, too
    """
    here = f"row_op({', '.join(map(repr, names))})"
    if not names or isinstance(models, str):
        raise RuleError(f"{here}: wants names of ops, and 'models' as a list of argument names")
    if (mixes is None) != (packed is None):
        raise RuleError(f"{here}: 'mixes' and 'packed' go together")
    made = Declaration(frozenset(models), axes, mixes, zeros, reads, packed, spans=spans)
    _DECLARED.update(dict.fromkeys(names, made))


def row_family(belongs: Callable[[torch._ops.OpOverload], bool], declaration: Declaration) -> None:
    """Declare the ops that torch itself describes, where no declaration names them."""
    _FAMILIES.append((belongs, declaration))


def row_derived(name: str, declaration: Declaration) -> None:
    """What was found out about an overload that nobody has declared, and that torch does not describe."""
    _DERIVED[name] = declaration


def declared(node: Any) -> Declaration | None:
    """The declaration of a call that knows all of its arguments."""
    found = _named(node)
    return found if found is not None and found.unread(node) is None else None


def why_undeclared(node: Any) -> str:
    """For the model's author: what is missing."""
    found, name = _named(node), op(node) or "this value"
    unread = found.unread(node) if found is not None else None
    return f"no row rule for {name}" + (f" with {unread}" if unread is not None else "")


def what_it_takes(node: Any) -> str:
    """For the model's author: what would have to be declared, where nothing is."""
    if not isinstance(getattr(node, "target", None), torch._ops.OpOverload) or declared(node) is not None:
        return ""
    names = ", ".join(given(node))
    return (
        f"if each of its rows is made from its own row: turbogr_compile.row_op({op(node)!r}, …) with 'models' out of "
        f"({names}), 'axes' for the dims of its result, 'mixes' and 'packed'"
    )


def declared_names() -> list[str]:
    return sorted(_DECLARED)


def _named(node: Any) -> Declaration | None:
    target = node.target if isinstance(node, fx.Node) and node.op == "call_function" else None
    if not isinstance(target, torch._ops.OpOverload):
        return None
    name = op(node)
    overload = f"{name}.{target._overloadname or 'default'}"
    found = _DECLARED.get(overload, _DECLARED.get(name))
    if found is not None:
        return found
    return next((family for belongs, family in _FAMILIES if belongs(target)), _DERIVED.get(overload))
