"""Inputs that passes add to a graph, computed outside of it before every call.

What depends only on other inputs (row indices, offsets) or on nothing (folded constants) need not be part of the
compiled graph; a pass appends a placeholder and says how to provide its value at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ._torch import mark_added_input

KEY = "turbogr_provider"
Provider = Callable[[Sequence[Any]], Any]


def add_input(graph: fx.Graph, name: str, fake: Any, provide: Provider) -> fx.Node:
    """Append a placeholder; `provide` gets the graph's original inputs and returns the value at run time."""
    last = graph.find_nodes(op="placeholder")
    at = graph.inserting_after(last[-1]) if last else graph.inserting_before(next(iter(graph.nodes)))
    with at:
        node = graph.placeholder(name)
    node.target = node.name  # fx makes names unique, not targets, and generated code uses those
    node.meta["val"] = fake
    node.meta[KEY] = provide
    mark_added_input(node)
    return node


def providers(graph: fx.Graph) -> list[Provider]:
    """Of the appended placeholders, in order."""
    return [n.meta[KEY] for n in graph.find_nodes(op="placeholder") if KEY in n.meta]


def fake_values(graph: fx.Graph) -> list[Any]:
    return [n.meta["val"] for n in graph.find_nodes(op="placeholder") if KEY in n.meta]


def with_prologue(compiled: Callable[..., Any], provide: list[Provider]) -> Callable[..., Any]:
    """The compiled graph as a function of its original inputs."""
    if not provide:
        return compiled

    def run(*inputs: Any) -> Any:
        return compiled(*inputs, *[p(inputs) for p in provide])

    return run
