"""Which nodes of a graph torchair can convert, found by trying each before the graph is converted.

A converter that exists may still only raise, or take some arguments and not others; a list of names says little. One
node alone converts in a millisecond, and equal calls are tried once.
"""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import fx

from ... import _torch
from ...graph.provenance import UserLine, line_of
from ...kernels.ascendc.limits import lacking
from .operators import narrows, operators, overload

Refusals = dict[fx.Node, str]
# Statements about sizes, and what they compare: for the host, where sizes are numbers.
ASSERTIONS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
)
OUTSIDE = "a statement about sizes"
# What converts, to a graph that GE does not take.
WRONG = {torch.ops.aten.randint.default: "torchair multiplies float32 by int64 for it, and GE has no such product"}


@dataclass(frozen=True)
class Gap:
    """An op that stays out of GE graphs: how often, why, and the first line of the user's that asks for it."""

    op: str
    count: int
    reason: str
    line: UserLine | None
    node: str


def refusals(torchair: ModuleType, config: Any, module: fx.GraphModule) -> Refusals:
    """Nodes that cannot be converted, and why. Values must be described (`meta["val"]`)."""
    found: Refusals = {}
    tried: dict[Any, str] = {}
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in ASSERTIONS:
            found[node] = OUTSIDE
            continue
        if node.target is operator.getitem:  # goes with the node it takes a result of
            if node.args[0] in found:
                found[node] = found[node.args[0]]
            continue
        reason = WRONG.get(node.target, "") or _by_declaration(node)
        if not reason:
            key = _key(node)
            if key not in tried:
                tried[key] = _try(torchair, config, node)
            reason = tried[key]
        if reason:
            found[node] = reason
    return found | _not_copied(module.graph)


def _not_copied(graph: fx.Graph) -> Refusals:
    """Results that share memory with an input become copies (`results.py`), and GE copies no complex numbers."""
    (output,) = graph.find_nodes(op="output")
    inputs = [n.meta["val"] for n in graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)]
    found: Refusals = {}
    for node in output.all_input_nodes:
        value = node.meta.get("val")
        is_complex = node.op == "call_function" and isinstance(value, torch.Tensor) and value.is_complex()
        if is_complex and any(_torch.is_alias(value, x) for x in inputs):
            found[node] = f"its result shares memory with an input, and GE copies no {value.dtype}"
    return found


def gaps(found: Refusals) -> list[Gap]:
    by_op: dict[str, list[fx.Node]] = {}
    for node, reason in found.items():
        if node.target is not operator.getitem and reason != OUTSIDE:
            by_op.setdefault(str(node.target), []).append(node)
    return [
        Gap(op, len(nodes), found[nodes[0]], next((line for n in nodes if (line := line_of(n))), None), nodes[0].name)
        for op, nodes in by_op.items()
    ]


def _by_declaration(node: fx.Node) -> str:
    """What turbogr's own operators do not take: other dtypes, some options, some sizes."""
    name = str(node.target).removeprefix("turbogr.").removesuffix(".default")
    prototype = operators().get(name) if str(node.target).startswith("turbogr.") else None
    if prototype is None:
        return "" if not str(node.target).startswith("turbogr.") else f"turbogr::{name} has no AscendC kernel"
    names = (argument.name for argument in overload(name)._schema.arguments)
    arguments: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if absent := lacking(name, arguments):
        return f"its AscendC kernel has no {absent}"
    for port in prototype.inputs:
        value = arguments.get(port.name)
        dtype = value.meta["val"].dtype if isinstance(value, fx.Node) else None
        if port.dtypes is not None and dtype is not None and dtype not in port.dtypes and not narrows(port, dtype):
            return f"its AscendC kernel takes no {dtype} for {port.name}"
    for argument, (fits, limit) in WIDTHS.get(name.removesuffix("_backward"), {}).items():
        value = arguments.get(argument)
        width = value.meta["val"].shape[-1] if isinstance(value, fx.Node) else None
        if isinstance(width, int) and not fits(width):
            return f"its AscendC kernel takes {limit}, and {argument} has {width}"
    return ""


_HEADS = (lambda width: width <= 512, "heads of up to 512")
_PAIRS = (lambda width: 1 < width <= 2048, "tables of pairs with 2 to 2048 key columns")
WIDTHS: dict[str, dict[str, tuple[Callable[[int], bool], str]]] = {
    "jagged_attention": {"query": _HEADS, "value": _HEADS, "pair_mask": _PAIRS, "bias": _PAIRS},
    "norm_gate": {"x": (lambda width: width <= 8192, "rows of up to 8192")},
    "sampled_softmax": {"query": (lambda width: width % 16 == 0 and width <= 512, "multiples of 16 up to 512")},
}


def _key(node: fx.Node) -> Any:
    def described(value: Any) -> Any:
        if isinstance(value, fx.Node):
            known = value.meta.get("val")
            return (known.dtype, tuple(map(str, known.shape))) if isinstance(known, torch.Tensor) else str(known)
        return repr(value)

    return (
        node.target,
        repr(fx.map_arg(node.args, lambda n: n)),
        repr(node.kwargs),
        tuple(described(n) for n in node.all_input_nodes),
    )


def _try(torchair: ModuleType, config: Any, node: fx.Node) -> str:
    alone, values = _alone(node)
    try:
        with _quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            convert(torchair, config, alone, values)
    except Exception as error:
        return first_cause(error)
    return ""


def convert(torchair: ModuleType, config: Any, module: fx.GraphModule, values: list[Any]) -> Any:
    """The GE graph of a module, not loaded into anything."""
    from torchair._ge_concrete_graph.fx2ge_converter import GeConcreteGraph
    from torchair.npu_fx_compiler import _NpuGraphConverter

    graph = GeConcreteGraph(config, name="trial")
    return _NpuGraphConverter(module, graph=graph, garbage_collect_values=False).run(*values)


def _alone(node: fx.Node) -> tuple[fx.GraphModule, list[Any]]:
    graph = fx.Graph()
    inputs = {n: graph.placeholder(n.name) for n in node.all_input_nodes}
    for old, new in inputs.items():
        new.meta = dict(old.meta)
    graph.node_copy(node, lambda n: inputs[n])
    graph.output(())  # a result that is an input in disguise would be refused, and is no matter of the op
    return fx.GraphModule(torch.nn.Module(), graph), [n.meta.get("val") for n in inputs]


def first_cause(error: BaseException) -> str:
    """torchair wraps errors in errors; what went wrong first says most."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    if "ge_converter is not implemented" in str(error):
        return "torchair has no converter for it"
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


class _quiet:
    """What fails here is told as a remark; torchair need not log it."""

    def __enter__(self) -> None:
        self.level = logging.getLogger("torchair").level
        logging.getLogger("torchair").setLevel(logging.CRITICAL + 1)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("torchair").setLevel(self.level)


def split(module: fx.GraphModule, found: Refusals, compile_part: Callable[[fx.GraphModule], Any]) -> fx.GraphModule:
    """A module in which what converts is compiled, part by part, and the rest runs op by op."""
    return _torch.compile_parts(module, lambda node: node not in found, compile_part)
