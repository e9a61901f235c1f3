"""The normal form: one spelling per meaning, for captured graphs, rule patterns and replacements alike.

`trace` turns a function of tensors into functional ATen of a phase and `normalize` gives every node its canonical
spelling. What holds afterwards:

* functional: in-place ops are gone, every value is written once;
* no modes: a value computed under `no_grad` and used outside is behind an `aten.detach`, autocast is explicit casts,
  so the meaning of a node does not depend on where it stands;
* PRE_GRAD keeps composites (`linear`, `layer_norm`, `softmax.int`, `matmul`, `dropout`, ...), spells `view` as
  `reshape`, one for several in a row, a swap of two dims as `transpose`, `&` as `bitwise_and`;
* views that change nothing (full slices, expansion or reshape to the same shape) are gone;
* arguments are positional as far as the schema allows, trailing defaults are dropped, dims are non-negative, a number
  that meets a floating-point tensor is a float.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import traceback as fx_traceback
from torch.utils import _pytree as pytree

from ._torch import statically_known_true
from ._torch_capture import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    ShapeEnv,
    StorageWeakRef,
    _should_decompose_because_unsafe_op,
    detect_fake_mode,
    enable_python_dispatcher,
    from_fun,
    get_proxy_mode,
    has_data_mutation,
    has_metadata_mutation,
    make_fx,
    maybe_enable_thunkify,
    to_fun,
)
from .errors import TurbogrError
from .pass_base import Phase

aten = torch.ops.aten


# --- spelling ------------------------------------------------------------------------------------

_RESHAPES = {aten.reshape.default, aten.view.default, aten._unsafe_view.default}
_SPELLED = {
    aten.view.default: aten.reshape.default,  # strides seen in tracing need not be those of the run
    aten._unsafe_view.default: aten.reshape.default,
    aten.lift_fresh_copy.default: aten.clone.default,
    aten.__and__.Tensor: aten.bitwise_and.Tensor, aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Tensor: aten.bitwise_or.Tensor, aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor, aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
}  # fmt: skip
_COPIES = {aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default}
_SAME_IF_SAME_SHAPE = {aten.reshape.default, aten.view.default, aten.expand.default, aten.slice.Tensor}
_DIMS = {"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim"}
_OF_RESULT = {"unsqueeze", "stack", "diag_embed"}  # dims count those of the result, which has one more
_SIZES = {"reshape": "shape", "view": "size", "_unsafe_view": "size", "expand": "size"}  # -1 where a size is meant
_UNSAID = {"pin_memory": False, "layout": torch.strided}  # same as leaving the argument out
_TO_THE_END = torch.iinfo(torch.int64).max


def normalize(graph: fx.Graph, phase: Phase) -> None:
    """Spell every node canonically. Changes no value, keeps the names of nodes it keeps, and is idempotent."""
    returned = _Returned(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)
            continue
        if phase is Phase.PRE_GRAD and not _is_copy(node, phase, returned):
            _skip_reshapes(node, returned)
            node.target = _SPELLED.get(node.target, node.target)
        _spell_arguments(node)
        _spell_transpose(node)
        if _is_copy(node, phase, returned) or _is_identity(node, returned):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


class _Returned:
    """What the caller gets to see: there a copy, or an alias, makes a difference."""

    def __init__(self, graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        self.nodes = set(output.all_input_nodes)
        self.memory = returned_memory(graph)
        stores = graph.find_nodes(op="call_function", target=aten.copy_.default)
        self.written = {memory for n in stores for memory in memory_of(n.args[0])}  # where a copy keeps the old value

    def __contains__(self, node: fx.Node) -> bool:
        return not self.memory.isdisjoint(memory_of(node))


def _is_copy(node: fx.Node, phase: Phase, returned: _Returned) -> bool:
    """Passes its argument on, and nobody can tell."""
    if node.target in _COPIES or (node.target is aten.detach.default and phase is not Phase.PRE_GRAD):
        return node not in returned
    return False


def _is_identity(node: fx.Node, returned: _Returned) -> bool:
    """A view of everything, in the same shape."""
    if node.target not in _SAME_IF_SAME_SHAPE or (node.target is aten.slice.Tensor and len(node.args) > 4):
        return False
    source: Any = node.args[0]
    value, of = _value(node), _value(source)
    if not isinstance(value, torch.Tensor) or not isinstance(of, torch.Tensor) or not _same_shape(value, of):
        return False
    # The caller can tell a view from an input, and from another result.
    return node not in returned or (source.op != "placeholder" and source not in returned.nodes)


def _skip_reshapes(node: fx.Node, returned: _Returned) -> None:
    """Only the last of several reshapes counts. `reshape` itself is recorded as copy and view where it has to copy."""
    if node.target not in _RESHAPES or not isinstance(node.args[0], fx.Node):
        return
    source: Any = node.args[0]
    if node.target is aten._unsafe_view.default and source.target is aten.clone.default:
        source = source.args[0]
    while (source.target in _RESHAPES or source.target is aten.clone.default) and _can_skip(source, node, returned):
        source = source.args[0]
    node.args = (source, *node.args[1:])


def _can_skip(source: fx.Node, node: fx.Node, returned: _Returned) -> bool:
    """May `node`, a reshape of `source`, start from what `source` starts from?"""
    assert isinstance(source.args[0], fx.Node)
    memory = memory_of(source.args[0])
    if node in returned:
        return memory_of(node) == memory  # views of one memory, before and after
    return source.target in _RESHAPES or returned.written.isdisjoint(memory)


def _spell_transpose(node: fx.Node) -> None:
    """Swapping two dims is `transpose`, lower dim first, also where it was written as `permute` or `T`."""
    args: Any = node.args
    if node.target is aten.permute.default:
        moved = [i for i, d in enumerate(args[1]) if i != d]
        if len(moved) == 2:
            node.target, node.args = aten.transpose.int, (args[0], *moved)
    elif node.target is aten.transpose.int:
        node.args = (args[0], *sorted(args[1:]))


def returned_memory(graph: fx.Graph) -> set[StorageWeakRef]:
    (output,) = graph.find_nodes(op="output")
    return {memory for node in output.all_input_nodes for memory in memory_of(node)}


def memory_of(node: fx.Node) -> set[StorageWeakRef]:
    """Identity of the memory behind a node's fake value; views share it."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return {StorageWeakRef(v.untyped_storage()) for v in values if isinstance(v, torch.Tensor)}


def _spell_arguments(node: fx.Node) -> None:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    arguments = target._schema.arguments
    positional = [a for a in arguments if not a.kwarg_only]
    given = dict(zip((a.name for a in positional), node.args, strict=False)) | dict(node.kwargs)
    spell = _Speller(node, given)
    values = {a.name: spell(a, given[a.name]) for a in arguments if a.name in given}
    defaults = {a.name: spell(a, a.default_value) for a in arguments if a.has_default_value()}

    def said(name: str) -> bool:
        if name not in values or (name in defaults and _same(values[name], defaults[name])):
            return False
        return not (name in _UNSAID and _same(values[name], _UNSAID[name]))

    names = [a.name for a in positional]
    while names and not said(names[-1]):
        names.pop()
    args = tuple(values[n] if n in values else defaults[n] for n in names)
    kwargs = {a.name: values[a.name] for a in arguments if a.kwarg_only and said(a.name)}
    if not _same(args, tuple(node.args)) or not _same(kwargs, dict(node.kwargs)):
        node.args, node.kwargs = args, kwargs


class _Speller:
    """Canonical form of one argument of one node."""

    def __init__(self, node: fx.Node, given: Mapping[str, Any]) -> None:
        packet = node.target.overloadpacket.__name__  # type: ignore[union-attr]
        is_aten = node.target.namespace == "aten"  # type: ignore[union-attr]
        first = given.get(node.target._schema.arguments[0].name) if given else None  # type: ignore[union-attr]
        subject = _value(first[0] if isinstance(first, (list, tuple)) and first else first)
        result = node.meta.get("val")
        self.is_slice = node.target is aten.slice.Tensor
        self.rank = subject.ndim + (packet in _OF_RESULT) if is_aten and isinstance(subject, torch.Tensor) else None
        self.sizes = _SIZES.get(packet) if is_aten and isinstance(result, torch.Tensor) else None
        self.shape = result.shape if isinstance(result, torch.Tensor) else ()
        self.floating = (
            isinstance(subject, torch.Tensor) and subject.is_floating_point()
            and isinstance(result, torch.Tensor) and (result.is_floating_point() or result.dtype is torch.bool)
        )  # fmt: skip

    def __call__(self, argument: Any, value: Any) -> Any:
        if self.is_slice and argument.name == "start" and value is None:
            return 0
        if self.is_slice and argument.name == "end" and value == _TO_THE_END:
            return None
        kind = argument.real_type if hasattr(argument, "real_type") else argument.type
        inner = kind.getElementType() if isinstance(kind, torch.OptionalType) else kind
        if isinstance(inner, torch.ListType):
            if type(value) is int:  # one number stands for all
                value = [value] * (argument.N or 1)
            if isinstance(value, (list, tuple)):
                return [self._element(argument, v, i) for i, v in enumerate(value)]
            return value
        if isinstance(inner, (torch.NumberType, torch.TensorType)):
            return self._number(value)
        return self._element(argument, value, 0)

    def _element(self, argument: Any, value: Any, index: int) -> Any:
        if type(value) is not int or value >= 0:
            return value
        if argument.name in _DIMS and self.rank is not None:
            return value + max(self.rank, 1)
        if value == -1 and argument.name == self.sizes and type(self.shape[index]) is int:
            return self.shape[index]
        return value

    def _number(self, value: Any) -> Any:
        if self.floating and type(value) is int and int(float(value)) == value:
            return float(value)
        return value


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def _same(a: Any, b: Any) -> bool:
    """Equal as arguments: 1 and True differ, 1 and 1.0 differ, lists and tuples do not."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return a is b or (type(a) is type(b) and not isinstance(a, fx.Node) and bool(a == b))


# --- tracing -------------------------------------------------------------------------------------


def trace(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    phase: Phase,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """The function as a graph of this phase, in normal form.

    Inputs are fake tensors (symbolic sizes welcome) or real ones; real tensors the function closes over are constants.
    PRE_GRAD keeps composites, exactly as capture does. Later phases see what is below autograd, taken apart by
    `decompositions`.
    """
    inputs = _faked(inputs)
    traced = functional_trace(fn, inputs, composites=phase is Phase.PRE_GRAD, decompositions=decompositions)
    if traced.written or traced.reshaped:
        changed = ", ".join(str(i) for i in sorted({*traced.written, *traced.reshaped}))
        name = getattr(fn, "__name__", "the function")
        raise TurbogrError(f"{name} writes to its input {changed}; write it without in-place ops on inputs")
    remove_modes(traced, torch.is_grad_enabled())
    finish(traced.module, phase)
    return traced.module


def finish(module: fx.GraphModule, phase: Phase) -> None:
    """Last steps of every trace: nothing dead, everything spelled canonically."""
    module.graph.eliminate_dead_code()
    normalize(module.graph, phase)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


def _faked(inputs: Sequence[Any]) -> list[Any]:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if all(isinstance(x, FakeTensor) for x in tensors):
        return list(inputs)
    mode = detect_fake_mode(tensors) or FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    real = [isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) for x in inputs]
    return [mode.from_tensor(x, static_shapes=True) if r else x for x, r in zip(inputs, real, strict=True)]


@dataclass(frozen=True)
class Write:
    """An in-place op, as the tracer met it."""

    node: fx.Node | None  # the value it overwrote
    memory: StorageWeakRef
    grad_enabled: bool
    stack_trace: str | None


@dataclass
class Traced:
    """A functional graph, and what the function did to its inputs."""

    module: fx.GraphModule
    written: dict[int, fx.Node] = field(default_factory=dict)  # input position: its value at the end
    reshaped: list[int] = field(default_factory=list)  # inputs whose shape or storage was replaced
    viewed: list[int] = field(default_factory=list)  # written inputs of which a view is returned
    writes: list[Write] = field(default_factory=list)
    leaves: set[fx.Node] = field(default_factory=set)  # inputs and constants that require grad


def functional_trace(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    composites: bool,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Traced:
    """Run `fn` on fake inputs and record functional ATen, not yet in normal form."""
    mode = _Composites() if composites else FunctionalTensorMode()
    found: dict[str, list[int]] = {}

    def body(*args: Any) -> Any:
        wrapped = [to_fun(a) for a in args]
        results = fn(*wrapped)
        tensors = [i for i, w in enumerate(wrapped) if isinstance(w, FunctionalTensor)]
        reshaped = [i for i in tensors if has_metadata_mutation(wrapped[i], args[i], check_only_storage_mutation=False)]
        written = [i for i in tensors if has_data_mutation(wrapped[i]) and i not in reshaped]
        memory = {StorageWeakRef(wrapped[i].untyped_storage()): i for i in written}
        # Returning a written input means returning the input itself, whose new value the caller stores.
        itself = {id(wrapped[i]): args[i] for i in written}
        viewed = [
            memory[ref] for r in pytree.tree_leaves(results)
            if isinstance(r, FunctionalTensor) and id(r) not in itself
            and (ref := StorageWeakRef(r.untyped_storage())) in memory
        ]  # fmt: skip
        found.update(reshaped=reshaped, written=written, viewed=viewed)
        values = pytree.tree_map(lambda r: itself[id(r)] if id(r) in itself else from_fun(r), results)
        return values, [from_fun(wrapped[i]) for i in written]

    fakes = detect_fake_mode([x for x in inputs if isinstance(x, torch.Tensor)]) or FakeTensorMode(shape_env=ShapeEnv())
    fakes.epoch += 1  # forget data-dependent sizes of earlier runs over the same fake inputs
    table = {aten.copy.default: _copy} if composites else dict(decompositions or {})
    with _autograd_settings(), fakes, enable_python_dispatcher(), mode:
        module = make_fx(body, decomposition_table=table, pre_dispatch=composites)(*inputs)
    return _traced(module, inputs, found, mode.writes if isinstance(mode, _Composites) else [])


def _copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What functionalization makes of `copy_`, in ops that have a gradient."""
    value = source.to(destination.device, destination.dtype)
    if not _same_shape(value, destination):
        value = value.expand(destination.shape)
    return aten.lift_fresh_copy(value)


def _same_shape(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.ndim == b.ndim and all(statically_known_true(x == y) for x, y in zip(a.shape, b.shape, strict=True))


@contextmanager
def _autograd_settings() -> Iterator[None]:
    """Grad mode comes out as it went in; inference mode, which fake tensors do not go through, becomes `no_grad`."""
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield


def _traced(
    module: fx.GraphModule, inputs: Sequence[Any], found: Mapping[str, list[int]], writes: list[Write]
) -> Traced:
    graph = module.graph
    (output,) = graph.find_nodes(op="output")
    results, stored = output.args[0]
    output.args = (tuple(results) if isinstance(results, list) else results,)
    values = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in graph.find_nodes(op="get_attr"):
        constant = getattr(module, node.target)
        if isinstance(constant, FunctionalTensor):
            constant = torch._from_functional_tensor(constant.elem)
            setattr(module, node.target, constant)
        values[node] = constant
    leaves = {n for n, v in values.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    written = dict(zip(found["written"], stored, strict=True))
    return Traced(module, written, found["reshaped"], found["viewed"], writes, leaves)


_MAY_ALIAS = {aten.type_as.default, aten.broadcast_tensors.default, aten.meshgrid.default, aten.meshgrid.indexing}


class _Composites(FunctionalTensorMode):
    """Functionalization above autograd: composites stay whole, autocast becomes explicit casts, writes are noted.

    Unlike with the mode of `torch.export`, dropout's result may be written to: it is the input itself where dropout
    does nothing, as in eager, and fresh elsewhere.
    """

    def __init__(self) -> None:
        super().__init__(pre_dispatch=True)
        self.writes: list[Write] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            self._note_writes(schema, args, kwargs)
        if func is aten.dropout.default and (args[1] == 0 or not args[2]):
            return args[0]
        key = _autocast_key(func)
        if key is not None:
            with self:
                return func._op_dk(key, *args, **kwargs)
        with maybe_enable_thunkify():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _can_decompose(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func is aten.dropout.default:
            return False
        if func is aten.einsum.default and len(args[1]) == 1:
            return True  # may be a mere transpose
        if func in _MAY_ALIAS or _should_decompose_because_unsafe_op(func):
            return True
        if func._schema.is_mutable or any(a.alias_info for a in func._schema.arguments):
            return True
        return bool(_active_autocast()) and func._can_decompose()

    def _note_writes(self, schema: Any, args: Any, kwargs: Any) -> None:
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for tensor in pytree.tree_leaves([given.get(n) for n in names]):
            if not isinstance(tensor, FunctionalTensor):
                continue
            torch._sync(tensor)
            value = torch._from_functional_tensor(tensor.elem)
            proxies = get_proxy_mode()
            entry = proxies.tracer.tensor_tracker.get(value) if proxies is not None else None
            trace_text = fx_traceback.get_current_meta().get("stack_trace")
            memory = StorageWeakRef(value.untyped_storage())
            node = entry.proxy.node if entry is not None else None
            self.writes.append(Write(node, memory, torch.is_grad_enabled(), trace_text))


def autocast_devices() -> dict[str, Any]:
    """Device types for which autocast is on, and the dispatch keys of their kernels."""
    keys: Any = torch._C.DispatchKey
    known = {
        "cpu": keys.AutocastCPU, "cuda": keys.AutocastCUDA,
        torch._C._get_privateuse1_backend_name(): keys.AutocastPrivateUse1,  # 'npu', once torch_npu is loaded
    }  # fmt: skip
    return {device: key for device, key in known.items() if torch.is_autocast_enabled(device)}


def _active_autocast() -> list[Any]:
    """Dispatch keys of the autocast modes that are on and not already being handled."""
    return [k for k in autocast_devices().values() if not torch._C._dispatch_tls_is_dispatch_key_excluded(k)]


def _autocast_key(func: Any) -> Any:
    """Key of the autocast kernel to run first, or None. The kernel casts, then calls the op again with autocast off."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    for key in _active_autocast():
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key):
            return key
    return None


# --- modes ---------------------------------------------------------------------------------------

_AUTOCAST_NODES = {torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast}


def remove_modes(traced: Traced, grad_enabled: bool) -> list[fx.Node]:
    """Make grad mode and autocast a matter of nodes, not of position.

    A value computed while grad was disabled and used where it is enabled goes through `detach`; a `detach` of what
    needs no gradient anyway is dropped. Autocast is explicit already, so its nodes just go. Returns the nodes that
    need gradients although `grad_enabled`, the mode the graph will run under, is off: nothing can express those.
    """
    graph = traced.module.graph
    returned = returned_memory(graph)
    enabled, tracked, off = grad_enabled, set(traced.leaves), set()
    detached: dict[fx.Node, fx.Node] = {}
    lost: list[fx.Node] = []
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            enabled = node.args[0]
            graph.erase_node(node)
            continue
        if node.op == "output" or node.target is aten.copy_.default:  # after the function, whatever mode it ended in
            enabled = grad_enabled
        for source in [n for n in node.all_input_nodes if enabled and n in off]:
            if source not in detached:
                detached[source] = _detach_after(source)
            node.replace_input_with(source, detached[source])
        if node.op != "call_function":
            continue
        if _would_track(node, tracked):
            tracked.add(node)
            if not enabled:
                off.add(node)
            elif not grad_enabled:
                lost.append(node)
        elif _is_idle_detach(node, tracked) and memory_of(node).isdisjoint(returned):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in reversed([n for n in graph.nodes if n.target in _AUTOCAST_NODES]):
        graph.erase_node(node)
    return lost


def _is_idle_detach(node: fx.Node, tracked: set[fx.Node]) -> bool:
    return node.target is aten.detach.default and node.args[0] not in tracked


def tracked_nodes(traced: Traced, grad_enabled: bool) -> set[fx.Node]:
    """Values that autograd tracks, with the grad modes the graph still contains."""
    enabled, tracked = grad_enabled, set(traced.leaves)
    for node in traced.module.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = node.args[0]
        elif enabled and node.op == "call_function" and _would_track(node, tracked):
            tracked.add(node)
    return tracked


def _would_track(node: fx.Node, tracked: set[fx.Node]) -> bool:
    """Does autograd track this value, where grad mode is on?"""
    if node.target is aten.detach.default or tracked.isdisjoint(node.all_input_nodes):
        return False
    values = [v for v in pytree.tree_leaves(_value(node)) if isinstance(v, torch.Tensor)]
    return any(v.is_floating_point() or v.is_complex() for v in values)


def _detach_after(source: fx.Node) -> fx.Node:
    with source.graph.inserting_after(source):
        node = source.graph.call_function(aten.detach.default, (source,))
    node.meta = {k: v for k, v in source.meta.items() if k != "unbacked_bindings"}
    return node


def is_size_arithmetic(node: fx.Node) -> bool:
    """A Python function of symbolic sizes, or an item of a result."""
    name, module = getattr(node.target, "__name__", ""), getattr(node.target, "__module__", "")
    return module in ("_operator", "operator", "math", "builtins") or (module == "torch" and name.startswith("sym_"))
