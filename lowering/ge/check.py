"""Every node of a GE graph against its operator's prototype, before and while it runs.

Before: inputs, attributes, and dtypes as far as torchair states them. While it runs, all dtypes and ranks are known.

The lists of dtypes that torchair carries are older than CANN, which has since taught many operators bf16, bool or
64-bit indices. Where a list names a near relative, the problem is a doubt: reported, and no reason to stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import did_you_mean
from ...graph.text import dtype_text
from . import prototypes
from .dtypes import of_attribute
from .graph import INPUTS, TORCHAIRS, Graph, Node
from .prototypes import Attribute, Port, Prototype

# Ports of one dtype where the prototype only lists what each may be; GE's own verifiers ask for it.
_ARITHMETIC = "Add Sub Mul RealDiv FloorDiv FloorMod TruncateDiv Maximum Minimum Pow BitwiseAnd BitwiseOr BitwiseXor"
_COMPARISONS = "Equal NotEqual Less LessEqual Greater GreaterEqual"
EQUAL: dict[str, tuple[str, ...]] = {
    **{op: ("x1", "x2", "y") for op in _ARITHMETIC.split()},
    **{op: ("x1", "x2") for op in _COMPARISONS.split()},
    **{op: ("x1", "x2") for op in ("MatMul", "MatMulV2", "BatchMatMul", "BatchMatMulV2")},
    "SelectV2": ("then", "else", "result"), "ConcatV2": ("x", "y"), "Pack": ("x", "y"),
    "ClipByValueV2": ("x", "clip_value_min", "clip_value_max", "y"), "MaskedFill": ("x", "value", "y"),
    "ReluGrad": ("gradients", "features", "backprops"), "SigmoidGrad": ("y", "dy", "z"), "TanhGrad": ("y", "dy", "z"),
    "GeluGrad": ("dy", "x", "y", "z"), "SwishGrad": ("grad", "x", "y", "grad_x"),
    "SoftmaxGrad": ("softmax", "grad_softmax", "grad_x"), "InplaceIndexAdd": ("var", "updates"),
    "ScatterElements": ("data", "updates", "y"), "Assign": ("ref", "value"), "Lerp": ("start", "end", "weight", "y"),
    "AxpyV2": ("x1", "x2", "alpha"), "Gather": ("x", "y"), "GatherV2": ("x", "y"), "GatherElements": ("x", "y"),
    "Reshape": ("x", "y"), "Transpose": ("x", "y"), "BroadcastTo": ("x", "y"), "StridedSliceV2": ("x", "y"),
    "HcomAllReduce": ("x", "y"), "HcomAllGather": ("x", "y"), "HcomReduceScatter": ("x", "y"),
    "HcomAllToAll": ("x", "y"), "HcomAllToAllV": ("send_data", "recv_data"),
}  # fmt: skip
# Least and greatest rank of an input.
RANKS: dict[str, dict[str, tuple[int, int]]] = {
    "MatMul": {"x1": (2, 2), "x2": (2, 2), "bias": (1, 2)},
    "MatMulV2": {"x1": (2, 2), "x2": (2, 2), "bias": (1, 2)},
    "BatchMatMul": {"x1": (2, 8), "x2": (2, 8)},
    "BatchMatMulV2": {"x1": (2, 8), "x2": (2, 8)},
    "Conv2D": {"x": (4, 4), "filter": (4, 4)},
    "Reshape": {"shape": (1, 1)},
    "Transpose": {"perm": (1, 1)},
    "NLLLoss": {"x": (1, 2), "target": (1, 1)},
    "Tril": {"x": (2, 8)},
    "Triu": {"x": (2, 8)},
}
MOST_LISTED = 20
_KIN = (
    frozenset({torch.float16, torch.bfloat16, torch.float32}),
    frozenset({torch.int32, torch.int64}),
    frozenset({torch.bool, torch.int8, torch.uint8}),
)


@dataclass(frozen=True)
class Problem:
    node: Node
    text: str
    certain: bool = True

    def __str__(self) -> str:
        return f"{self.node}: {self.text}"


@dataclass(frozen=True)
class Seen:
    """What is known of a value: not everything, before the graph runs."""

    dtype: torch.dtype | None = None
    rank: int | None = None


def check(graph: Graph) -> list[Problem]:
    """What is wrong with the graph, as far as it can be told without running it."""
    problems: list[Problem] = []
    known: dict[tuple[str, int], Seen] = {}
    for node in graph.nodes:
        prototype = prototypes.find(node.type)
        inputs = [known.get((s.node, s.index), Seen()) if s else None for s in node.inputs]
        outputs = _stated(node, inputs)
        if prototype is None:
            near = did_you_mean(node.type, prototypes.known_types())
            problems.append(Problem(node, f"GE knows no operator {node.type}{near}"))
        elif prototype.is_reliable:
            problems += [Problem(node, text) for text in _structure(node, prototype)]
            problems += check_values(node, prototype, inputs, outputs)
        for index, seen in enumerate(outputs):
            known[node.name, index] = seen
    return problems


def certain(problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in problems if problem.certain]


def listed(problems: Sequence[Problem]) -> str:
    shown = "".join(f"\n  {problem}" for problem in problems[:MOST_LISTED])
    return shown + (f"\n  and {len(problems) - MOST_LISTED} more" if len(problems) > MOST_LISTED else "")


def check_values(
    node: Node, prototype: Prototype, inputs: Sequence[Seen | None], outputs: Sequence[Seen | None]
) -> Iterator[Problem]:
    """Dtypes against the lists and variables of the prototype, ranks against what is certain."""
    ports = matched(prototype.inputs, node.ports)
    named = [(p, n, v) for (p, n), v in zip(ports, inputs, strict=True) if v is not None]
    results = matched(prototype.outputs, [value.name for value in node.outputs])
    made = [(p, n, v) for (p, n), v in zip(results, outputs, strict=True) if v is not None]
    for port, name, seen in [*named, *made]:
        if port and port.dtypes and seen.dtype and seen.dtype not in port.dtypes:
            text = f"{name} is {dtype_text(seen.dtype)}, and {node.type} takes {_list(port.dtypes)}"
            yield Problem(node, text, certain=not _may_be_newer(seen.dtype, port.dtypes))
    for variable in sorted({p.variable for p, _, _ in [*named, *made] if p and p.variable}):
        yield from _differing(node, [(n, v) for p, n, v in [*named, *made] if p and p.variable == variable])
    equal = EQUAL.get(node.type, ())
    yield from _differing(node, [(n, v) for p, n, v in [*named, *made] if p and p.name in equal])
    for port, name, seen in named:
        least, greatest = RANKS.get(node.type, {}).get(port.name if port else "", (0, 8))
        if seen.rank is not None and not least <= seen.rank <= greatest:
            wanted = f"{least}" if least == greatest else f"{least} to {greatest}"
            yield Problem(node, f"{name} has rank {seen.rank}, and {node.type} takes rank {wanted}")


def _may_be_newer(dtype: torch.dtype, listed: frozenset[torch.dtype]) -> bool:
    return any(dtype in kin and listed & kin for kin in _KIN)


def matched(ports: Iterable[Port], names: Sequence[str]) -> list[tuple[Port | None, str]]:
    """The port that each name belongs to. A dynamic port's values are numbered: x0, x1, …"""
    remaining = list(ports)
    found: list[tuple[Port | None, str]] = []
    current: Port | None = None  # a dynamic one whose values are being counted
    count = 0
    for name in names:
        port = current
        if current is None or name != f"{current.name}{count}":
            wanted = (p for p in remaining if name == (f"{p.name}0" if p.kind == "dynamic" else p.name))
            port, count = next(wanted, None), 0
            current = port if port and port.kind == "dynamic" else None
            remaining = [p for p in remaining if p is not port]
        count += 1
        found.append((port, name))
    return found


def _structure(node: Node, prototype: Prototype) -> Iterator[str]:
    if node.type in INPUTS:
        return
    fed = [name for name, source in zip(node.ports, node.inputs, strict=True) if source is not None]
    for port in prototype.inputs:
        if port.kind == "required" and port.name not in fed:
            yield f"input {port.name} is missing"
    for belongs_to, name in matched(prototype.inputs, node.ports):
        if belongs_to is None:
            yield f"{node.type} has no input {name}{did_you_mean(name, [p.name for p in prototype.inputs])}"
    known = {attribute.name: attribute for attribute in prototype.attributes}
    for attribute in prototype.attributes:
        if attribute.required and attribute.name not in node.attributes and node.constant is None:
            yield f"attribute {attribute.name} is missing"
    for name, value in node.attributes.items():
        if name in known:
            if not _fits(value, known[name]):
                yield f"attribute {name} is {value!r}, and {node.type} takes {known[name].type}"
        elif name not in TORCHAIRS:
            yield f"{node.type} has no attribute {name}{did_you_mean(name, known)}"


def _fits(value: Any, attribute: Attribute) -> bool:
    kinds: dict[str, tuple[type, ...]] = {
        "Int": (int,), "Float": (float,), "Bool": (bool,), "String": (str,), "Type": (torch.dtype, type(None)),
    }  # fmt: skip
    if attribute.type.startswith("ListList"):
        return isinstance(value, list)
    if attribute.type.startswith("List"):
        kind = kinds.get(attribute.type.removeprefix("List"), (object,))
        return isinstance(value, list) and all(isinstance(item, kind) for item in value)
    return isinstance(value, kinds.get(attribute.type, (object,)))


def _stated(node: Node, inputs: Sequence[Seen | None]) -> list[Seen]:
    """What torchair says of a node's values, and what follows from an attribute."""
    if node.type in (*INPUTS, "Const"):
        value = node.outputs[0]
        return [Seen(value.dtype, None if value.shape is None else len(value.shape))]
    if node.type == "Cast":
        return [Seen(of_attribute(node.attribute("dst_type", -1)))]
    stated = [Seen(value.dtype) for value in node.outputs]
    of_inputs = dict(zip(node.ports, inputs, strict=True))
    for place, value in enumerate(node.outputs):
        group = EQUAL.get(node.type, ())
        if stated[place].dtype is None and value.name in group:
            first = next((of_inputs[n] for n in node.ports if n in group or n.rstrip("0123456789") in group), None)
            stated[place] = Seen(first.dtype) if first else Seen()
    return stated


def _differing(node: Node, named: Sequence[tuple[str, Seen]]) -> Iterator[Problem]:
    known = [(name, seen.dtype) for name, seen in named if seen.dtype]
    if len({dtype for _, dtype in known}) > 1:
        found = ", ".join(f"{name} of {dtype_text(dtype)}" for name, dtype in known)
        yield Problem(node, f"one dtype is wanted, and there are {found}")


def _list(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(sorted(dtype_text(d) for d in dtypes))
