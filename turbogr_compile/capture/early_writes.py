"""Parameters that a step writes under `no_grad` before it uses them (`self.scale.clamp_(0, 4)`).

Eager's gradient of such a parameter is that of its new value, as if the step had begun with it. So the step does begin
with it: what computes the new values leaves the graph and runs before each call, on the real tensors and in place, and
the graph reads the parameter. Versions of tensors, and with them eager's errors about values saved by earlier steps,
stay what they are.
"""

from __future__ import annotations

import torch
from torch import fx

from .._torch import StorageWeakRef, get_data_attr, is_impure, is_random, set_grad_enabled
from .normal import memory_of
from .trace import Traced, Write, is_size_arithmetic

aten = torch.ops.aten


def hidden_writes(traced: Traced, tracked: set[fx.Node]) -> list[tuple[Write, fx.Node]]:
    """Writes that autograd does not see, and the tracked value that they overwrite."""
    memory: dict[StorageWeakRef, fx.Node] = {}
    for node in reversed(traced.module.graph.nodes):
        value = node.meta.get("val")
        if node in tracked and isinstance(value, torch.Tensor):
            memory[StorageWeakRef(value.untyped_storage())] = node
    owners = ((write, memory.get(write.memory)) for write in traced.writes)
    return [(w, o) for w, o in owners if o is not None and not (w.seen and w.node in tracked)]


class EarlyWrites:
    """Takes the writes to parameters out of a trace; `settled` says whether the rest of it still is the program."""

    def __init__(self, traced: Traced, hidden: list[tuple[Write, fx.Node]], uncounted: set[StorageWeakRef]) -> None:
        self.traced, self.graph = traced, traced.module.graph
        placeholders = self.graph.find_nodes(op="placeholder")
        self.counted: dict[fx.Node, bool] = {}  # written parameters: do their versions count it?
        for owner in {owner for _, owner in hidden}:
            how = {write.counted for write, written in hidden if written is owner}
            if len(how) == 1 and (how == {False} or memory_of(owner).isdisjoint(uncounted)):
                (self.counted[owner],) = how
        self.taken = {
            i: value for i, value in traced.written.items()
            if placeholders[i] in self.counted and _leaves_alone(_cone(value))
        }  # fmt: skip
        self.parameters = {placeholders[i] for i in self.taken}
        self.module = self._take(placeholders) if self.taken else None

    def _take(self, placeholders: list[fx.Node]) -> fx.GraphModule:
        """What computes the new values, as a module of its own; the graph goes on with the parameters themselves."""
        self._readers = {n for p in self.parameters for n in p.users if n.op != "output"}
        self._views = self._views_without_gradient(memory for v in self.taken.values() for memory in memory_of(v))
        early, values = fx.Graph(), dict[fx.Node, fx.Node]()
        wanted = {n for v in self.taken.values() for n in _cone(v)}
        for node in self.graph.nodes:
            if node.op == "placeholder" or node in wanted:
                values[node] = early.node_copy(node, values.__getitem__)
        for i, value in self.taken.items():
            written = values[placeholders[i]]
            if not self.counted[placeholders[i]]:
                written = early.call_function(get_data_attr, (written,))
            early.call_function(aten.copy_.default, (written, values[value]))
            value.replace_all_uses_with(placeholders[i])
            del self.traced.written[i]
        early.output(())
        return fx.GraphModule(self.traced.module, early)

    def _views_without_gradient(self, memory: object) -> set[fx.Node]:
        """Views of a new value that were made with gradients off.

        Some of them stand for views that the user took with gradients on, before the write.
        """
        ours, enabled, found = set(memory), True, set()  # type: ignore[call-overload]
        for node in self.graph.nodes:
            if node.target is set_grad_enabled:
                enabled = node.args[0]
            elif not enabled and node not in self.taken.values() and not memory_of(node).isdisjoint(ours):
                found.add(node)
        return found

    def settled(self) -> bool:
        """Does nothing read an old value, now that dead code is gone?"""
        if self.module is None:
            return True
        return not any(n in self._readers or n in self._views for n in self.graph.nodes)


def _cone(value: fx.Node) -> set[fx.Node]:
    """What the value is computed from, itself included."""
    found, todo = set(), [value]
    while todo:
        node = todo.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            todo += node.all_input_nodes
    return found


def _leaves_alone(cone: set[fx.Node]) -> bool:
    """May it run earlier, and on its own?"""
    return all(
        n.op == "get_attr" or is_size_arithmetic(n)
        or (isinstance(n.target, torch._ops.OpOverload) and not is_random(n) and not is_impure(n)
            and not n.meta.get("unbacked_bindings"))
        for n in cone
    )  # fmt: skip
