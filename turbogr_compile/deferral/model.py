"""A model's graph, recorded when it is called.

`deferred` takes the place of the ordinary compilation of one Dynamo graph, where the graph may wait.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..capture.dynamo import CannotCapture, capture
from ..check.stand_ins import may_act, reaches_others
from ..check.validate import draws
from ..pipeline.remarks import warn
from ..show.console import quiet, say_once
from . import liveness
from .flush import READ_RAW, apart, realize, realize_at_call
from .record import LOCK, WAITING, Kept, Meta, Modes, Node, Source, Value, above
from .step import Compiler, Programs
from .tensor import Deferred, kept_of, line_of_user, pending, placed_of, real_of, tensor_for

T = torch.Tensor
_serial = itertools.count()
GRAPHS: weakref.WeakSet[ModelGraph] = weakref.WeakSet()  # Dynamo's code owns them
KEEPS_FOR = 16  # calls whose rows are kept after somebody has read rows late
MISSES = 3  # reads in a row that kept rows were not enough for
BUDGET = 1 << 32  # bytes of parameters whose old values may be kept for a late reader
_NO_GRAD = (
    "calls under no_grad are not deferred; options={'deferral': 'always'} defers them too, which pays where only few "
    "rows of an output are read"
)


class MayNotWait(Exception):
    """Why a graph is computed at its call."""


def deferred(
    module: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, *, always: bool = False, keeps: bool = False
) -> Callable[..., Any]:
    """A function for Dynamo that records calls of the graph, or the compiled graph where it may not wait.

    `always`: without gradients, too. `keeps`: the target may leave rows for late readers.
    """
    teach_dynamo()
    rows = _rows(module)
    goes_on = any(type(x) is Deferred for x in inputs)  # after a graph break, or a loss compiled apart
    # A step that returns its loss has no rows to leave out; without gradients, what is returned is what was wanted.
    if goes_on or any(always or v.requires_grad for v in rows):
        try:
            return ModelGraph(module, inputs, compiler, always, keeps)
        except (MayNotWait, CannotCapture) as refusal:
            if not quiet():
                warn(f"this graph is computed at its call, not deferred: {_first_line(refusal)}")
    run, evaluates = compiler(module, inputs), bool(rows) and not torch.is_grad_enabled()

    def at_once(*given: Any) -> Any:
        if evaluates and not torch.is_inference_mode_enabled():
            say_once(_NO_GRAD)
        return run(*[real_of(x) for x in given])

    return at_once


def _rows(module: fx.GraphModule) -> list[T]:
    """Outputs that have rows."""
    (output,) = module.graph.find_nodes(op="output")
    values = [n.meta.get("example_value") for n in output.args[0] if isinstance(n, fx.Node)]
    return [v for v in values if isinstance(v, T) and v.dim() >= 2]


def teach_dynamo() -> None:
    room = __name__.rpartition(".")[0]
    _torch.teach_dynamo(Deferred, room, stand_in, _is_ours, real_of)
    _torch.teach_autograd(Deferred, real_of, placed_of)


def _is_ours(compiled: Any) -> bool:
    return isinstance(compiled, ModelGraph)


def stand_in(x: Deferred) -> torch.Tensor:
    """A plain tensor of the same type, for whoever only describes it."""
    if x.value.real is not None:
        return x.value.real
    meta = x.value.meta
    with torch.inference_mode(False):
        found = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    return found.requires_grad_(meta.requires_grad)


class ModelGraph:
    """One graph of Dynamo's. Nothing is compiled before results of it are needed."""

    def __init__(
        self, module: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, always: bool, keeps: bool
    ) -> None:
        self.serial = next(_serial)
        self.always, self.keeps = always, keeps
        self.keeping = self.misses = 0  # calls whose rows are still to be kept; reads that they were not enough for
        self.random, self.acts = _checked(module, inputs)
        self.names = [n.name for n in module.graph.find_nodes(op="placeholder")]
        self.symbols, self.size_inputs = _symbols(module)
        self.outputs = _outputs(module)
        self.light = _light(module)  # outputs that no parameter has a part in
        shapes = [what[0] for kind, what in self.outputs if kind == "tensor"]
        self.fixed_sizes = {size for shape in shapes for size in shape if isinstance(size, int)}
        self.module = _bare_copy(module)
        self.programs = Programs(compiler)
        self.kinds: dict[Any, _Kind] = {}
        self.calls = 0
        self.read_raw = 0  # calls in a row whose outputs were read as they are
        self.trained = False  # something with gradients was computed from an output
        self.recent: list[weakref.ref[Node]] = []
        self.large = False
        self.never = ""  # why no call of it waits any more
        self.said: set[str] = set()
        GRAPHS.add(self)

    @property
    def once(self) -> bool:
        """A call runs once: dropout would draw again, an op of the user's may count its calls, or old parameters are
        too large to keep."""
        return self.random or self.acts or self.large

    def __call__(self, *inputs: Any) -> Any:
        with LOCK, apart():
            self._age()
            why = self._not_now(inputs)
            modes = Modes()
            if not self.calls:
                self.large = sum(x.nbytes for x in inputs if isinstance(x, torch.nn.Parameter)) > BUDGET
            try:
                _torch.set_grad_enabled(False)  # at less cost than `no_grad`
                kept = Kept(inputs, {}, kept_of, waits=not why)
            finally:
                _torch.set_grad_enabled(modes.grad)
            if not why and any([not s.shared and isinstance(s.tensor, torch.nn.Parameter) for s in kept.sources]):
                why = self.never = self._say("parameters in memory that others write to are not kept for a late reader")
            node = Node(None, kept, modes, line_of_user(after_dynamo=True), self)
            node.sizes = tuple([_size(inputs[i], d) for i, d in self.symbols.values()])
            node.kind = self._kind(node)
            self.calls += 1
            node.number = self.calls
            if self.random:
                node.seed = int(torch.empty((), dtype=torch.int64).random_())
            results, values = self._results(node, deferring=not why)
            if why:
                realize_at_call(node, values)
                return [x.real if isinstance(x, Value) else x for x in results]
            self.recent.append(weakref.ref(node))
            return results

    def _not_now(self, inputs: Sequence[Any]) -> str:
        """Why this call is computed at once, or ''."""
        if self.never:
            return self.never
        if torch.is_inference_mode_enabled():
            return self._say("calls in inference mode are not deferred")
        if not torch.is_grad_enabled() and not self.always and not any(pending(x) for x in inputs):
            return _NO_GRAD
        if self.read_raw >= READ_RAW:
            return self._say("outputs are read or written as they are, call after call: no longer deferred")
        if _torch.saved_tensors_are_hooked():
            return self._say("calls inside of saved-tensor hooks (activation checkpointing) are not deferred")
        if _torch.transforms_active():
            return self._say("calls inside of torch.func transforms are not deferred")
        if _torch.dispatch_modes():
            return self._say("calls under a foreign dispatch mode are not deferred")
        return ""

    def _say(self, text: str) -> str:
        if text not in self.said and not quiet():
            self.said.add(text)
            warn(text)
        return text

    def _results(self, node: Node, deferring: bool) -> tuple[list[Any], list[Value]]:
        results: list[Any] = []
        for i, (kind, what) in enumerate(self.outputs):
            if kind == "constant":
                results.append(what)
            elif kind == "size":
                results.append(_at(what, dict(zip(self.symbols, node.sizes, strict=True))))
            elif kind == "again":
                results.append(results[what])
            else:
                value = Value(node, i, node.kind.metas[i])
                node.values.append(value)
                results.append(tensor_for(value) if deferring else value)
        return results, list(node.values)

    def _kind(self, node: Node) -> _Kind:
        waiting = tuple([i for i, a in enumerate(node.args) if type(a) is Value]) if node.inputs else ()
        key = (node.sizes, node.modes.key, waiting)
        kind = self.kinds.get(key)
        if kind is None:
            if len(self.kinds) > 4096:
                self.kinds.clear()
            sizes = dict(zip(self.symbols, node.sizes, strict=True))
            kind = self.kinds[key] = _Kind(self.outputs, sizes, node.modes.grad)
        return kind

    def settled(self, node: Node) -> None:
        """Outputs of another model that the call was given are there now: it reads them as they are."""
        node.args = tuple([Source(a.real) if type(a) is Value and a.real is not None else a for a in node.args])
        node.inputs = [a for a in node.args if type(a) is Value]
        node.sources = [a for a in node.args if type(a) is Source]
        node.kind = self._kind(node)

    def read(self, node: Node, raw: bool) -> None:
        """A call is computed; `raw` where an output is wanted as it is."""
        if raw and not (node.ran and self.trained):
            self.read_raw += 1
        elif not node.ran:
            self.read_raw = 0

    def read_late(self) -> None:
        """Rows were read after a step that had computed most of them: the next steps keep theirs."""
        if self.keeps and not self.once:
            self.keeping = KEEPS_FOR

    def read_kept(self, enough: bool) -> None:
        self.misses = 0 if enough else self.misses + 1
        if self.misses == MISSES:
            self.keeps, self.keeping = False, 0

    def written(self) -> None:
        """An output was written to: it is needed as it is, and will be again."""
        self.read_raw = READ_RAW

    def _age(self) -> None:
        """Records do not grow: what was recorded before the last call, and is still waited for, is computed now."""
        self.recent = [r for r in self.recent if r() is not None]
        if not self.recent:
            return
        old = []
        for v in list(WAITING.values()):
            calls = [n.number for n in above([v]) if n.model is self]
            if calls and (not v.meta.shape or v.node.model is None or min(calls) < self.calls):
                old.append(v)
        numbers = [v for v in old if not v.meta.shape]
        others = liveness.may_be_read([v for v in old if v.meta.shape])
        if numbers or others:
            realize([*numbers, *others])


class _Kind:
    """Calls of a graph that differ only in who their tensors are."""

    __slots__ = ("metas",)

    def __init__(self, outputs: Sequence[tuple[str, Any]], sizes: dict[Any, int], grad: bool) -> None:
        self.metas: dict[int, Meta] = {}
        for i, (kind, what) in enumerate(outputs):
            if kind == "tensor":
                shape, stride, dtype, device, requires_grad = what
                shape, stride = ([_at(s, sizes) for s in which] for which in (shape, stride))
                self.metas[i] = Meta(shape, stride, dtype, device, requires_grad and grad)


def _size(x: Any, dim: int | None) -> int:
    if dim is None:
        return x
    return x.value.meta.shape[dim] if type(x) is Deferred else x.shape[dim]


# --- reading Dynamo's graph -----------------------------------------------------------------------------


def _checked(module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[bool, bool]:
    """Raises where a graph may not wait; else says whether it draws random numbers, and whether it may do more than
    compute."""
    for x in inputs:
        if isinstance(x, T) and type(x) not in (T, torch.nn.Parameter, Deferred, _torch.FakeTensor):
            raise MayNotWait(f"an input is a {type(x).__name__}")
    captured = capture(module, inputs).module
    if any(n.target is torch.ops.aten.copy_.default for n in captured.graph.nodes):
        raise MayNotWait("it writes to its inputs")
    # A rank that reads nothing would never run it, and one that reads late would run it alone: others would wait.
    if any(reaches_others(n) for n in captured.graph.nodes):
        raise MayNotWait("it exchanges data with other ranks, which must happen where all ranks are")
    given = {_torch.StorageWeakRef(v.untyped_storage()) for n in module.graph.find_nodes(op="placeholder")
             if isinstance(v := n.meta.get("example_value"), T)}  # fmt: skip
    returned: set[Any] = set()
    (output,) = module.graph.find_nodes(op="output")
    for n in dict.fromkeys(n for n in output.args[0] if isinstance(n, fx.Node)):
        value = n.meta.get("example_value")
        if isinstance(value, T):
            memory = _torch.StorageWeakRef(value.untyped_storage())
            if memory in given:
                raise MayNotWait("it returns an input, or a view of one")
            if memory in returned:
                raise MayNotWait("two of its outputs share memory")
            returned.add(memory)
    calls = [n for n in captured.graph.nodes if n.op == "call_function"]
    return any(map(draws, calls)), any(map(may_act, calls))


def _symbols(module: fx.GraphModule) -> tuple[dict[Any, tuple[int, int | None]], dict[int, tuple[int, int]]]:
    """Symbol -> input and dim that have it; and for inputs that are sizes of other inputs, which."""
    found: dict[Any, tuple[int, int | None]] = {}
    numbers: dict[int, Any] = {}
    for i, node in enumerate(module.graph.find_nodes(op="placeholder")):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt):
            numbers[i] = value.node.expr
        elif isinstance(value, T):
            for d, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    found.setdefault(size.node.expr, (i, d))
    sizes = {i: found[e] for i, e in numbers.items() if e in found}
    for i, e in numbers.items():
        found.setdefault(e, (i, None))
    return found, sizes  # type: ignore[return-value]


def _outputs(module: fx.GraphModule) -> list[tuple[str, Any]]:
    (output,) = module.graph.find_nodes(op="output")
    found: list[tuple[str, Any]] = []
    seen: dict[fx.Node, int] = {}
    for i, node in enumerate(output.args[0]):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if not isinstance(node, fx.Node):
            found.append(("constant", node))
        elif node in seen:
            found.append(("again", seen[node]))
        elif isinstance(value, T):
            if any(_torch.free_unbacked(s) for s in (*value.shape, *value.stride()) if isinstance(s, torch.SymInt)):
                raise MayNotWait("the size of an output depends on data")
            shape, stride = [_formula(s) for s in value.shape], [_formula(s) for s in value.stride()]
            found.append(("tensor", (shape, stride, value.dtype, value.device, value.requires_grad)))
            seen[node] = i
        elif isinstance(value, (torch.SymInt, int)) and not _torch.free_unbacked(value):
            found.append(("size", _formula(value)))
        else:
            raise MayNotWait(f"an output is a {type(value).__name__}")
    return found


def _light(module: fx.GraphModule) -> set[int]:
    trained: set[fx.Node] = set()
    for node in module.graph.nodes:
        value = node.meta.get("example_value")
        if node.op == "placeholder":
            if isinstance(value, T) and value.requires_grad:
                trained.add(node)
        elif node.op == "get_attr" or any(n in trained for n in node.all_input_nodes):
            trained.add(node)
    (output,) = module.graph.find_nodes(op="output")
    return {i for i, n in enumerate(output.args[0]) if isinstance(n, fx.Node) and n not in trained}


def _formula(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def _at(size: Any, sizes: dict[Any, int]) -> int:
    if isinstance(size, int):
        return size
    return sizes[size] if size in sizes else int(size.subs(sizes))


def _bare_copy(module: fx.GraphModule) -> fx.GraphModule:
    """The graph without values: a batch must not live as long as it."""
    graph = _torch.copy_graph(module.graph)
    for node in graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k in ("stack_trace", "nn_module_stack", "source_fn_stack")}
    return fx.GraphModule(module, graph)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
