"""Constants: targets and labels that are the same number everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...rules.pattern import arguments
from .norms import as_held, number_of

aten = torch.ops.aten
_PASS_ON = ("_to_copy", "reshape", "expand", "unsqueeze", "squeeze", "slice", "select", "gather_rows", "index_select")


def filled_with(node: Any) -> float | None:
    """The number that all entries are."""
    if not isinstance(node, fx.Node):
        return None
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name in ("zeros", "zeros_like", "new_zeros"):
        return 0.0
    if name in ("ones", "ones_like", "new_ones"):
        return 1.0
    if name in ("full", "full_like", "new_full"):
        value = arguments(node)["fill_value"]
        number = float(value) if isinstance(value, (int, float)) else number_of(value)
    else:
        number = filled_with(node.args[0]) if name in _PASS_ON else None
    return None if number is None else as_held(number, node)


def fillers(node: fx.Node) -> tuple[fx.Node, ...]:
    """A constant, and what it is made of; it may look at the shape of logits."""
    if node.op != "call_function" or (filled_with(node) is None and node.target is not aten.cat.default):
        return ()
    return (node, *(n for source in node.all_input_nodes for n in fillers(source)))
