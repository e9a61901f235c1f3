"""Stream labels of a graph as torchair takes them: scopes around nodes, and control edges between them.

A control edge is an Identity that waits for one node and is read by the other. torchair's `record` and `wait` would tie
the edge to whatever is converted next, which may be a constant, and so order nothing. Labels that a program sets by
torchair's own calls reach its forward only; those of a pass are in every graph.
"""

from __future__ import annotations

import torch
from torch import fx

from ...graph.nodes import is_wait, tensor
from ...graph.streams import KEY, stream_of


def apply_streams(module: fx.GraphModule) -> None:
    """Call last before the graph is converted: scopes are a matter of position."""
    graph = module.graph
    labelled = [node for node in graph.nodes if stream_of(node)]
    if not labelled:
        return
    import torchair.scope._wait_tensor  # noqa: F401  (defines torch.ops.air.wait_tensor)

    for wait in [n for n in graph.nodes if is_wait(n) and any(stream_of(source) for source in n.all_input_nodes)]:
        if (compute := _compute_before(wait)) is not None:
            _run_after(wait, compute)
    last: dict[str, fx.Node] = {}
    for node in labelled:
        stream = stream_of(node)
        if stream in last:
            _run_after(node, last[stream])
        last[stream] = node
    for node in [n for n in graph.nodes if stream_of(n)]:
        _enclose(node, stream_of(node))
    module.recompile()


def _compute_before(wait: fx.Node) -> fx.Node | None:
    """The compute directly in front of it."""
    node = wait.prev
    while node.op == "call_function":
        if not stream_of(node) and not is_wait(node) and tensor(node) is not None and node.all_input_nodes:
            return node
        node = node.prev
    return None


def _run_after(node: fx.Node, earlier: fx.Node) -> None:
    if _follows(node, earlier):
        return
    read = next(n for n in node.all_input_nodes if tensor(n) is not None)
    with node.graph.inserting_before(node):
        ordered = node.graph.call_function(torch.ops.air.wait_tensor.default, (read, earlier))
    ordered.meta = {k: v for k, v in read.meta.items() if k not in (KEY, "unbacked_bindings")}
    if KEY in node.meta:
        ordered.meta[KEY] = node.meta[KEY]
    node.replace_input_with(read, ordered)


def _follows(node: fx.Node, earlier: fx.Node) -> bool:
    """Whether values flow from one to the other, so that the order is there already."""
    seen: set[fx.Node] = set()
    todo = [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source is earlier:
                return True
            if source not in seen and earlier < source:
                seen.add(source)
                todo.append(source)
    return False


def _enclose(node: fx.Node, stream: str) -> None:
    graph = node.graph
    attributes = {"_user_stream_label": stream, "_user_stream_priority": "0", "_enable_inner_parallel": "True"}
    with graph.inserting_before(node):
        graph.call_function(torch.ops.air.scope_enter.default, ([*attributes], [*attributes.values()]))
    with graph.inserting_after(node):
        graph.call_function(torch.ops.air.scope_exit.default)
