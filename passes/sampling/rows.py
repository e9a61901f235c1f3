"""One operand of a product, read back to the table whose rows it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from ..common.cross_entropy import Refused
from . import factors, layout
from .tables import EMBEDDINGS, LOOKUPS, Read, Rows, lookup

aten, ops = torch.ops.aten, torch.ops.turbogr


def rows_of(node: fx.Node, axis: int) -> Rows | None:
    """What is looked up, where `axis` is the dim of `node` along a row; None where that is no lookup.

    Raises Refused where rows are looked up, and then changed in a way that scores cannot do without.
    """
    if node.target in LOOKUPS:
        found = lookup(node, axis)
        if found is not None:
            return found
    step = _STEPS.get(node.target)
    if step is not None:
        return step(node, axis, rows_of)
    _refuse_change(node)
    return None


def _refuse_change(node: fx.Node) -> None:
    """An op that changes rows: worth a remark only where rows of a table are what it changes."""
    at: Any = node
    for _ in range(6):
        if not isinstance(at, fx.Node) or at.op != "call_function" or tensor(at) is None:
            return
        if at.target in EMBEDDINGS:
            if at is node:
                return
            raise Refused(
                "rows-changed",
                f"looked-up rows go through {_named(node)} before they are scored",
                node,
                "apply it to the whole table before the lookup, or to the query if that means the same",
            )
        at = at.args[0] if at.args else None


def _named(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


_STEPS: dict[Any, Callable[[fx.Node, int, Read], Rows | None]] = {
    aten.clone.default: layout.same,
    aten.contiguous.default: layout.same,
    aten._to_copy.default: layout.cast,
    aten.to.dtype: layout.cast,
    aten.detach.default: layout.detach,
    aten.reshape.default: layout.reshape,
    aten.unsqueeze.default: layout.unsqueeze,
    aten.squeeze.dim: layout.squeeze,
    aten.select.int: layout.select,
    aten.slice.Tensor: layout.along,
    aten.index_select.default: layout.along,
    ops.gather_rows.default: layout.rows_picked,
    aten.transpose.int: layout.turn,
    aten.permute.default: layout.turn,
    aten.expand.default: layout.expand,
    aten.cat.default: layout.cat,
    aten.mul.Tensor: factors.multiply,
    aten.div.Tensor: factors.divide,
}
