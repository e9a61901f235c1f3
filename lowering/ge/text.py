"""GE graphs as text people can read, laid out as the FX dumps are.

    graph(%arg0_1: f32[4, 6], %arg1_1: f32[32, 6]):
      %MatMul : f32[4, 32] = MatMul(%arg0_1, %arg1_1) {transpose_x2=True}   # mm
      %Cast : f16[4, 32] = Cast(%MatMul) {dst_type=f16}   # _to_copy
      %Add : f16[4, 32] = Add(%Cast, 1.0:f16) after %Relu [stream=late]   # add
      return (%Add)

Small constants stand where they are read. What follows `after` must have run; labels stand in brackets. A helper node
says for which FX node it was made. Where torchair is silent about a dtype or a shape, so is the text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ...graph.provenance import UserLine, line_of
from ...graph.text import dtype_text, layout
from . import prototypes
from .dtypes import of_attribute
from .graph import INPUTS, Graph, Node, Source, Value

_LABELS = {
    "_user_stream_label": "stream",
    "_user_stream_priority": "priority",
    "_enable_inner_parallel": "inner_parallel",
}
SMALL = 8  # elements of a constant that is written where it is read


def graph_text(graph: Graph, fx_graph: fx.Graph | None = None) -> str:
    lines = {n.name: line_of(n) for n in fx_graph.nodes} if fx_graph is not None else {}
    inline = {n.name: _constant(n.constant) for n in graph.nodes if _is_inline(n)}
    body: list[tuple[str, UserLine | None]] = []
    for node in graph.nodes:
        if node.name not in inline and node.type not in INPUTS:
            body.append((_line(node, graph, inline), lines.get(node.origin)))
    mixed = not all(node.host for node in graph.inputs)  # on a CPU everything is on the host
    return layout([_input(node, mixed) for node in graph.inputs], body)


def _is_inline(node: Node) -> bool:
    return node.constant is not None and node.constant.numel() <= SMALL and not (node.controls or node.labels)


def _input(node: Node, mixed: bool) -> str:
    place = " on host" if node.host and mixed else ""
    kind = " written" if node.type == "RefData" else ""
    return f"%{_name(node)} : {value_text(node.outputs[0])}{place}{kind}"


def _line(node: Node, graph: Graph, inline: dict[str, str]) -> str:
    arguments = ", ".join(_argument(source, graph, inline) for source in node.inputs)
    after = "".join(f" %{_name(graph.by_name[c])}" for c in node.controls)
    tail = f" after{after}" if after else ""
    if node.labels:
        tail += " [" + ", ".join(f"{_LABELS.get(k, k)}={v}" for k, v in sorted(node.labels.items())) + "]"
    if node.type == "NetOutput":
        return f"return ({arguments}){tail}"
    if node.constant is not None:
        arguments = _constant(node.constant)
    head = f"%{_name(node)}{_types(node)} = {node.type}({arguments}){_attributes(node)}{tail}"
    if node.fx:
        return f"{head}   # {node.fx}"
    return f"{head}   # for {node.origin}" if node.origin else head


def _name(node: Node) -> str:
    return node.alias or node.name


def _argument(source: Source | None, graph: Graph, inline: dict[str, str]) -> str:
    if source is None:
        return "None"
    if source.node in inline:
        return inline[source.node]
    node = graph.by_name[source.node]
    return f"%{_name(node)}" + (f":{source.index}" if len(node.outputs) > 1 else "")


def _types(node: Node) -> str:
    texts = [value_text(value) for value in node.outputs]
    if not any(texts):
        return ""
    return f" : {texts[0]}" if len(texts) == 1 else f" : ({', '.join(t or '?' for t in texts)})"


def value_text(value: Value) -> str:
    if value.dtype is None:
        return ""
    dims = ", ".join(str(d) for d in value.shape) if value.shape is not None else "…"
    return f"{dtype_text(value.dtype)}[{dims}]"


def _attributes(node: Node) -> str:
    prototype = prototypes.find(node.type)
    defaults = {a.name: a for a in prototype.attributes} if prototype else {}
    shown = {k: v for k, v in sorted(node.attributes.items()) if not (k in defaults and defaults[k].is_default(v))}
    return " {" + ", ".join(f"{k}={_attribute(k, v)}" for k, v in shown.items()) + "}" if shown else ""


def _attribute(name: str, value: Any) -> str:
    if name in ("dst_type", "dtype") and isinstance(value, int):  # some prototypes call a dtype a number
        value = of_attribute(value) or value
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, float):
        return _float(value)
    return "[" + ", ".join(_attribute("", v) for v in value) + "]" if isinstance(value, list) else repr(value)


def _constant(tensor: torch.Tensor | None) -> str:
    assert tensor is not None
    usual = tensor.dtype in (torch.float32, torch.int64, torch.bool)
    suffix = "" if usual else f":{dtype_text(tensor.dtype)}"
    if tensor.numel() > SMALL:
        return f"<{tensor.numel()} elements>"
    return _literal(tensor.tolist()) + suffix


def _literal(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_literal(v) for v in value) + "]"
    return _float(value) if isinstance(value, float) else str(value)


def _float(value: float) -> str:
    """As it was written before it became a float32."""
    return repr(float(f"{value:.7g}"))
