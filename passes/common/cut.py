"""A part of a graph that computes its results from inputs alone becomes the provider of new inputs."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Container, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ... import _torch
from ...graph.nodes import is_view, tensor
from ...graph.provenance import line_of
from ...graph.shapes import expression
from ...runtime.prologue import KEY, Call, Provider, add_input, reading, reads

aten = torch.ops.aten
Op = torch._ops.OpOverload
_KEPT = ("stack_trace", "turbogr_sampling")  # what is said of a value holds for the input in its place
_SIZES = (aten.sym_size, aten.sym_numel, aten.sym_stride, aten.sym_storage_offset)


class Cut:
    """Given nodes, and everything that follows from them and is not held, moved out of a graph."""

    def __init__(self, graph: fx.Graph, roots: Sequence[fx.Node], held: Container[fx.Node]) -> None:
        self.graph, self.held = graph, held
        start = set(roots)
        while True:
            self.moved = self._following(start)
            self.needed = _ancestors(self.moved)
            # A size that only the run knows has one place where it is found out.
            late = {n for n in self.needed if n.meta.get("unbacked_bindings")} - set(self.moved)
            if not late:
                break
            start |= late
        self.results = self._results()

    def _following(self, start: set[fx.Node]) -> list[fx.Node]:
        found: dict[fx.Node, None] = {}
        for node in self.graph.nodes:
            follows = node.op == "call_function" and not found.keys().isdisjoint(node.all_input_nodes)
            if node in start or (follows and node not in self.held):
                found[node] = None
        for node in reversed(list(found)):
            if is_cheap(node) and found.keys().isdisjoint(node.users):
                del found[node]
        return list(found)

    def _results(self) -> list[fx.Node]:
        """Moved values that the step reads; views and sizes of them it makes itself."""
        moved = set(self.moved)
        found: dict[fx.Node, None] = {}
        left = {n for n in self.graph.nodes if n not in moved}
        for node in reversed(self.moved):
            if not left.isdisjoint(node.users):
                if is_cheap(node):
                    left.add(node)
                else:
                    found[node] = None
        ordered = [n for n in self.moved if n in found]
        return ordered + self._sizes_of(ordered)

    def _sizes_of(self, results: Sequence[fx.Node]) -> list[fx.Node]:
        """More results, so that each size that only the run knows can be read off an input."""
        shown = {e for n in results for e in _bare(n)}
        wanted = set().union(*(_torch.free_unbacked(n.meta["val"]) for n in results)) - shown
        more: list[fx.Node] = []
        for node in self.moved:
            if wanted & _bare(node):
                wanted -= _bare(node)
                more.append(node)
        return more

    # --- rewriting ---------------------------------------------------------------------------------

    def apply(self) -> list[fx.Node]:
        """Replace the moved nodes by inputs; returns these."""
        part = Part(self)
        added = []
        for i, node in enumerate(self.results):
            new = add_input(self.graph, f"ahead_{node.name}", node.meta["val"], part.provider(i))
            new.meta.update({key: node.meta[key] for key in _KEPT if key in node.meta})
            added.append(new)
        moved = set(self.moved)
        for node, new in zip(self.results, added, strict=True):
            node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in moved or is_cheap(user))
        self._return_copies(added)
        for node in reversed(self.moved):
            if not node.users:
                self.graph.erase_node(node)
        for node in reversed(list(self.graph.nodes)):
            if node in self.needed and not node.users and node.op != "placeholder" and not node.is_impure():
                self.graph.erase_node(node)
        return added

    def _return_copies(self, added: Sequence[fx.Node]) -> None:
        """A result of the step is not an input of it."""
        (output,) = self.graph.find_nodes(op="output")
        for node in added:
            if output in node.users and tensor(node) is not None:
                with self.graph.inserting_before(output):
                    copy = self.graph.call_function(aten.clone.default, (node,))
                copy.meta["val"] = node.meta["val"]
                output.replace_input_with(node, copy)


class Part:
    """The moved nodes as a function of a call, evaluated once per call."""

    def __init__(self, cut: Cut) -> None:
        placeholders = cut.graph.find_nodes(op="placeholder")
        own = {n: i for i, n in enumerate(n for n in placeholders if KEY not in n.meta)}
        read = [n for n in placeholders if n in cut.needed]
        self.sources: list[int | Provider] = [own[n] if n in own else n.meta[KEY] for n in read]
        self.draws = _name([n for n in cut.moved if _torch.is_random(n)])
        self.devices: list[torch.device] = []
        self.module = self._copied(cut)

    def _copied(self, cut: Cut) -> fx.GraphModule:
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        generators: dict[torch.device, fx.Node] = {}
        wanted = cut.needed | set(cut.moved)
        for node in cut.graph.nodes:
            if node in wanted and node.op == "placeholder":
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        for node in cut.moved:
            if _torch.is_random(node) and node.meta["val"].device not in generators:
                device = node.meta["val"].device
                self.devices.append(device)
                generators[device] = graph.placeholder(f"generator_{len(generators)}")
        for node in cut.graph.nodes:
            if node in wanted and node.op != "placeholder":
                copy = copies[node] = graph.node_copy(node, lambda n: copies[n])
                if _torch.is_random(node):
                    copy.target = seeded(node.target)  # type: ignore[assignment]
                    copy.kwargs = {**copy.kwargs, "generator": generators[node.meta["val"].device]}
        graph.output(tuple(copies[n] for n in cut.results))
        owner = cut.graph.owning_module
        assert owner is not None
        return fx.GraphModule(owner, graph, "Ahead")

    def provider(self, i: int) -> Provider:
        def provide(call: Call) -> Any:
            return call.once(self, lambda: self.run(call))[i]

        own = {s for s in self.sources if isinstance(s, int)}
        others = reads(s for s in self.sources if not isinstance(s, int))
        reading(provide, own | (others or set()), self.draws)
        if others is None:
            provide.reads = None  # type: ignore[attr-defined]
        return provide

    def run(self, call: Call) -> tuple[Any, ...]:
        values = [call.inputs[s] if isinstance(s, int) else s(call) for s in self.sources]
        generators = [torch.Generator(device).manual_seed(call.seed) for device in self.devices]
        with _torch.without_autocast():  # casts are nodes
            return self.module(*values, *generators)


# --- questions about nodes ---------------------------------------------------------------------------


@lru_cache(maxsize=256)
def seeded(op: Any) -> Op | None:
    """The same op with an argument for a generator."""
    wanted = {a.name for a in op._schema.arguments} | {"generator"}
    packet = op.overloadpacket
    every = [op, *(getattr(packet, name) for name in packet.overloads())]
    return next((o for o in every if {a.name for a in o._schema.arguments} == wanted), None)


def is_cheap(node: fx.Node) -> bool:
    """A view, or a size: made where it is read rather than handed over."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.op == "call_function" and is_cheap(source)
    if isinstance(node.target, Op):
        return not node.is_impure() and (node.target.overloadpacket in _SIZES or is_view(node))
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _bare(node: fx.Node) -> set[Any]:
    """Sizes that can be read off a value."""
    value = node.meta.get("val")
    sizes = value.shape if isinstance(value, torch.Tensor) else [value] if isinstance(value, torch.SymInt) else []
    return {expression(s) for s in sizes if isinstance(s, torch.SymInt)}


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    todo = [a for n in nodes for a in n.all_input_nodes]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found - set(nodes)


def _name(draws: Sequence[fx.Node]) -> str:
    """Of the user's lines that draw: the same for every shape and in every run. '' where nothing is drawn."""
    if not draws:
        return ""
    lines = [(line_of(n), n) for n in draws]
    text = "\n".join(f"{Path(x.file).name} {x.function} {x.code}" if x else str(n.target) for x, n in lines)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
