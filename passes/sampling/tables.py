"""A matrix whose rows are looked up, and the ops that do it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ... import kernels as _kernels  # noqa: F401  (defines the ops)
from ...graph.nodes import tensor
from ...rules.pattern import arguments
from ..common.cross_entropy import Refused, value_of
from .plans import Plan

aten, ops = torch.ops.aten, torch.ops.turbogr
EMBEDDINGS = (aten.embedding.default, ops.embedding.default)
LOOKUPS = (*EMBEDDINGS, aten.index.Tensor, aten.index_select.default, ops.gather_rows.default)


@dataclass(frozen=True)
class Table:
    """A matrix whose rows are looked up, and what is done to each row."""

    node: fx.Node
    padding: int = -1  # a row whose gradient is zero
    wraps: bool = False  # negative ids count from the end
    eps: float = -1.0  # rows are divided by max(norm, eps); not if negative
    detached: bool = False


@dataclass(frozen=True)
class Rows:
    """factor · table[ids], with the dims of a row at one place and those of ids around it."""

    table: Table
    ids: Plan  # in the shape of the operand, without the dim of a row
    scale: float = 1.0
    factors: tuple[Plan, ...] = ()  # like ids, one number for each row
    learned: tuple[fx.Node, ...] = ()  # tensors of no dims that multiply all rows
    lookups: tuple[fx.Node, ...] = ()
    nodes: tuple[fx.Node, ...] = field(default=())  # from the operand to the lookups, with these

    def moved(self, node: fx.Node, move: Callable[[Plan], Plan]) -> Rows:
        return replace(self.passed(node), ids=move(self.ids), factors=tuple(map(move, self.factors)))

    def passed(self, *nodes: fx.Node) -> Rows:
        return replace(self, nodes=(*nodes, *self.nodes))


Read = Callable[[fx.Node, int], Rows | None]  # what a node holds, and the dim of it along a row


def lookup(node: fx.Node, axis: int) -> Rows | None:
    a = arguments(node)
    if node.target in EMBEDDINGS:
        table, ids = Table(a["weight"], int(a["padding_idx"])), a["indices" if "indices" in a else "ids"]
        _check_gradient(node, a)
    elif node.target is aten.index.Tensor:
        indices = a["indices"]
        if len(indices) != 1 or tensor(indices[0]) is None:
            return None
        table, ids = Table(a["self"], wraps=True), indices[0]
    elif node.target is aten.index_select.default:
        table, ids = Table(a["self"]), a["index"]
        if a["dim"] != 0:
            return None
    else:
        table, ids = Table(a["x"]), a["rows"]
    weight, of_ids = value_of(table.node), value_of(ids)
    if weight.dim() != 2 or not weight.is_floating_point() or of_ids.dtype not in (torch.int64, torch.int32):
        return None
    if axis != value_of(node).dim() - 1 or of_ids.dim() == 0:
        return None
    return Rows(table, Plan.of(ids), lookups=(node,), nodes=(node,))


def _check_gradient(node: fx.Node, a: dict[str, Any]) -> None:
    for option, text in (
        ("sparse", "the gradient of the table is sparse"),
        ("scale_grad_by_freq", "gradients are divided by how often an id occurs"),
    ):
        if a.get(option):
            hint = f"leave {option}=True out of nn.Embedding"
            raise Refused("table-gradient", f"{text}, which the kernel does not do", node, hint)
    if a["weight"].target is aten.embedding_renorm.default:
        text = "max_norm rescales rows of the table at each lookup"
        raise Refused("table-gradient", text, node, "normalise looked-up rows instead")
