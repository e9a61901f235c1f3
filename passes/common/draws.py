"""What is drawn at random, and what must stay in the step because it depends on something only the step knows."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ... import _torch
from ...graph.nodes import TRAINABLE, is_collective, is_wait, tensor, written
from ...graph.provenance import line_of
from ...pipeline.context import Context
from .cut import seeded

_HINTS = {
    "parameter": "draw from what the batch holds, or leave this draw in the step",
    "written": "what the step writes, the next one cannot read ahead of it",
    "unseeded": "draw with torch.rand, torch.randint, torch.multinomial or torch.randperm",
}


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
