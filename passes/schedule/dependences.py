"""What must stay before what in a graph, values aside: collectives, random numbers, writes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from ..._torch import is_impure, is_random, mutated_arguments
from ...graph.nodes import is_collective, is_view, is_wait
from ...graph.streams import HOST, stream_of

Dependences = dict[fx.Node, set[fx.Node]]  # node -> nodes that run before it


def dependences(graph: fx.Graph) -> Dependences:
    nodes = list(graph.nodes)
    before: Dependences = {n: set(n.all_input_nodes) for n in nodes}
    # One order of all collectives, whatever their groups: ranks that wait at different places cannot wait for each
    # other in a circle, and no cost or size can make their orders differ.
    _in_a_row(before, (n for n in nodes if is_collective(n)))
    _in_a_row(before, (n for n in nodes if stream_of(n) == HOST))
    _in_a_row(before, (n for n in nodes if _has_effects(n)))
    _writes(before, nodes)
    return before


def is_async(node: fx.Node) -> bool:
    """Runs beside the compute: a collective, or work of the host."""
    return is_collective(node) or stream_of(node) == HOST


def started_by(wait: fx.Node) -> fx.Node | None:
    """What a wait waits for; None where that was started outside of the graph."""
    source: Any = wait.args[0]
    while source.target is operator.getitem:
        source = source.args[0]
    return source if is_async(source) else None


def owner(node: fx.Node) -> fx.Node:
    """The node whose memory this one is a view of, or itself."""
    while node.op == "call_function" and not is_collective(node) and node.all_input_nodes and _shares(node):
        node = node.all_input_nodes[0]
    return node


def _shares(node: fx.Node) -> bool:
    return is_wait(node) or is_view(node)


def _has_effects(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_wait(node) and not is_collective(node) and (
        is_random(node) or is_impure(node)
    )  # fmt: skip


def _in_a_row(before: Dependences, nodes: Iterable[fx.Node]) -> None:
    for earlier, later in itertools.pairwise(nodes):
        before[later].add(earlier)


def _writes(before: Dependences, nodes: list[fx.Node]) -> None:
    """Whoever reads memory that is written reads it on the same side of the write."""
    written = [(n, {owner(a) for a in mutated_arguments(n) if isinstance(a, fx.Node)}) for n in nodes]
    written = [(n, owners) for n, owners in written if owners]
    if not written:
        return
    place = {n: i for i, n in enumerate(nodes)}
    for node in nodes:
        touched = {owner(a) for a in node.all_input_nodes}
        for write, owners in written:
            if write is not node and touched & owners and node.op == "call_function":
                earlier, later = sorted((node, write), key=place.__getitem__)
                before[later].add(earlier)
