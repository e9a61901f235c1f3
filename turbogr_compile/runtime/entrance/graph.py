"""A graph with and without the checks of its ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ... import _torch
from ...kernels.declare import KERNELS
from .gate import Gate
from .proof import Proof, name_of
from .sizes import Undecided


def run_behind_entrance(graph: fx.GraphModule) -> Callable[..., Any]:
    """The graph as a boxed function that checks inputs once, and runs its kernels without checks if these hold."""
    checked = _torch.run_plainly(graph)
    try:
        proof = Proof(graph.graph)
        if not proof.settled:
            return checked
        gate = Gate(proof)
    except Undecided:
        return checked
    unchecked = _torch.run_plainly(fx.GraphModule(graph, _settled(proof)))

    def run(values: list[Any]) -> Any:
        if gate.passes(values):
            return unchecked(values)
        kind = gate.new_kind(values)
        found = checked(values)
        if kind is not None:
            gate.trust(kind)
        return found

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _settled(proof: Proof) -> fx.Graph:
    """A copy, in which kernels stand for the ops that are settled."""
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    output = graph.graph_copy(proof.graph, copies)
    last = next(node for node in reversed(proof.graph.nodes) if node.op == "output")
    new = graph.output(output)
    new.meta.update(last.meta)
    for node, arguments in proof.settled.items():
        copy = copies[node]
        copy.target = KERNELS[name_of(node)]
        copy.args = fx.map_arg(arguments, lambda x: copies[x])
        copy.kwargs = {}
    return graph
