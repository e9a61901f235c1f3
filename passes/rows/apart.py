"""Ops without a declaration, taken apart into ops that have one.

Only what eager itself runs as other ops is taken apart, so that values and gradients are eager's. An op of which
nothing comes to live on rows is put together again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ... import _torch
from ...capture.trace import trace
from ...graph.nodes import tensor
from ...graph.phases import Phase
from .calls import LIKE, op, piece_of
from .declaration import declared

if TYPE_CHECKING:
    from .analysis import RowAnalysis

MOST_PARTS = 32  # a recurrence unrolled is no gain


@dataclass(frozen=True)
class Apart:
    """An op that nobody uses any more, and the parts that are used instead."""

    whole: fx.Node
    parts: tuple[fx.Node, ...]
    instead: dict[fx.Node, fx.Node]  # of the op, or of each of its results

    def put_together(self) -> None:
        graph = self.whole.graph
        for old, new in self.instead.items():
            new.replace_all_uses_with(old)
        for part in reversed(self.parts):
            graph.erase_node(part)

    def leave(self) -> None:
        """The parts stay."""
        for old in self.instead:
            if old is not self.whole:
                self.whole.graph.erase_node(old)
        self.whole.graph.erase_node(self.whole)


def take_apart(graph: fx.Graph) -> list[Apart]:
    """Ops that torch knows as other ops and that have no declaration, where all of the others have one."""
    found = [_apart(node) for node in list(graph.nodes) if _is_unknown_composite(node)]
    return [apart for apart in found if apart is not None]


def _is_unknown_composite(node: fx.Node) -> bool:
    if node.op != "call_function" or declared(node) is not None or not _torch.is_composite(node.target):
        return False
    return not _torch.is_impure(node) and any(tensor(n) is not None for n in node.all_input_nodes)


def _apart(node: fx.Node, whole: bool = True, for_good: bool = False) -> Apart | None:
    """The op in parts; where `whole`, None if one of them has no declaration either."""
    traced = _traced(node, whole)
    pieces = _pieces(node, traced) if traced is not None else None
    if traced is None or pieces is None or not (for_good or _can_be_put_together(pieces)):
        return None
    env = dict(zip(traced.find_nodes(op="placeholder"), node.all_input_nodes, strict=True))
    parts = []
    with node.graph.inserting_before(node):
        for step in traced.nodes:
            if step.op == "call_function":
                env[step] = node.graph.node_copy(step, env.__getitem__)
                parts.append(env[step])
    instead = {old: env[new] for old, new in pieces.items()}
    for old, new in instead.items():
        old.replace_all_uses_with(new)
    return Apart(node, tuple(parts), instead)


def _can_be_put_together(pieces: dict[fx.Node, fx.Node]) -> bool:
    """Is each result a part of its own, and not something that the op was given?"""
    results = list(pieces.values())
    return len(set(results)) == len(results) and all(r.op == "call_function" for r in results)


def _pieces(node: fx.Node, traced: fx.Graph) -> dict[fx.Node, fx.Node] | None:
    """Who reads which result."""
    (output,) = traced.find_nodes(op="output")
    results: Any = output.args[0]
    if isinstance(results, fx.Node):
        return {node: results}
    if not isinstance(results, (list, tuple)) or any(op(user) != "getitem" for user in node.users):
        return None
    found = {user: results[piece_of(user)] for user in node.users}
    return found if all(isinstance(n, fx.Node) for n in found.values()) else None


def _traced(node: fx.Node, whole: bool) -> fx.Graph | None:
    """The op as a graph of declared ops."""
    target: Any = node.target

    def parts(*values: Any) -> Any:
        each = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), each.__getitem__)
        return target(*args, **kwargs)

    given = [_variable(n.meta.get("val")) for n in node.all_input_nodes]
    try:
        with _torch.outside_compilation(), torch.enable_grad():
            graph = trace(parts, given, Phase.PRE_GRAD, apart=[target]).graph
    except Exception:  # decided by data, or by what a graph cannot hold
        return None
    for step in list(graph.nodes):
        if _is_unknown_composite(step):
            apart = _apart(step, whole, for_good=True)
            if apart is not None:
                apart.leave()
    steps = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    return graph if len(steps) <= MOST_PARTS and (not whole or all(map(_is_known, steps))) else None


def _variable(value: Any) -> Any:
    """Gradients are taken to be wanted: a part that stops them is not left out."""
    differentiable = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if differentiable else value


def _is_known(node: fx.Node) -> bool:
    if node.op != "call_function" or _torch.is_impure(node):
        return False
    made = all(tensor(n) is None for n in node.all_input_nodes)  # from sizes alone
    return made or op(node) in (*LIKE, "getitem") or declared(node) is not None


def is_gain(apart: Apart, analysis: RowAnalysis) -> bool:
    """Does all that comes from rows live on rows?"""
    demand = analysis.demand
    used = [n for n in apart.parts if n.users and n in demand.meanings.tainted]
    rows = [n for n in used if demand.space_of(n) is not None]
    return bool(rows) and all(n in demand.decisions for n in rows)
