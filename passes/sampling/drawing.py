"""Where ids come from: drawn in the graph and how, given from outside, or rows of the batch itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from ...rules.pattern import arguments
from ..common.cross_entropy import value_of

aten, ops = torch.ops.aten, torch.ops.turbogr
_UNIFORM = {
    aten.randint.default, aten.randint.low, aten.randint_like.default, aten.randint_like.low_dtype,
    aten.random.default, aten.random.to, getattr(aten.random, "from"),
}  # fmt: skip
_REAL = {aten.rand.default, aten.rand_like.default}
_LAYOUT = {
    aten.reshape.default, aten.expand.default, aten.repeat.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.permute.default, aten.clone.default,
    aten.contiguous.default, aten._to_copy.default, aten.to.dtype, aten.detach.default, ops.gather_rows.default,
    aten.squeeze.default,
}  # fmt: skip
_ARITHMETIC = {
    aten.add.Tensor, aten.sub.Tensor, aten.remainder.Scalar, aten.clamp.default, aten.where.self, aten.where.ScalarSelf,
    aten.where.ScalarOther, aten.masked_fill.Scalar, aten.index_put.default, aten.mul.Tensor, aten.floor.default,
}  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """How ids are drawn, and the node that does it."""

    kind: str  # uniform, popularity, permutation, given, batch, computed
    node: fx.Node
    low: int | None = None  # bounds of what is drawn, where they are known
    high: int | None = None
    from_list: bool = False  # the numbers drawn are places in a list of ids
    changed: bool = False  # arithmetic follows the drawing

    @property
    def text(self) -> str:
        listed = " from a list of ids" if self.from_list else ""
        return {
            "uniform": f"drawn uniformly{listed} in the graph",
            "popularity": f"drawn by weights{listed} in the graph",
            "permutation": f"drawn without repetition{listed} in the graph",
            "given": "given from outside",
            "batch": "rows of the batch itself",
            "computed": "computed in the graph",
        }[self.kind]

    def never(self, id: int) -> bool:
        """Can this id not occur?"""
        if self.kind != "uniform" or self.from_list or self.changed:
            return False
        return (self.low is not None and id < self.low) or (self.high is not None and id >= self.high)


def drawing_of(node: Any) -> Drawing:
    """Follows ids back to where they are made."""
    from_list = changed = False
    at = node
    while isinstance(at, fx.Node) and at.op == "call_function":
        target = at.target
        if target in _UNIFORM:
            low, high = _bounds(at)
            return Drawing("uniform", at, low, high, from_list, changed)
        if target in _REAL:
            return Drawing("uniform", at, from_list=from_list, changed=True)
        if target is aten.multinomial.default:
            return Drawing("popularity", at, 0, None, from_list, changed)
        if target in (aten.randperm.default,):
            return Drawing("permutation", at, 0, None, from_list, changed)
        if target in _LAYOUT:
            at = at.args[0]
        elif target is aten.index.Tensor and _one_index(at) is not None:
            at, from_list = _one_index(at), True
        elif _picks_from_list(at):
            at, from_list = at.args[2], True
        elif target in _ARITHMETIC or target is aten.cat.default:
            at, changed = _drawn_part(at), True
        else:
            return Drawing("computed", at, from_list=from_list, changed=changed)
    if isinstance(at, fx.Node):
        return Drawing("given", at, from_list=from_list, changed=changed)
    return Drawing("computed", node, from_list=from_list, changed=True)


def _picks_from_list(node: fx.Node) -> bool:
    is_list = node.target is aten.index_select.default and value_of(node.args[0]).dim() == 1
    return is_list or node.target is aten.gather.default


def _one_index(node: fx.Node) -> fx.Node | None:
    indices: Any = node.args[1]
    is_list = value_of(node.args[0]).dim() == 1 and len(indices) == 1 and tensor(indices[0]) is not None
    return indices[0] if is_list and value_of(indices[0]).dtype != torch.bool else None


def _drawn_part(node: fx.Node) -> Any:
    """Of several tensors, the one that is drawn; else the largest, which is that of negatives."""
    parts = [n for n in node.all_input_nodes if tensor(n) is not None and value_of(n).dtype != torch.bool]
    for part in parts:
        if drawing_of(part).kind in ("uniform", "popularity", "permutation"):
            return part
    return max(parts, key=lambda n: value_of(n).dim(), default=None)


def _bounds(node: fx.Node) -> tuple[int | None, int | None]:
    a = arguments(node)
    low, high = a.get("low", a.get("from", 0)), a.get("high", a.get("to"))
    return (low if isinstance(low, int) else None, high if isinstance(high, int) else None)
