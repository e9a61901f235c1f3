"""turbogr without Dynamo: the backend on a graph of one node, so that a case takes a tenth of a second.

The program runs under the compiler's own tracer, as a Dynamo graph does, and the rewritten graph runs under ordinary
autograd (target "eager"): no code is generated. Every difference found this way is confirmed by
`turbogr_compile.compile`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    free_unbacked_symbols,
)
from torch.overrides import TorchFunctionMode

import turbogr_compile
from turbogr_compile.backend import Compilation
from turbogr_compile.capture import recurrence

NARROW = (torch.float16, torch.bfloat16, torch.float32)
_MOVES = ("clone", "view", "expand", "slice", "select", "unsqueeze", "permute", "transpose")


class Watch(turbogr_compile.Instrument):
    """What was said about a graph, and the narrowest number it computes with."""

    def __init__(self) -> None:
        self.remarks: list[turbogr_compile.Remark] = []
        self.failed_passes: list[str] = []
        self.computes_in: set[torch.dtype] = set()
        self.looks_up_packed: bool | None = None  # every table by packed rows; None without a table

    def start(self, run: turbogr_compile.GraphRun) -> None:
        for node in run.graph.nodes:
            value = node.meta.get("val")
            if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype not in NARROW:
                continue
            name = getattr(getattr(node.target, "_schema", None), "name", "").rpartition("::")[2]
            if name not in _MOVES:  # a packed graph may leave out a cast, as it may leave out other roundings
                self.computes_in.add(value.dtype)

    def failed(self, run: turbogr_compile.GraphRun, step: Any, error: Exception) -> None:
        self.failed_passes.append(f"{step.pass_.name}: {type(error).__name__}: {error}")

    def finish(self, run: turbogr_compile.GraphRun) -> None:
        self.remarks += run.remarks
        found = [node.meta["val"] for node in run.graph.nodes if node.target is torch.ops.aten.embedding.default]
        self.looks_up_packed = all(free_unbacked_symbols(value) for value in found) if found else None


class Fast:
    """A function of tensors, compiled. `fits` checks sizes as Dynamo's guards would; its other guards nobody checks."""

    def __init__(
        self, fn: Callable[..., Any], names: Sequence[str], values: Sequence[torch.Tensor], *,
        open_dims: dict[str, tuple[int, ...]] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.watch = Watch()
        read = turbogr_compile.Options.read(
            {"target": "eager", "verify": "fast", "worth": "always", "instruments": (self.watch,), **options}
        )
        self._compilation = Compilation(read, "fuzz")
        module, fakes = one_node(fn, names, values, open_dims or {})
        self._open = {
            (i, d): s.node.expr
            for i, x in enumerate(fakes) for d, s in enumerate(x.shape) if isinstance(s, torch.SymInt)
        }  # fmt: skip
        self._guards = fakes[0].fake_mode.shape_env.guards if fakes else []
        self.run = self._compilation.compile(module, fakes)

    def fits(self, values: Sequence[torch.Tensor]) -> bool:
        """Would Dynamo call this graph with tensors of these sizes? Tracing may have made an open size a number."""
        sizes = {symbol: values[i].shape[d] for (i, d), symbol in self._open.items()}
        alike = all(values[i].shape[d] == sizes[symbol] for (i, d), symbol in self._open.items())
        return alike and all(bool(guard.expr.subs(sizes)) for guard in self._guards)

    @property
    def stats(self) -> turbogr_compile.RunStatistics:
        return self._compilation.stats


def one_node(
    fn: Callable[..., Any], names: Sequence[str], values: Sequence[torch.Tensor], open_dims: dict[str, tuple[int, ...]]
) -> tuple[fx.GraphModule, list[Any]]:
    """What Dynamo would hand over, had it not looked inside: placeholders with their examples, one call."""
    mode, graph = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), fx.Graph()
    fakes = []
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        node = graph.placeholder(f"{name.lower()}_{number}")  # fx writes W and w over each other
        fake = _fake(mode, name, value, open_dims.get(name, ()))
        node.meta["example_value"], node.meta["grapharg"] = fake, SimpleNamespace(example=value)
        fakes.append(fake)
    called = graph.call_function(_as_seen(fn), tuple(graph.find_nodes(op="placeholder")))
    graph.output(called)
    return fx.GraphModule({}, graph), fakes


class _Layers(TorchFunctionMode):
    """Recurrent layers become what capture makes of them where it sees them, in a graph of many nodes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in recurrence.KINDS and recurrence.why_not(func, args, kwargs or {}) is None:
            return recurrence.layers(func, *args)
        return func(*args, **(kwargs or {}))


def _as_seen(fn: Callable[..., Any]) -> Callable[..., Any]:
    def seen(*values: torch.Tensor) -> Any:
        with _Layers():
            return fn(*values)

    return seen


def _fake(mode: FakeTensorMode, name: str, value: torch.Tensor, open_dims: tuple[int, ...]) -> Any:
    if not open_dims:
        return mode.from_tensor(value, static_shapes=True)
    dims = [DimDynamic.DUCK if d in open_dims else DimDynamic.STATIC for d in range(value.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(name))
