"""From Dynamo's graph to functional ATen before autograd, in normal form.

The captured module takes the place of Dynamo's: same inputs, same outputs, trainable in the same way.

* Inputs the graph writes to (running statistics, caches, counters) are written by `aten.copy_` nodes at the end.
* `no_grad` becomes `aten.detach`, autocast becomes explicit casts. Where autocast is on around the whole graph, the
  graph turns it off for itself (one `_enter_autocast` first, one `_exit_autocast` last), so that no cast depends on who
  runs it.
* Activation checkpointing is inlined; its nodes carry the tags by which AOTAutograd's partitioner recomputes them.
* A parameter that is written under `no_grad` before it is used is written before the graph (`early_writes`).
* `torch.autograd.Function` becomes an op (`functions`).
* Everything else that holds a subgraph, or whose gradient functional code cannot express, is refused with the user's
  line: Dynamo's own graph then runs unmodified.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from .._torch import (
    ConstantSource,
    FakeTensor,
    FunctionalTensor,
    HigherOrderOperator,
    PropagateUnbackedSymInts,
    StorageWeakRef,
    TracingContext,
    _enter_inference_mode,
    _exit_inference_mode,
    detect_fake_mode,
    enter_autocast,
    exit_autocast,
    get_data_attr,
    get_proxy_mode,
    is_traceable_wrapper_subclass,
    set_grad_enabled,
    to_fun,
    track_tensor_tree,
)
from ..errors import TurbogrError
from ..graph.phases import Phase
from ..graph.provenance import UserLine, line_of, user_line
from . import recurrence
from .early_writes import EarlyWrites, hidden_writes
from .functions import CannotMake, Function, function_of, is_function
from .normal import memory_of
from .trace import (
    UNCOUNTED,
    Traced,
    Write,
    autocast_devices,
    finish,
    functional_trace,
    is_size_arithmetic,
    remove_modes,
    tracked_nodes,
)

aten = torch.ops.aten
VERSIONED = {"mutates-parameter", "write-hidden-from-autograd"}  # refusals about what autograd may have saved
# Dynamo spells the way to an input: l(ocal), self, and the kind of each attribute.
_FILLER = re.compile(r"_(?:(?:l|self|modules|parameters|buffers)_)+")


@dataclass(frozen=True)
class Captured:
    """A graph ready for passes, and what writes parameters before each of its calls."""

    module: fx.GraphModule
    early: fx.GraphModule | None = None

    def after_writes(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The whole step, given what runs the graph."""
        if self.early is None:
            return run
        write = self.early.forward

        def step(*inputs: Any) -> Any:
            with torch.no_grad():
                write(*inputs)
            return run(*inputs)

        return step


class CannotCapture(TurbogrError):
    """This graph runs as Dynamo made it. `id` is a stable slug; `line` is the user's, where there is one."""

    def __init__(self, id: str, reason: str, *, line: UserLine | None = None, hint: str = "") -> None:
        where = f"{line.where}: " if line else ""
        super().__init__(f"{where}{reason} [{id}]" + (f"\n    → {hint}" if hint else ""))
        self.id, self.reason, self.line, self.hint = id, reason, line, hint


def capture(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Captured:
    """Capture one Dynamo graph; `gm` is left as it is. Raises CannotCapture, nothing else."""
    run = _Run(gm)
    try:
        inputs = _fake_inputs(gm, example_inputs)
        run.make_functions()
        traced = functional_trace(run, inputs, composites=True)
        return _build(gm, inputs, traced, run.uncounted)
    except Exception as error:
        forget_unbacked(gm)
        if isinstance(error, CannotCapture):
            raise
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = line_of(run.current) if run.current is not None else None
        raise CannotCapture("not-traceable", f"tracing failed: {said}", line=line) from error


def _fake_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Fresh fake inputs: Dynamo's own may have been changed by the code it traced."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    dynamo = TracingContext.try_get()
    mode = dynamo.fake_mode if dynamo is not None else None
    inputs = []
    for node, example in zip(placeholders, example_inputs, strict=True):
        value = node.meta.get("example_value", example)
        if isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
            kind = type(value).__name__
            raise CannotCapture("tensor-subclass", f"input {node.name} is a {kind}", hint="pass plain tensors")
        if isinstance(example, torch.Tensor) and not isinstance(example, FakeTensor) and mode is not None:
            assert dynamo is not None
            symbols = dynamo.tensor_to_context.get(example)
            source = symbols.tensor_source if symbols is not None else None
            value = mode.from_tensor(example, symbolic_context=symbols, source=source, trace=False)
        inputs.append(value)
    return inputs


def forget_unbacked(gm: fx.GraphModule) -> None:
    """Drop symbols that the abandoned trace made and nobody will bind."""
    mode = detect_fake_mode([n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")])
    if mode is not None and mode.shape_env is not None:
        mode.shape_env.pending_fresh_unbacked_symbols.clear()


# --- running Dynamo's graph under the tracer --------------------------------------------------------

_GRAD_SWITCHES = {set_grad_enabled, _enter_inference_mode, _exit_inference_mode}
_LEGACY = {
    torch.Tensor: None, torch.FloatTensor: torch.float32, torch.DoubleTensor: torch.float64,
    torch.HalfTensor: torch.float16, torch.BFloat16Tensor: torch.bfloat16, torch.ByteTensor: torch.uint8,
    torch.CharTensor: torch.int8, torch.ShortTensor: torch.int16, torch.IntTensor: torch.int32,
    torch.LongTensor: torch.int64, torch.BoolTensor: torch.bool,
}  # fmt: skip
_TRANSFORMS = ("torch._functorch", "torch._C._functorch", "torch._C._autograd")
_SUBGRAPH_HINTS = {
    "cond": "replace the branch by torch.where where both sides may run",
    "flex_attention": "write the attention with matmul or scaled_dot_product_attention; turbogr fuses those",
}


class _Run:
    """Calls Dynamo's graph; remembers the node it is at and leaves no mode switched on."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self.current: fx.Node | None = None
        self.checkpoints = itertools.count()
        self.autocasts: list[Any] = []
        self.interpreters: list[_Interpreter] = []
        self.functions: dict[fx.Node, Function] = {}
        self.uncounted: set[StorageWeakRef] = set()  # of which `.data` was taken

    def make_functions(self) -> None:
        """Before the trace: it cannot trace other graphs on its way."""
        owners = [m for m in self.gm.modules() if isinstance(m, fx.GraphModule)]
        for owner, node in [(m, n) for m in owners for n in m.graph.nodes if is_function(n)]:
            self.current = node
            try:
                self.functions[node] = function_of(owner, node)
            except CannotMake as obstacle:
                what = f"a torch.autograd.Function cannot be an op: {obstacle}"
                hint = "register it with torch.library.custom_op instead"
                raise CannotCapture("autograd-function", what, line=line_of(node), hint=hint) from obstacle
        self.current = None

    def settle(self) -> None:
        """Views of what was written are rebuilt when first read; do that in the grad mode of the write."""
        for interpreter in self.interpreters:
            for value in pytree.tree_leaves(list(interpreter.env.values())):
                if isinstance(value, FunctionalTensor):
                    torch._sync(value)

    def __call__(self, *args: Any) -> Any:
        try:
            with fx_traceback.preserve_node_meta():
                return _Interpreter(self.gm, self).run(*args)
        finally:
            for mode in reversed(self.autocasts):
                mode.__exit__(None, None, None)


class _Interpreter(PropagateUnbackedSymInts):
    def __init__(self, gm: fx.GraphModule, run: _Run, tags: dict[str, Any] | None = None) -> None:
        super().__init__(gm)
        self.run_state, self.tags = run, tags or {}
        self.extra_traceback = False
        run.interpreters.append(self)

    def run_node(self, n: fx.Node) -> Any:
        if n.target in (torch.masked_select, "masked_select"):
            # What takes its place counts rows, not elements: Dynamo's symbol has no namesake.
            return fx.Interpreter.run_node(self, n)
        return super().run_node(n)

    @contextmanager
    def _set_current_node(self, node: fx.Node) -> Iterator[None]:
        self.run_state.current = node
        with super()._set_current_node(node):
            fx_traceback.get_current_meta().update(self.tags)
            yield

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, HigherOrderOperator):
            return self._subgraph(target, args, kwargs)
        if target is get_data_attr:
            data = args[0].detach()
            setattr(data, UNCOUNTED, True)
            if isinstance(data, FunctionalTensor):
                memory = torch._from_functional_tensor(data.elem).untyped_storage()
                self.run_state.uncounted.add(StorageWeakRef(memory))
            return data
        if (getattr(target, "__module__", None) or "").startswith(_TRANSFORMS):
            # Refused before it runs: it switches a mode that an abandoned trace would leave on.
            what = f"{target.__name__} belongs to a function transform (vmap, grad, saved-tensor hooks)"
            raise self._refuse("function-transform", what)
        if target in _LEGACY and len(args) == 1 and isinstance(args[0], torch.Tensor):
            # The constructor copies the data out, which a tracer cannot see.
            return args[0].to(_LEGACY[target] or torch.get_default_dtype(), copy=True)
        if target in _LEGACY and len(args) == 1 and isinstance(args[0], (list, tuple)) and _numbers(args[0]):
            return torch.tensor(args[0], dtype=_LEGACY[target] or torch.get_default_dtype())
        if target in recurrence.KINDS:
            why = recurrence.why_not(target, args, kwargs)
            if why is not None:
                raise self._refuse("recurrent-layer", why, "mask or gather rows behind a layer over the padded batch")
            return recurrence.layers(target, *args)
        if target in _GRAD_SWITCHES:
            self.run_state.settle()
        if target is enter_autocast:
            mode = torch.autocast(*args)
            mode.__enter__()
            self.run_state.autocasts.append(mode)
            return mode
        if target is exit_autocast:
            self.run_state.autocasts.remove(args[0])
            return args[0].__exit__(None, None, None)
        if target is _enter_inference_mode:
            before = torch.is_grad_enabled()
            set_grad_enabled(not args[0])
            return before
        if target is _exit_inference_mode:
            return set_grad_enabled(args[0])
        return super().call_function(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        raise self._refuse("submodule", f"the graph calls the module {target}, which Dynamo did not look into")

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        proxies, mode = get_proxy_mode(), detect_fake_mode()
        assert proxies is not None and mode is not None
        tracer: Any = proxies.tracer
        name = target.replace(".", "_")
        setattr(tracer.root, name, value)
        fake = mode.from_tensor(value, static_shapes=True)
        track_tensor_tree(fake, tracer.create_proxy("get_attr", name, (), {}), constant=None, tracer=tracer)
        return to_fun(fake)

    def _subgraph(self, target: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        name = target.name()
        current = self.run_state.current
        if current is not None and current in self.run_state.functions:
            return self.run_state.functions[current](*args[2:])
        if name != "tag_activation_checkpoint":
            raise self._refuse(
                "higher-order-op", f"{name} holds a subgraph, which passes cannot see", _SUBGRAPH_HINTS.get(name, "")
            )
        body = args[0]
        if "_checkpoint_context_fn" in body.meta:
            raise self._refuse(
                "selective-checkpoint", "selective activation checkpointing (context_fn) is not captured",
                "checkpoint the whole block, or leave the choice to the partitioner",
            )  # fmt: skip
        tags = {"recompute": CheckpointPolicy.PREFER_RECOMPUTE, "ac_graph_id": next(self.run_state.checkpoints)}
        return _Interpreter(body, self.run_state, tags).run(*args[1:])

    def _refuse(self, id: str, reason: str, hint: str = "") -> CannotCapture:
        node = self.run_state.current
        return CannotCapture(id, reason, line=line_of(node) if node is not None else None, hint=hint)


def _numbers(data: Any) -> bool:
    """Nested lists of plain numbers."""
    return all(map(_numbers, data)) if isinstance(data, (list, tuple)) else isinstance(data, (bool, int, float))


# --- the captured module ----------------------------------------------------------------------------


def _build(gm: fx.GraphModule, inputs: Sequence[Any], traced: Traced, uncounted: set[StorageWeakRef]) -> Captured:
    grad_enabled = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    _check_inputs(traced, inputs, gm)
    tracked = tracked_nodes(traced, grad_enabled)
    hidden = hidden_writes(traced, tracked)
    early = EarlyWrites(traced, hidden, uncounted)
    _store_inputs(traced)
    needs_grad = bool(traced.leaves) and grad_enabled
    lost = remove_modes(traced, grad_enabled)
    if lost:
        raise CannotCapture(
            "grad-enabled-inside", "gradients are switched on inside a graph that runs with gradients off",
            line=line_of(lost[0]), hint="run the model with gradients on, or drop enable_grad",
        )  # fmt: skip
    traced.module.graph.eliminate_dead_code()
    _check_writes(hidden, early)
    _check_vocabulary(traced.module)
    _adopt(gm, traced.module)
    finish(traced.module, Phase.PRE_GRAD)
    if needs_grad:
        _save_old_values(traced)
    for module in (traced.module, early.module):
        if module is not None:
            _disable_ambient_autocast(module)
    return Captured(traced.module, early.module)


def _check_inputs(traced: Traced, inputs: Sequence[Any], gm: fx.GraphModule) -> None:
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    line = user_line(traced.writes[-1].stack_trace) if traced.writes else None
    if traced.reshaped:
        what = names[traced.reshaped[0]]
        raise CannotCapture("reshapes-input", f"input {what} gets a new shape or storage in place", line=line)
    if traced.viewed:
        what = names[traced.viewed[0]]
        raise CannotCapture(
            "returns-view-of-written-input", f"the graph writes to input {what} and returns a view of it",
            line=line, hint="return the whole tensor, or a copy of the part",
        )  # fmt: skip
    for i in traced.written:
        for j, other in enumerate(inputs):
            if i != j and isinstance(other, torch.Tensor) and _share_memory(inputs[i], other):
                raise CannotCapture(
                    "aliased-inputs", f"the graph writes to input {names[i]}, which shares memory with {names[j]}",
                    line=line, hint="pass a clone of one of them",
                )  # fmt: skip


def _share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage())


def _check_writes(hidden: list[tuple[Write, fx.Node]], early: EarlyWrites) -> None:
    """Refuse writes that autograd does not see into tensors it tracks, unless they can be made before the step.

    Eager keeps the gradient of such a tensor as if nothing had been written. A functional graph has a new value, and
    either the gradient of that value or none.
    """
    for write, owner in hidden:
        if owner in early.parameters and early.settled():
            continue
        line = user_line(write.stack_trace)
        if owner.op == "placeholder":
            raise CannotCapture(
                "mutates-parameter",
                "a parameter, or another input that requires grad, is written to under no_grad after it was used",
                line=line, hint="write to it before its first use, or outside of the compiled function",
            )  # fmt: skip
        raise CannotCapture(
            "write-hidden-from-autograd", "a value that has a gradient is written to outside of autograd",
            line=line, hint="compute a new value instead, or detach before writing to a clone",
        )  # fmt: skip


def _store_inputs(traced: Traced) -> None:
    graph = traced.module.graph
    placeholders, (output,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
    for i, value in traced.written.items():
        with graph.inserting_before(output):
            node = graph.call_function(aten.copy_.default, (placeholders[i], value))
        node.meta = {k: v for k, v in value.meta.items() if k in ("stack_trace", "nn_module_stack")}
        node.meta["val"] = placeholders[i].meta["val"]


def _save_old_values(traced: Traced) -> None:
    """Where autograd may keep the old value of a written input for its backward, let it keep a copy.

    Eager does the same inside of its in-place ops.
    """
    graph = traced.module.graph
    kept = {memory for n in tracked_nodes(traced, True) for i in n.all_input_nodes for memory in memory_of(i)}
    for store in graph.find_nodes(op="call_function", target=aten.copy_.default):
        written = store.args[0]
        if kept.isdisjoint(memory_of(written)):
            continue
        readers = [n for n in written.users if n.target is not aten.copy_.default and n.op != "output"]
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            copy = graph.call_function(aten.clone.default, (written,))
        copy.meta = {"val": written.meta["val"], "stack_trace": store.meta.get("stack_trace")}
        for reader in readers:
            reader.replace_input_with(written, copy)
    traced.module.recompile()


def _check_vocabulary(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if node.target is aten.as_strided_scatter.default:
            raise CannotCapture(
                "strided-write", "a tensor is written to through as_strided; torch has a wrong gradient for that",
                line=line_of(node), hint="write through slices or indices",
            )  # fmt: skip
        if node.op == "get_attr":
            value = getattr(module, node.target, None)
            if isinstance(value, FakeTensor) or not isinstance(value, torch.Tensor):
                raise CannotCapture(
                    "fake-constant", "a tensor is built here in a way the tracer cannot follow", line=_line_near(node),
                    hint="build it with torch ops from the inputs, e.g. x.to(torch.int64)",
                )  # fmt: skip
        elif node.op == "call_function":
            if isinstance(node.target, torch._ops.OpOverload) or is_size_arithmetic(node):
                continue
            name = getattr(node.target, "__name__", None) or str(node.target)
            raise CannotCapture("unknown-node", f"{name} is no tensor op that passes understand", line=line_of(node))


def _line_near(node: fx.Node) -> UserLine | None:
    return line_of(node) or next((line for user in node.users if (line := line_of(user)) is not None), None)


def readable_name(name: str) -> str:
    """Dynamo's name for an input as the user would say it: `l_self_modules_norm_parameters_weight_` is norm_weight."""
    words = _FILLER.sub("_", f"_{name}_").strip("_")
    return words if words.isidentifier() else name


def _adopt(gm: fx.GraphModule, module: fx.GraphModule) -> None:
    """Names, metadata and sources by which AOTAutograd recognises a graph of Dynamo's; a user line for every node."""
    module.meta.update(gm.meta)
    sources = dict(getattr(gm, "_param_name_to_source", None) or {})
    if hasattr(gm, "_param_name_to_source"):
        # Every tensor the module holds, also those that only dead code read.
        held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        constants = {n.target for n in module.graph.find_nodes(op="get_attr")} | {name for name, _ in held}
        vars(module)["_param_name_to_source"] = {c: sources.get(c) or ConstantSource(c) for c in constants}
    theirs, ours = gm.graph.find_nodes(op="placeholder"), module.graph.find_nodes(op="placeholder")
    for original, node in zip(theirs, ours, strict=True):
        node._rename(readable_name(original.name))
        node.target = node.name
        if "tensor_dict" in original.meta:  # not the rest: it keeps real inputs alive
            node.meta["tensor_dict"] = original.meta["tensor_dict"]
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    for node in reversed(module.graph.nodes):
        if node.op == "call_function":
            node.meta.setdefault("val", None)  # asserts have no value
        # Views that functionalization rebuilds at the end come without a line: they belong to what they view.
        if node.op == "call_function" and "stack_trace" not in node.meta:
            for other in (*node.all_input_nodes, *node.users):
                if "stack_trace" in other.meta:
                    node.meta["stack_trace"] = other.meta["stack_trace"]
                    break


def _disable_ambient_autocast(module: fx.GraphModule) -> None:
    devices = autocast_devices()
    if not devices:
        return
    graph = module.graph
    first = next(n for n in graph.nodes if n.op != "placeholder")
    (output,) = graph.find_nodes(op="output")
    for device in devices:
        settings = (device, torch.get_autocast_dtype(device), False, torch.is_autocast_cache_enabled())
        with graph.inserting_before(first):
            enter = graph.call_function(enter_autocast, settings)
        with graph.inserting_before(output):
            graph.call_function(exit_autocast, (enter,))
    module.recompile()
