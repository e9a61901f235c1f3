"""A GE graph to read: nodes in an order that runs, named inputs, control edges, attributes, and the FX node of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ...errors import TargetError
from .dtypes import of_attribute, of_descriptor

# Bookkeeping of torchair's that says nothing about the program.
_NOISE = {
    "_input_name_key", "_input_name_value", "_output_name_key", "_output_name_value", "_readable_value",
    "_inputs_all_sym", "_origin_data_name", "_host_tensor", "_force_unknown_shape",
}  # fmt: skip
# Attributes that torchair adds to any node for its own use; GE's prototypes do not know them.
TORCHAIRS = {"input_layout_info", "output_layout_info", "update_node_from_fx_input_idx", "nn_module_stack"}
INPUTS = ("Data", "RefData")


class GraphError(TargetError):
    """A GE graph that cannot run, or did not run as it declares."""

    def __init__(self, message: str) -> None:
        # torchair raises errors anew with the traceback and a report in the message; both are with the error already.
        super().__init__(message.partition("\nTraceback (most recent call last):")[0].rstrip())


@dataclass(frozen=True)
class Source:
    """Where an input comes from."""

    node: str
    index: int


@dataclass(frozen=True)
class FxValue:
    """The value of the FX graph that a tensor was converted from."""

    node: str
    target: str
    path: tuple[int | str, ...]  # into the node's result, where that is not one tensor


@dataclass(frozen=True)
class Value:
    """A tensor as torchair describes it.

    Only what torchair knew from FX is described; of its helper nodes it says nothing. With its view optimisation
    the shape may be that of a later view of the same elements.
    """

    name: str
    dtype: torch.dtype | None
    shape: tuple[int | str, ...] | None
    fx: FxValue | None = None


@dataclass(eq=False)
class Node:
    name: str
    type: str
    inputs: tuple[Source | None, ...]
    ports: tuple[str, ...]  # names of the inputs
    controls: tuple[str, ...]  # nodes that must have run
    attributes: dict[str, Any]
    labels: dict[str, Any]  # attached to the node, not to its type: streams, engines
    outputs: tuple[Value, ...]
    expects: tuple[Value, ...] = ()  # of the inputs; only the graph's result says
    constant: torch.Tensor | None = None
    host: bool = False
    alias: str = ""  # a name that does not change from run to run, where the real one does
    origin: str = ""  # the FX node it was made for

    @cached_property
    def fx(self) -> str:
        """The FX node whose value it computes, or ''."""
        return next((value.fx.node for value in self.outputs if value.fx), "")

    def attribute(self, name: str, default: Any = None) -> Any:
        return self.attributes.get(name, default)

    def __str__(self) -> str:
        whose = f", FX node %{self.origin}" if self.origin else ""
        return f"%{self.alias or self.name} ({self.type}{whose})"


@dataclass(eq=False)
class Graph:
    name: str
    nodes: tuple[Node, ...]  # each after what it needs
    by_name: dict[str, Node] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {node.name: node for node in self.nodes}

    @property
    def inputs(self) -> list[Node]:
        return sorted((n for n in self.nodes if n.type in INPUTS), key=lambda n: n.attributes["index"])

    @property
    def result(self) -> Node:
        return next(n for n in self.nodes if n.type == "NetOutput")

    @property
    def types(self) -> set[str]:
        return {n.type for n in self.nodes}


def from_bytes(serialized: bytes) -> Graph:
    """From the model that torchair hands to its native module."""
    from torchair._ge_concrete_graph.ge_ir_pb2 import ModelDef

    model = ModelDef()
    model.ParseFromString(serialized)
    return from_proto(model.graph[0])


def of(compiled: Any) -> Graph:
    """The GE graph inside what torchair's compiler returned, before or after its first run."""
    concrete = getattr(compiled, "runner", compiled)
    ge_graph = getattr(concrete, "graph", concrete)
    if not hasattr(ge_graph, "_proto"):
        raise GraphError(f"{type(compiled).__name__} holds no GE graph; give what torchair's compiler returned")
    return from_proto(ge_graph._proto)


def from_proto(graph: Any) -> Graph:
    nodes = _ordered([_node(op) for op in graph.op], graph.name)
    _find_origins(nodes)
    return Graph(graph.name, tuple(nodes))


def _node(op: Any) -> Node:
    attributes = {key: _attribute(value) for key, value in op.attr.items()}
    constant = _constant(op.attr["value"].t) if op.type == "Const" else None
    data = [text for text in op.input if not text.endswith(":-1")]
    described = op.type in (*INPUTS, "Const")
    return Node(
        name=op.name,
        type=op.type,
        inputs=tuple(_source(text) if text else None for text in data),
        ports=tuple(d.name for d in op.input_desc) if op.type not in INPUTS else (),
        controls=tuple(text.removesuffix(":-1") for text in op.input if text.endswith(":-1")),
        attributes={k: v for k, v in attributes.items() if k[0] != "_" and not (constant is not None and k == "value")},
        labels={k: v for k, v in attributes.items() if k[0] == "_" and k not in _NOISE},
        outputs=tuple(_value(d, described) for d in op.output_desc),
        expects=tuple(_value(d, True) for d in op.input_desc) if op.type == "NetOutput" else (),
        constant=constant,
        host=bool(attributes.get("_host_tensor")) or (op.type in INPUTS and op.output_desc[0].device_type == "CPU"),
        alias=attributes.get("_origin_data_name", ""),
    )


def _source(text: str) -> Source:
    name, _, index = text.rpartition(":")
    return Source(name, int(index))


def _attribute(value: Any) -> Any:
    """As Python has it; a dtype where the attribute is one."""
    which = value.WhichOneof("value")
    if which == "list":
        kinds = {1: "s", 2: "i", 3: "f", 4: "b", 10: "dt"}
        kind = kinds.get(value.list.val_type) or next((k for k in kinds.values() if getattr(value.list, k)), "i")
        return [_scalar(kind, item) for item in getattr(value.list, kind)]
    if which == "list_list_int":
        return [list(row.list_i) for row in value.list_list_int.list_list_i]
    return None if which is None else _scalar(which, getattr(value, which))


def _scalar(kind: str, value: Any) -> Any:
    if kind == "s":
        return value.decode(errors="replace")
    return of_attribute(value) if kind == "dt" else value


def _value(description: Any, described: bool) -> Value:
    """`described`: dtype and dims are the descriptor's own; else they count where torchair took them from FX."""
    fx = description.attr["_fx_tensor_name"].s.decode() if "_fx_tensor_name" in description.attr else ""
    meta = description.attr["_meta"].s.decode() if "_meta" in description.attr else ""
    shape = _shape_in(meta)
    if described:
        shape = _with_symbols(tuple(description.shape.dim), shape or ())
    dtype = of_descriptor(description.dtype) if described or meta else None
    return Value(description.name, dtype, shape, _fx_value(fx) if fx else None)


def _with_symbols(dims: tuple[int, ...], stated: tuple[int | str, ...]) -> tuple[int | str, ...] | None:
    """A dim that is not known is -1; torchair's note beside it has the symbol, unless it is about a later view."""
    if dims == (-2,):
        return None  # not even the rank is known
    same = len(stated) == len(dims) and all(d in (-1, s) for d, s in zip(dims, stated, strict=True))
    return tuple(d if d != -1 else s for d, s in zip(dims, stated if same else "?" * len(dims), strict=True))


def _fx_value(text: str) -> FxValue:
    """'mm-aten.mm.default.OUTPUT.0'; names of FX nodes hold no hyphen."""
    name, _, path = text.rpartition(".OUTPUT.")
    node, _, target = name.partition("-")
    return FxValue(node, target, tuple(int(p) if p.isdigit() else p for p in path.split(".")))


def _shape_in(meta: str) -> tuple[int | str, ...] | None:
    """Of 'Tensor(dtype=torch.float32, shape=torch.Size([s0, 6])', '<class 'torch.SymInt'>(s0)' or a list of sizes."""
    if meta.startswith("<class 'list'>"):
        return (len(list(_split(meta.partition("([")[2].rpartition("])")[0]))),)
    if meta.startswith("<class "):
        return ()
    found = re.search(r"shape=torch\.Size\(\[(.*)\]\)", meta)
    return tuple(int(d) if d.lstrip("-").isdigit() else d for d in _split(found[1])) if found else None


def _split(text: str) -> Iterator[str]:
    """At commas outside of parentheses, as in 's0, Max(1, s1)'."""
    depth, start = 0, 0
    for place, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    if text[start:].strip():
        yield text[start:].strip()


def _constant(tensor: Any) -> torch.Tensor:
    dtype = of_descriptor(tensor.desc.dtype)
    shape = tuple(tensor.desc.shape.dim)
    if dtype is None:
        raise GraphError(f"a constant has GE dtype {tensor.desc.dtype}, which torch has no twin of")
    count = torch.Size(shape).numel()
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    elements = torch.frombuffer(bytearray(tensor.data), dtype=dtype)
    # An expanded tensor is written as the one element that its storage holds.
    return (elements.expand(count) if len(elements) == 1 else elements[:count]).reshape(shape).clone()


def _ordered(nodes: list[Node], name: str) -> list[Node]:
    """Each node after what it reads and what it must wait for; otherwise in the order given."""
    known = {node.name: node for node in nodes}
    done: dict[str, bool] = {}
    ordered: list[Node] = []
    for root in nodes:
        pending = [(root, False)]
        while pending:
            node, ready = pending.pop()
            if ready:
                done[node.name] = True
                ordered.append(node)
            elif not done.get(node.name):
                if node.name in done:
                    raise GraphError(f"GE graph {name} runs in a circle through {node}")
                done[node.name] = False
                pending.append((node, True))
                for needed in _needs(node):
                    if needed not in known:
                        raise GraphError(f"GE graph {name}: {node} reads %{needed}, which is not there")
                    if not done.get(needed):
                        pending.append((known[needed], False))
    return ordered


def _needs(node: Node) -> Iterable[str]:
    return [*reversed(node.controls), *reversed([source.node for source in node.inputs if source])]


def _find_origins(nodes: list[Node]) -> None:
    """Helpers belong to the FX node of the first that reads them."""
    readers: dict[str, Node] = {}
    for node in nodes:
        for source in node.inputs:
            if source:
                readers.setdefault(source.node, node)
    for node in reversed(nodes):
        reader = readers.get(node.name)
        node.origin = node.fx or (reader.origin if reader and node.type not in INPUTS else "")
