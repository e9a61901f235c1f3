"""Compute the cross-entropy over a vocabulary without storing its logits."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch import is_erased
from ..graph.phases import Phase
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from .common.cross_entropy import HALF, READERS, SIZE, Logits, Loss, Refused, Total, logits_of, total_of, value_of

aten, ops = torch.ops.aten, torch.ops.turbogr


@register
@dataclass(frozen=True)
class FuseLoss(Pass):
    """Compute the cross-entropy over a vocabulary tile by tile, so that its logits are never stored."""

    name = "fuse-loss"
    phase = Phase.PRE_GRAD
    after = ("remove-noops", "fold-views", "pack-rows", "eliminate-common", "simplify-masks")
    before = ("eliminate-dead-code",)

    min_logits: int = 1 << 17  # below, three plain ops are faster than one that goes by tiles
    # Losses that are not simply added up take one more product, which pays only for memory.
    min_recomputed: int = 1 << 24

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for node in list(graph.nodes):
            read = READERS.get(node.target)
            if read is None or is_erased(node):
                continue
            try:
                loss = read(node)
                if loss is not None:
                    self._fuse(loss, ctx)
            except Refused as reason:
                ctx.missed(reason.id, reason.text, reason.node or node, reason.hint)

    def _fuse(self, loss: Loss, ctx: Context) -> None:
        logits = logits_of(loss)
        total = total_of(loss)
        self._check_size(loss, logits, total, ctx)
        end = loss.node if total is None else total.node
        with ctx.rewrite("losses" if total is None else "total", *dict.fromkeys([*logits.nodes, *loss.nodes, end])):
            with loss.node.graph.inserting_before(end):
                emit = Emitter(loss, logits)
                result = emit.losses() if total is None else emit.total(total)
            end.replace_all_uses_with(result)
            _erase_unused([end, *loss.nodes, *logits.nodes])
        rows, classes = loss.sizes
        ctx.applied("loss-fused", f"logits of {classes} classes for {rows} rows are not stored", result)

    def _check_size(self, loss: Loss, logits: Logits, total: Total | None, ctx: Context) -> None:
        sizes = [ctx.hint(s) for s in loss.sizes]
        if None in sizes:
            return  # rows that only the data counts: many, where it matters
        count = math.prod(s for s in sizes if s is not None)
        if count < self.min_logits:
            raise Refused("loss-small", f"{count} logits are too few to go by tiles", loss.node)
        if total is None and count < self.min_recomputed:
            raise Refused(
                "loss-of-rows",
                f"the loss of each row is used, so the backward would compute {count} logits anew",
                loss.node,
                "add the losses up with sum() or mean(), or lower fuse-loss{min_recomputed=...}",
            )


# --- writing it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emitter:
    """Nodes of the fused loss, where the graph is being written to."""

    loss: Loss
    logits: Logits

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.loss.node.graph.call_function(target, args, kwargs)

    def losses(self) -> fx.Node:
        """In the shape and type of the node that is replaced."""
        both = self.call(ops.linear_cross_entropy.default, *self._inputs(), *self._attributes())
        result = self.call(operator.getitem, both, 0)
        if self.loss.sign < 0:
            result = self.call(aten.neg.default, result)
        if value_of(self.loss.target).dim() != 1:
            result = self.call(aten.reshape.default, result, self._shape(self.loss.target))
        return self._as(self.loss.node, result)

    def total(self, total: Total) -> fx.Node:
        share = None if total.share is None else self._flat(total.share)
        if share is not None and not value_of(total.share).is_floating_point():
            share = self.call(aten._to_copy.default, share, dtype=value_of(self.loss.node).dtype)
        target = ops.linear_cross_entropy_total.default
        result = self.call(target, *self._inputs(), share, *self._attributes(), total.mean)
        if total.over_all:
            result = self.call(aten.div.Tensor, result, self._count(self.loss.target))
        if total.sign < 0:
            result = self.call(aten.neg.default, result)
        return self._as(total.node, result)

    def _inputs(self) -> tuple[Any, ...]:
        weight = self.logits.weight
        weight = self.call(aten.transpose.int, weight, 0, 1) if self.logits.turned else weight
        return self._rows(), weight, self._bias(), self._flat(self.loss.target)

    def _attributes(self) -> tuple[float, int, float]:
        return self.logits.scale, self.loss.ignore_index, self.loss.smoothing

    def _rows(self) -> fx.Node:
        """What was done to rows of logits, done to rows of x."""
        twin, dims = self.logits.x, value_of(self.logits.x).dim()
        with twin.graph.inserting_before(self.logits.nodes[-1]):
            width = self._size(twin, dims - 1)
        for node in reversed(self.logits.nodes):
            if node in self.logits.moves:
                with node.graph.inserting_before(node):
                    twin = self._moved(node, twin, width)
                dims = value_of(node).dim()
            self._sizes_from(node, twin)
        return twin if dims == 2 else self.call(aten.reshape.default, twin, [-1, width])

    def _moved(self, move: fx.Node, x: fx.Node, width: Any) -> fx.Node:
        if move.target is aten.reshape.default:
            shape: Any = move.args[1]
            return self.call(aten.reshape.default, x, [*shape[:-1], width])
        args = [x if isinstance(a, fx.Node) and a in self.logits.nodes else a for a in move.args]
        return self.call(move.target, *args, **move.kwargs)

    def _sizes_from(self, logits: fx.Node, twin: fx.Node) -> None:
        """Who asks logits for a size asks the weight, or rows of x."""
        classes = self.logits.weight, int(self.logits.turned)
        for user in [u for u in logits.users if u.target is SIZE]:
            dim = user.args[1]
            user.args = classes if dim == value_of(logits).dim() - 1 else (twin, dim)

    def _bias(self) -> fx.Node | None:
        total = None
        for bias, scale in self.logits.biases:
            flat = self._flat(bias)
            flat = flat if scale == 1.0 else self.call(aten.mul.Tensor, flat, scale)
            total = flat if total is None else self.call(aten.add.Tensor, total, flat)
        return total

    def _flat(self, node: fx.Node) -> fx.Node:
        return node if value_of(node).dim() == 1 else self.call(aten.reshape.default, node, [-1])

    def _as(self, old: fx.Node, new: fx.Node) -> fx.Node:
        """The kernel's results are of 32 bits at least."""
        dtype = value_of(old).dtype
        return self.call(aten._to_copy.default, new, dtype=dtype) if dtype in HALF else new

    def _size(self, node: fx.Node, dim: int) -> Any:
        size = value_of(node).shape[dim]
        return size if isinstance(size, int) else self.call(SIZE, node, dim)

    def _shape(self, node: fx.Node) -> list[Any]:
        return [self._size(node, dim) for dim in range(value_of(node).dim())]

    def _count(self, node: fx.Node) -> Any:
        sizes = self._shape(node)
        count: Any = math.prod(s for s in sizes if isinstance(s, int))
        for size in (s for s in sizes if not isinstance(s, int)):
            count = size if isinstance(count, int) and count == 1 else self.call(operator.mul, count, size)
        return count


def _erase_unused(nodes: list[fx.Node]) -> None:
    """Erase these, last first, and what was computed for them alone."""
    todo = sorted(dict.fromkeys(nodes))
    while todo:
        node = todo.pop()
        if node.users or node.op != "call_function" or is_erased(node) or node.is_impure():
            continue
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        todo = sorted({*todo, *(n for n in sources if not is_erased(n))})
