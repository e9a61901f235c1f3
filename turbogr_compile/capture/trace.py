"""Tracing a function of tensors to functional ATen of a phase, without modes.

One tracer serves capture, rule patterns, replacements and tests, so that they all speak the same vocabulary.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from .._torch import (
    FakeTensor,
    FakeTensorMode,
    FunctionalTensor,
    FunctionalTensorMode,
    ShapeEnv,
    StorageWeakRef,
    _should_decompose_because_unsafe_op,
    detect_fake_mode,
    enable_python_dispatcher,
    enter_autocast,
    exit_autocast,
    from_fun,
    get_proxy_mode,
    guard_or_false,
    has_data_mutation,
    has_metadata_mutation,
    make_fx,
    maybe_enable_thunkify,
    set_grad_enabled,
    surely_contiguous,
    to_fun,
)
from ..errors import TurbogrError
from ..graph.nodes import TRAINABLE
from ..graph.phases import Phase
from ..graph.shapes import same_shape
from .normal import memory_of, normalize, returned_memory, value_of

aten = torch.ops.aten


def trace(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    phase: Phase,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    apart: Collection[torch._ops.OpOverload] = (),
) -> fx.GraphModule:
    """The function as a graph of this phase, in normal form.

    Inputs are fake tensors (symbolic sizes welcome) or real ones; real tensors the function closes over are constants.
    PRE_GRAD keeps composites, exactly as capture does, but for those in `apart`. Later phases see what is below
    autograd, taken apart by `decompositions`.
    """
    inputs = _faked(inputs)
    traced = functional_trace(
        fn, inputs, composites=phase is Phase.PRE_GRAD, decompositions=decompositions, apart=apart
    )
    if traced.written or traced.reshaped:
        changed = ", ".join(str(i) for i in sorted({*traced.written, *traced.reshaped}))
        name = getattr(fn, "__name__", "the function")
        raise TurbogrError(f"{name} writes to its input {changed}; write it without in-place ops on inputs")
    remove_modes(traced, torch.is_grad_enabled())
    finish(traced.module, phase)
    return traced.module


def trace_with_lines(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    phase: Phase,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """As `trace`, and every node knows its line of the function; Dynamo does that for what it captures."""

    def recorded(*values: Any) -> Any:
        with _SourceLines():
            return fn(*values)

    with fx_traceback.preserve_node_meta():
        return trace(recorded, inputs, phase, decompositions)


class _SourceLines(TorchFunctionMode):
    """Tells fx which source line is running."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fx_traceback.set_stack_trace(traceback.format_list(traceback.extract_stack()[:-1]))
        return func(*args, **(kwargs or {}))


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
    seen: bool  # by autograd
    stack_trace: str | None
    counted: bool = True  # by the tensor's version; writes through `x.data` are not


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
    apart: Collection[torch._ops.OpOverload] = (),
) -> Traced:
    """Run `fn` on fake inputs and record functional ATen, not yet in normal form."""
    mode = _Composites(apart) if composites else FunctionalTensorMode()
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
    table = dict(_WITH_GRADIENTS if composites else decompositions or {})
    with _autograd_settings(), fakes, enable_python_dispatcher(), mode:
        module = make_fx(body, decomposition_table=table, pre_dispatch=composites)(*inputs)
    return _traced(module, inputs, found, mode.writes if isinstance(mode, _Composites) else [])


def _copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What functionalization makes of `copy_`, in ops that have a gradient."""
    value = source.to(destination.device, destination.dtype)
    if not same_shape(value.shape, destination.shape):
        value = value.expand(destination.shape)
    if surely_contiguous(destination) and not surely_contiguous(value):
        return aten.clone(value, memory_format=torch.contiguous_format)  # it lies where the old value lay
    return aten.clone(value) if value.is_complex() else aten.lift_fresh_copy(value)


def _masked_select(x: torch.Tensor, mask: torch.Tensor) -> Any:
    """As indexing by a mask of rows: trailing dims of size one, or expanded from that, stand for all of a row."""
    rows = mask.dim()
    while rows and (same_shape(mask.shape[rows - 1 : rows], (1,)) or _is_expanded(mask, x, rows - 1)):
        mask = mask.narrow(rows - 1, 0, 1)
        rows -= 1
    same = all(guard_or_false(a == b) for a, b in zip(x.shape, mask.shape[:rows], strict=False))
    if not rows or mask.dim() != x.dim() or not same:
        return NotImplemented
    return x[mask.reshape(mask.shape[:rows])].reshape(-1)


def _is_expanded(mask: torch.Tensor, x: torch.Tensor, dim: int) -> bool:
    """To the size of x: all of its elements along the dim are one in memory."""
    mine, its = mask.shape[dim : dim + 1], x.shape[dim : dim + 1]
    one = mask.dim() == x.dim() and guard_or_false(mask.stride(dim) == 0) and not same_shape(mine, (0,))
    return one and same_shape(mine, its)


def _of_pairs(scatter: Any) -> Callable[..., Any]:
    """A part written into complex numbers, which has no gradient of its own, as one written into pairs of reals."""

    def written(x: torch.Tensor, part: torch.Tensor, dim: int = 0, *where: Any, **more: Any) -> Any:
        if not x.is_complex():
            return NotImplemented
        real = [torch.view_as_real(value.resolve_conj()) for value in (x, part.to(x.dtype))]
        return torch.view_as_complex(scatter(*real, dim % x.dim(), *where, **more))

    return written


_WITH_GRADIENTS: dict[Any, Callable[..., Any]] = {
    aten.copy.default: _copy,
    aten.masked_select.default: _masked_select,
    aten.slice_scatter.default: _of_pairs(aten.slice_scatter),
    aten.select_scatter.default: _of_pairs(aten.select_scatter),
}


@contextmanager
def _autograd_settings() -> Iterator[None]:
    """Grad mode comes out as it went in; inference mode, which fake tensors do not go through, becomes `no_grad`."""
    enabled = torch.is_grad_enabled()
    # Whatever wants to see the tensors that autograd saves (checkpointing) must not see those of a trace.
    unwatched = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with unwatched, torch.inference_mode(False), torch.set_grad_enabled(enabled):
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
    for node in leaves:
        node.meta[TRAINABLE] = True  # a trace holds values, not gradients: the fake value does not say so
    written = dict(zip(found["written"], stored, strict=True))
    return Traced(module, written, found["reshaped"], found["viewed"], writes, leaves)


UNCOUNTED = "_turbogr_uncounted"  # of a tensor of a trace: `x.data`
_MAY_ALIAS = {aten.type_as.default, aten.broadcast_tensors.default, aten.meshgrid.default, aten.meshgrid.indexing}

# Without a gradient of their own, so that autograd goes on as if nothing had been written; or without one once they are
# functional.
_HIDDEN_FROM_AUTOGRAD = {
    aten.logical_and_.default, aten.logical_or_.default, aten.logical_xor_.default, aten.logical_not_.default,
    aten.normal_.default,
}  # fmt: skip

# What a comparison writes over floats has a gradient of zeros; what functionalization makes of it has none.
_COMPARISONS = {
    getattr(getattr(aten, f"{name}_"), kind): getattr(getattr(aten, name), kind)
    for name in ("eq", "ne", "ge", "gt", "le", "lt") for kind in ("Scalar", "Tensor")
}  # fmt: skip


class _Composites(FunctionalTensorMode):
    """Functionalization above autograd: composites stay whole, autocast becomes explicit casts, writes are noted.

    Unlike with the mode of `torch.export`, dropout's result may be written to: it is the input itself where dropout
    does nothing, as in eager, and fresh elsewhere.
    """

    def __init__(self, apart: Collection[torch._ops.OpOverload] = ()) -> None:
        super().__init__(pre_dispatch=True)
        self.apart = apart
        self.writes: list[Write] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            self._note_writes(func, args, kwargs)
        if func is aten.dropout.default and (args[1] == 0 or not args[2]):
            return args[0]
        if func in _COMPARISONS and args[0].is_floating_point():
            with self:
                holds = _COMPARISONS[func](*args)
                written = args[0].masked_fill_(holds, 1).masked_fill_(~holds, 0)
                other = args[1]
                if isinstance(other, torch.Tensor) and other.requires_grad:
                    written.add_(other.masked_fill(torch.ones_like(other, dtype=torch.bool), 0))
                return written
        key = _autocast_key(func)
        if key is not None:
            with self:
                return func._op_dk(key, *args, **kwargs)
        with maybe_enable_thunkify():
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _can_decompose(self, func: Any, args: Any, kwargs: Any) -> bool:
        if func in self.apart:
            return True
        if func is aten.dropout.default:
            return False
        if func is aten.einsum.default and len(args[1]) == 1:
            return True  # may be a mere transpose
        if func in _MAY_ALIAS or _should_decompose_because_unsafe_op(func):
            return True
        if func._schema.is_mutable or any(a.alias_info for a in func._schema.arguments):
            return True
        return bool(_active_autocast()) and func._can_decompose()

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        schema, seen = func._schema, torch.is_grad_enabled() and func not in _HIDDEN_FROM_AUTOGRAD
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
            counted = not getattr(tensor, UNCOUNTED, False)
            self.writes.append(Write(node, memory, seen, trace_text, counted))


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

_AUTOCAST_NODES = {enter_autocast, exit_autocast}


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
        if node.target is set_grad_enabled:
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
        if node.target is set_grad_enabled:
            enabled = node.args[0]
        elif enabled and node.op == "call_function" and _would_track(node, tracked):
            tracked.add(node)
    return tracked


def _would_track(node: fx.Node, tracked: set[fx.Node]) -> bool:
    """Does autograd track this value, where grad mode is on?"""
    if node.target is aten.detach.default or tracked.isdisjoint(node.all_input_nodes):
        return False
    values = [v for v in pytree.tree_leaves(value_of(node)) if isinstance(v, torch.Tensor)]
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
