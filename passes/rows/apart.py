"""Ops taken apart into others that keep rows apart, where they themselves do not, or where nothing is known of them.

An op without a declaration is taken apart where eager itself runs it as other ops; one at which rows end, where it is
the same as others (`identities`). Values and gradients are eager's. An op of which nothing comes to live on rows is put
together again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ... import _torch
from ...capture.trace import trace
from ...graph.nodes import tensor
from ...graph.phases import Phase
from .calls import LIKE, arg, live, op, piece_of
from .declaration import declared
from .identities import has_identity, identity_of

if TYPE_CHECKING:
    from .analysis import RowAnalysis

MOST_PARTS = 32  # a recurrence unrolled is no gain


@dataclass(frozen=True)
class Apart:
    """An op that nobody uses any more, and the parts that are used instead."""

    whole: fx.Node
    parts: tuple[fx.Node, ...]
    instead: dict[fx.Node, fx.Node]  # of the op, or of each of its results
    by_identity: bool = False

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


def take_apart_at_ends(graph: fx.Graph, analysis: RowAnalysis) -> list[Apart]:
    """Ops at which rows end, as others that are the same."""
    found = [_by_identity(node, analysis) for node in live(graph) if _ends_rows(node, analysis)]
    return [apart for apart in found if apart is not None]


def _ends_rows(node: fx.Node, analysis: RowAnalysis) -> bool:
    demand = analysis.demand
    if node.op != "call_function" or not has_identity(node.target) or node not in demand.meanings.tainted:
        return False
    read = [node, *(user for user in node.users if op(user) == "getitem")]
    on_rows = any(demand.space_of(x) is not None for x in node.all_input_nodes if x in demand.meanings.tainted)
    return on_rows and any(n in demand.wanted for n in read) and not any(n in demand.decisions for n in read)


def _by_identity(node: fx.Node, analysis: RowAnalysis) -> Apart | None:
    space = analysis.demand.space_of(node)
    columns = space.column if space is not None else ()
    dim = arg(node, "dim") if columns and tensor(node) is not None else None
    along = isinstance(dim, int) and tuple(analysis.demand.typing.atoms(node)[dim]) == columns
    identity = identity_of(node.target, along)
    return _apart(node, whole=False, identity=identity) if identity is not None else None


def apart_as(node: fx.Node, identity: Callable[..., Any]) -> Apart | None:
    """The op as another function of its arguments, which is the same."""
    return _apart(node, whole=False, identity=identity)


def _is_unknown_composite(node: fx.Node) -> bool:
    if node.op != "call_function" or declared(node) is not None or not _torch.is_composite(node.target):
        return False
    if _torch.is_impure(node) or isinstance(node.meta.get("val"), torch.SymInt):  # a size is made of nothing
        return False
    return any(tensor(n) is not None for n in node.all_input_nodes)


def _apart(
    node: fx.Node, whole: bool = True, for_good: bool = False, identity: Callable[..., Any] | None = None
) -> Apart | None:
    """The op in parts; where `whole`, None if one of them has no declaration either."""
    traced = _traced(node, whole, identity)
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
    return Apart(node, tuple(parts), instead, identity is not None)


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


def _traced(node: fx.Node, whole: bool, identity: Callable[..., Any] | None = None) -> fx.Graph | None:
    """The op as a graph of declared ops."""
    own: Any = node.target
    target = own if identity is None else identity

    def parts(*values: Any) -> Any:
        each = dict(zip(node.all_input_nodes, values, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), each.__getitem__)
        made = target(*args, **kwargs)
        if made is NotImplemented:
            raise NotImplementedError
        return made

    given = [_variable(n.meta.get("val")) for n in node.all_input_nodes]
    try:
        with _torch.outside_compilation(), torch.enable_grad():
            graph = trace(parts, given, Phase.PRE_GRAD, apart=[own]).graph
    except Exception:  # decided by data, or by what a graph cannot hold
        return None
    for step in list(graph.nodes):
        if _is_unknown_composite(step):
            apart = _apart(step, whole, for_good=True)
            if apart is not None:
                apart.leave()
    graph.eliminate_dead_code()
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
    if apart.by_identity:  # what is written may be anything; what it is written into lives on rows
        return all(n in demand.decisions for n in apart.instead.values() if n in demand.wanted)
    used = [n for n in apart.parts if n.users and n in demand.meanings.tainted]
    rows = [n for n in used if demand.space_of(n) is not None]
    return bool(rows) and all(n in demand.decisions for n in rows)
