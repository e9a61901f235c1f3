"""Questions that several passes ask of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from .._torch import mutated_arguments

aten = torch.ops.aten
TRAINABLE = "turbogr_trainable"  # meta of an input or constant that gradients are computed for
PLACES_OF = "turbogr_places_of"  # meta of an input of places: the node of ids that they stand for, one to one
# Composite ops that return a view of their argument when they can; their schema does not say so.
_MAYBE_VIEWS = {aten.reshape.default, aten.contiguous.default, aten.to.dtype, aten.flatten.using_ints}
_ON_MEMORY = {
    aten.as_strided.default, aten.as_strided_scatter.default, aten.view_as_complex.default, aten.view.dtype,
}  # fmt: skip
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_WAITS = ("wait_tensor", "_wrap_tensor_autograd")
_MODES = {"_enter_autocast", "_exit_autocast", "_set_grad_enabled"}


def is_view(node: fx.Node) -> bool:
    """May the result share memory with the first argument?"""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return node.op == "call_function"  # getitem and friends: assume the worst
    returns = target._schema.returns
    return target in _MAYBE_VIEWS or (bool(returns) and returns[0].alias_info is not None)


def returned(graph: fx.Graph) -> set[fx.Node]:
    """Values whose memory the caller may get to see: merging or bypassing them could make two results share it."""
    (output,) = graph.find_nodes(op="output")
    todo, seen = list(output.all_input_nodes), set()
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "call_function" and is_view(node):
            todo += node.all_input_nodes[:1]
    return seen


def written(graph: fx.Graph) -> set[fx.Node]:
    """Inputs the graph writes to: a copy of one keeps its old value, and is not the same as the input."""
    return {a for n in graph.nodes if n.op == "call_function" for a in mutated_arguments(n) if isinstance(a, fx.Node)}


def sizes_from(node: fx.Node) -> bool:
    """Does a data-dependent op (nonzero, item) read it? Two such ops on one tensor would share the size they define."""
    return any(user.meta.get("unbacked_bindings") for user in node.users)


def layout_sensitive(graph: fx.Graph, own: bool = True) -> set[fx.Node]:
    """Values whose strides somebody may look at: ops on raw memory, and kernels outside of ATen; `own`: turbogr's too.

    These read right numbers in any layout, but dropout between them draws as they lie.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in found or (node.op == "call_function" and _reads_layout(node.target, own)):
            found.update(node.all_input_nodes)
    return found


def _reads_layout(target: Any, own: bool) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    plain = ("aten", "prims") if own else ("aten", "prims", "turbogr")
    return target in _ON_MEMORY or target.namespace not in plain


def regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number of mode switches (autocast, grad mode) before each node: equal numbers, equal modes."""
    count, found = 0, {}
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") in _MODES:
            count += 1
        found[node] = count
    return found


def tensor(node: Any) -> torch.Tensor | None:
    """Fake value of a node that is one tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def zeros_of(value: torch.Tensor) -> tuple[complex, ...]:
    """The zeros that a value of this type may hold: some ops tell their signs."""
    if value.is_complex():
        return complex(0.0, 0.0), complex(-0.0, 0.0), complex(0.0, -0.0), complex(-0.0, -0.0)
    return (0.0, -0.0) if value.is_floating_point() else (0,)


def is_storage(value: torch.Tensor) -> bool:
    """Of a type to keep numbers in: torch neither compares nor counts floats of eight bits."""
    return value.is_floating_point() and value.dtype.itemsize == 1


def is_collective(node: fx.Node) -> bool:
    """Starts an exchange with other ranks, which must do the same in the same order: never dropped, merged or moved
    past another one."""
    return _of_collectives(node) and node.target.overloadpacket.__name__ not in _WAITS  # type: ignore[union-attr]


def is_wait(node: fx.Node) -> bool:
    """Waits for a collective; its value is what the others may read."""
    return _of_collectives(node) and node.target.overloadpacket.__name__ == "wait_tensor"  # type: ignore[union-attr]


def _of_collectives(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _COLLECTIVES
