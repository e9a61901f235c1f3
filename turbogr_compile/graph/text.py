"""Graphs as text people can read: one node per line, grouped by the user's own source line.

    graph(%x: f32[s0, 64], %w: f32[64]):
      # model.py:41  h = self.norm(x)
      %rms_norm : f32[s0, 64] = turbogr.rms_norm(%x, %w, 1e-06)      ← %pow_1 %mean %add

Nothing printed depends on the run: no addresses, times or process ids.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .provenance import Origin, UserLine, line_of
from .streams import stream_of

DTYPES = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.float64: "f64",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def type_text(value: Any) -> str:
    """'f32[s0, 64]' for a tensor, 'int s0' for a symbolic size, '(…, …)' for several."""
    if isinstance(value, torch.Tensor):
        dims = ", ".join(str(d) for d in value.shape)
        device = "" if value.device.type == "cpu" else f"@{value.device.type}"
        return f"{dtype_text(value.dtype)}[{dims}]{device}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(type_text(v) for v in value) + ")"
    if isinstance(value, torch.SymInt):
        return f"int {value}"
    if isinstance(value, torch.SymFloat):
        return f"float {value}"
    if isinstance(value, torch.SymBool):
        return f"bool {value}"
    return type(value).__name__ if value is not None else "?"


def dtype_text(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def target_text(node: fx.Node) -> str:
    """'aten.mul.Tensor'; the overload is left out where it is the default one."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    if callable(target):
        module = (getattr(target, "__module__", "") or "").removeprefix("torch.").removeprefix("_operator")
        return f"{module}.{target.__name__}".lstrip(".") if module else target.__name__
    return str(target)


def value_text(value: Any) -> str:
    """A node argument."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(value_text(v) for v in value)
        return f"[{inner}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {value_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, slice):
        return ":".join("" if v is None else value_text(v) for v in (value.start, value.stop, value.step))
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return str(value).removeprefix("torch.")
    if isinstance(value, (int, float, str, bool, complex)) or value is None:
        return repr(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value)
    return f"<{type(value).__name__}>"


def args_text(node: fx.Node) -> str:
    parts = [value_text(a) for a in node.args]
    parts += [f"{k}={value_text(v)}" for k, v in node.kwargs.items()]
    return ", ".join(parts)


def node_text(node: fx.Node, sources: bool = True) -> str:
    if node.op == "output":
        return f"return {value_text(node.args[0])}"
    value = node.meta.get("val")
    name = f"%{node.name} : {type_text(value)}" if value is not None else f"%{node.name}"
    if node.op == "placeholder":
        return name
    if node.op == "get_attr":
        return f"{name} = constant {node.target}"
    text = f"{name} = {target_text(node)}({args_text(node)})"
    if stream := stream_of(node):
        text += f" [stream={stream}]"
    origin = node.meta.get("turbogr")
    if sources and isinstance(origin, Origin) and origin.sources:
        text += "      ← " + " ".join(f"%{s}" for s in origin.sources)
    return text


def graph_text(graph: fx.Graph) -> str:
    """The whole graph, with the user's line above the nodes it produced."""
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    body = [n for n in graph.nodes if n.op != "placeholder"]
    return layout([node_text(n) for n in inputs], ((node_text(n), line_of(n)) for n in body))


def layout(inputs: list[str], body: Iterable[tuple[str, UserLine | None]]) -> str:
    """Lines of a graph from the texts of its nodes; shared by live graphs and recorded ones."""
    signature = ", ".join(text.replace(" : ", ": ", 1) for text in inputs)
    lines = [f"graph({signature}):" if len(signature) < 100 else "graph("]
    if len(signature) >= 100:
        lines += [f"    {text.replace(' : ', ': ', 1)}," for text in inputs] + ["):"]
    last = None
    for text, line in body:
        if line is not None and (line.file, line.line) != last and not text.startswith("return"):
            lines.append(f"  # {line}")
            last = (line.file, line.line)
        lines.append(f"  {text}")
    return "\n".join(lines) + "\n"


def diff_text(before: str, after: str, names: tuple[str, str] = ("before", "after")) -> str:
    """Unified diff; empty where nothing differs."""
    return "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), *names, n=2, lineterm="\n"))
