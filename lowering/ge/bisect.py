"""Runs an FX graph and the GE graph made from it side by side, and names the first node that differs.

    difference = first_difference(compiled, arguments)

    with comparing() as differences:    # whatever GE graphs run inside, as far as they were made by `compared`
        step(*batch)

`compiled` is what torchair's compiler returned. Both graphs get copies of the arguments. What is random in FX, what
other ranks sent, and dropout's backward, which reads GE's packed mask, takes the value that GE computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ... import _torch
from ...graph.nodes import is_collective
from ...graph.provenance import UserLine, line_of
from ...graph.text import node_text
from .graph import GraphError, Node
from .interpreter import observing

Tensor = torch.Tensor
FxNode = fx.Node  # by another name where a field is called fx
aten = torch.ops.aten
# What happens between these on an NPU is a matter of streams, not of values.
_LABELS = ("air.scope_enter.default", "air.scope_exit.default", "air.record.default", "air.wait.default")


@dataclass(frozen=True)
class Difference:
    """The first value, in the order of the FX graph, that GE computes otherwise."""

    fx: FxNode
    ge: Node
    reason: str
    suspects: tuple[FxNode, ...]  # this node, and those before it whose own values GE does not show

    @property
    def line(self) -> UserLine | None:
        return line_of(self.suspects[0])

    def __str__(self) -> str:
        where = f"\n  {self.line}" if self.line else ""
        lines = "".join(f"\n  FX: {node_text(node)}" for node in self.suspects)
        return f"%{self.fx.name} and {self.ge} differ: {self.reason}{where}{lines}"


_comparing: list[list[Difference]] = []


@contextmanager
def comparing() -> Iterator[list[Difference]]:
    """The first difference of each call of a GE graph inside of the block, in the order of calls."""
    found: list[Difference] = []
    _comparing.append(found)
    try:
        yield found
    finally:
        _comparing[:] = [other for other in _comparing if other is not found]


def compared(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which `comparing()` watches."""

    def run(*arguments: Any) -> Any:
        if _comparing and (difference := first_difference(compiled, arguments)):
            for found in _comparing:
                found.append(difference)
        return compiled(*arguments)

    return run


@dataclass
class _Made:
    node: Node
    value: Tensor


def first_difference(
    compiled: Any, arguments: Sequence[Any], rtol: float = 1e-4, atol: float = 1e-5
) -> Difference | None:
    """None where every value that torchair links to an FX node agrees."""
    concrete = getattr(compiled, "runner", compiled)
    module = getattr(concrete, "fx_graph", None)
    if module is None:
        raise GraphError(f"{type(compiled).__name__} holds no FX graph; give what torchair's compiler returned")
    made = _run_ge(compiled, arguments)
    for node, value in _run_fx(module, arguments, made):
        for path, part in _parts(value):
            twin = made.get((node.name, path))
            if twin is not None and (reason := _compare(part, twin.value, rtol, atol)):
                return Difference(node, twin.node, reason, _suspects(node, {name for name, _ in made}))
    return None


def _suspects(node: fx.Node, shown: set[str]) -> tuple[fx.Node, ...]:
    """Back to values that agree. What converts to nothing hides the value before it, and so do optimised views."""
    found, pending = {node}, [node]
    while pending:
        for source in pending.pop().all_input_nodes:
            value = source.args[0] if source.target is operator.getitem else source  # parts are shown with the whole
            if source.op == "call_function" and str(value) not in shown and source not in found:
                found.add(source)
                pending.append(source)
    return tuple(n for n in node.graph.nodes if n in found)


def _run_ge(compiled: Callable[..., Any], arguments: Sequence[Any]) -> dict[tuple[str, tuple[int, ...]], _Made]:
    """Values by FX node and place in its result."""
    made: dict[tuple[str, tuple[int, ...]], _Made] = {}

    def observe(node: Node, index: int, value: Tensor) -> None:
        label = node.outputs[index].fx
        if label is not None:
            made[label.node, _path(label.path)] = _Made(node, value.clone())

    with observing(observe):
        compiled(*_copies(arguments))
    return made


def _run_fx(
    module: fx.GraphModule, arguments: Sequence[Any], made: dict[tuple[str, tuple[int, ...]], _Made]
) -> Iterator[tuple[fx.Node, Any]]:
    run = _Interpreter(module, made)
    given = iter(_copies(arguments))
    with torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "placeholder":
                run.env[node] = next(given)
            elif node.op != "output":
                run.env[node] = run.run_node(node)
                yield node, run.env[node]


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, made: dict[tuple[str, tuple[int, ...]], _Made]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.made = made

    def run_node(self, n: fx.Node) -> Any:
        if str(n.target) in _LABELS:
            return None
        if str(n.target) == "air.wait_tensor.default":  # a control edge
            return self.env[n.all_input_nodes[0]]
        if _torch.is_random(n) or n.target is aten.native_dropout_backward.default or _is_exchange(n):
            values = {path: twin.value for (name, path), twin in self.made.items() if name == n.name}
            if (0,) in values:
                return values[(0,)] if len(values) == 1 else [values[(k,)] for k in range(len(values))]
        return super().run_node(n)


def _is_exchange(node: fx.Node) -> bool:
    """Other ranks do not take part in a comparison."""
    return is_collective(node) or str(node.target).startswith("npu_define.")


def _copies(arguments: Sequence[Any]) -> list[Any]:
    return [a.detach().clone() if isinstance(a, Tensor) else a for a in arguments]


def _path(path: tuple[int | str, ...]) -> tuple[int, ...]:
    return tuple(p for p in path if isinstance(p, int))


def _parts(value: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """torchair numbers one tensor 0, as it does the first of several."""
    if isinstance(value, Tensor):
        yield (0,), value
    elif isinstance(value, (tuple, list)):
        for index, part in enumerate(value):
            if isinstance(part, Tensor):
                yield (index,), part


def _compare(wanted: Tensor, found: Tensor, rtol: float, atol: float) -> str:
    if wanted.dtype != found.dtype:
        return f"FX makes {wanted.dtype}, GE {found.dtype}"
    if wanted.shape != found.shape:
        return f"FX makes {list(wanted.shape)}, GE {list(found.shape)}"
    exact = torch.complex128 if wanted.is_complex() else torch.float64
    both = wanted.to(exact), found.to(exact)
    if torch.allclose(*both, rtol=rtol, atol=atol, equal_nan=True):
        return ""
    apart = (both[0] - both[1]).abs().nan_to_num(nan=float("inf"))
    return f"by up to {float(apart.max()):.3g}, in {int((apart > atol).sum())} of {apart.numel()} elements"
