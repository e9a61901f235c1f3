"""Draw negatives, and do what else depends on no parameter, before the step: on a worker, one batch ahead.

    torch.compile(model, backend="turbogr", options={"passes": ["offload-sampling"]})
    for batch in turbogr_compile.ahead(loader): ...

What is drawn at random, what sorts or deduplicates indices, and what follows from it without a parameter is cut out of
the graph; its results come in as inputs. A loop over `ahead` has them computed during the step before. Without one they
are computed when the step is called, with the same numbers: every call has a seed of its own (runtime/draws.py).
Dropout stays where it is.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..graph.nodes import TRAINABLE, is_collective, is_wait, tensor, written
from ..graph.phases import Phase, Role
from ..graph.provenance import line_of
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from .common.cut import Cut, seeded

aten = torch.ops.aten
INDEX_WORK = {
    aten.sort, aten.argsort, aten.topk, aten.nonzero, aten.bincount, aten._unique2, aten._unique, aten.unique_dim,
    aten.unique_consecutive, aten.unique_dim_consecutive,
}  # fmt: skip
_HINTS = {
    "parameter": "draw from what the batch holds, or leave this draw in the step",
    "written": "what the step writes, the next one cannot read ahead of it",
    "unseeded": "draw with torch.rand, torch.randint, torch.multinomial or torch.randperm",
}


@register
@dataclass(frozen=True)
class OffloadSampling(Pass):
    """Draw negatives, and do what else depends on no parameter, before the step: on a worker, one batch ahead."""

    name = "offload-sampling"
    phase = Phase.PRE_GRAD
    after = (
        "pack-rows", "fold-masks", "eliminate-common", "simplify-masks", "recognize-activations", "fuse-loss",
        "fuse-sampling", "fuse-silu-split", "fuse-norm-gate", "fuse-embedding",
    )  # fmt: skip
    before = ("eliminate-dead-code",)
    roles = frozenset({Role.CAPTURED})

    index_work: bool = True  # also sorting, deduplicating and counting of what was not drawn

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        held = Held(graph)
        roots = [n for n in graph.nodes if n.op == "call_function" and self._wanted(n)]
        for node in roots:
            if node in held and is_draw(node):
                held.explain(node, ctx)
        free = [n for n in roots if n not in held]
        if not free:
            if not any(map(is_draw, roots)):
                ctx.missed("nothing-drawn", "nothing that could run before the step is drawn or sorted in this graph")
            return
        cut = Cut(graph, free, held)
        with ctx.rewrite("offload", *cut.moved):
            added = cut.apply()
        draws = sum(map(is_draw, cut.moved))
        given = ", ".join(f"%{n.name}" for n in added)
        ctx.applied("offloaded", f"{len(cut.moved)} ops, {draws} of them draws, run before the step: {given}", free[0])

    def _wanted(self, node: fx.Node) -> bool:
        sorts = getattr(node.target, "overloadpacket", None) in INDEX_WORK
        return is_draw(node) or (self.index_work and sorts)


def is_draw(node: fx.Node) -> bool:
    """Draws random numbers for another purpose than to drop some of its input."""
    return _torch.is_random(node) and not _drops(node)


def _drops(node: fx.Node) -> bool:
    names = {a.name for a in node.target._schema.arguments}  # type: ignore[union-attr]
    return "dropout" in str(node.target) or not names.isdisjoint({"dropout", "dropout_p"})


@dataclass(frozen=True)
class Reason:
    """Why a value is not known before the step."""

    kind: str
    text: str
    source: fx.Node


class Held:
    """Nodes that must stay in the step, each with the first thing on the way to it that holds it there."""

    def __init__(self, graph: fx.Graph) -> None:
        self._why: dict[fx.Node, Reason] = {}
        changing = written(graph)
        for node in graph.nodes:
            reason = _own_reason(node, changing)
            inherited = (self._why[a] for a in node.all_input_nodes if a in self._why)
            found = reason or next(inherited, None)
            if found is not None:
                self._why[node] = found

    def __contains__(self, node: Any) -> bool:
        return node in self._why

    def explain(self, draw: fx.Node, ctx: Context) -> None:
        why = self._why[draw]
        through = self._through(draw, why)
        where = f", through %{through.name} ({line_of(through)})" if through not in (draw, why.source) else ""
        text = f"%{draw.name} cannot run before the step: it depends on {why.text}{where}"
        ctx.missed("draw-stays", text, draw, _HINTS.get(why.kind, ""))

    def _through(self, node: fx.Node, why: Reason) -> fx.Node:
        """The node that reads what holds `node`."""
        while True:
            following = next((a for a in node.all_input_nodes if self._why.get(a) is why), None)
            if following is None or following is why.source:
                return node
            node = following


def _own_reason(node: fx.Node, changing: set[fx.Node]) -> Reason | None:
    if node.op in ("placeholder", "get_attr"):
        value = tensor(node)
        if node.meta.get(TRAINABLE) or (value is not None and value.requires_grad):
            return Reason("parameter", f"%{node.name}, which is trained", node)
        if node in changing:
            return Reason("written", f"%{node.name}, which the step itself writes to", node)
        return None
    if node.op != "call_function":
        return Reason("output", "", node)
    if not isinstance(node.target, torch._ops.OpOverload):
        arithmetic = node.target is operator.getitem or isinstance(node.meta.get("val"), _SYMBOLIC)
        return None if arithmetic else Reason("mode", "a mode of the step", node)
    if _torch.is_random(node) and _drops(node):
        return Reason("dropout", f"%{node.name}, which is dropout", node)
    if _torch.is_random(node) and seeded(node.target) is None:
        return Reason("unseeded", f"%{node.name}, which takes no generator", node)
    if is_collective(node) or is_wait(node):
        return Reason("ranks", f"%{node.name}, an exchange with other ranks", node)
    if not _torch.is_functional(node):
        return Reason("write", f"%{node.name}, which writes", node)
    return None


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
