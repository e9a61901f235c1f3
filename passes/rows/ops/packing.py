"""Helpers for declarations: dims that stay, and calls on packed rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..program import RowSet


def same_dims(t: Typing, n: fx.Node) -> Dims:
    """The result has the dims of the first operand."""
    return list(t.dims(n.args[0]))


def first_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """The op on the packed rows of its first operand."""
    x: Any = n.args[0]
    return e.again(n, **{first_name(n): e.packed(x, chosen)})


def first_name(n: fx.Node) -> str:
    """The name of the first operand in the schema: self, or input."""
    schema: Any = n.target
    return str(schema._schema.arguments[0].name)
