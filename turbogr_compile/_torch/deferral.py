"""What tensors without data are made of: wrappers, copy-on-write memory, size guards, and Dynamo's view of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import _lazy_clone
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

from .fake import ConstantSource, FakeTensor, FakeTensorMode, ShapeEnv

below_torch_function = torch._C.DisableTorchFunctionSubclass  # the tensor's own C++ methods, not the subclass's

__all__ = [
    "above_autograd",
    "address_of",
    "apply_as_it_is",
    "below_torch_function",
    "checks_of",
    "dispatch_modes",
    "fake_of_sizes",
    "gradient_edge",
    "lazy_twin",
    "saved_tensors_are_hooked",
    "teach_autograd",
    "teach_dynamo",
    "transforms_active",
    "untraced",
    "watching_ops",
    "without_modes",
    "without_saved_tensor_hooks",
    "wrapper",
]


def wrapper(
    kind: type, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A tensor of a subclass that describes memory it does not have."""
    make = torch.Tensor._make_wrapper_subclass
    return make(kind, shape, strides=stride, dtype=dtype, device=device, requires_grad=False)


def lazy_twin(x: torch.Tensor) -> torch.Tensor | None:
    """A tensor of the same value that survives whatever is written to `x`; memory is copied by the first write.

    None where the memory is not torch's own, or NumPy has it too, so that nobody would notice a write.
    """
    try:
        return _lazy_clone(x) if x.untyped_storage().resizable() else None
    except RuntimeError:
        return None


def gradient_edge(x: torch.Tensor) -> GradientEdge:
    """`torch.autograd.graph.get_gradient_edge`, at less cost where gradients are on."""
    function = x.grad_fn
    if function is None or not torch.is_grad_enabled():
        return get_gradient_edge(x)
    return GradientEdge(function, x.output_nr, x.view_as(x).grad_fn)  # a Python node does not own its C++ one


# Where the data of a tensor lie; looking does not copy shared memory, as `data_ptr()` would.
address_of: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]


_ORDINARY = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def above_autograd() -> AbstractContextManager[Any]:
    """Inside of `__torch_dispatch__`, where autograd is done with an op: as if nothing had been called yet."""
    return torch._C._ForceDispatchKeyGuard(*_ORDINARY)


def saved_tensors_are_hooked() -> bool:
    """Somebody wants to see what autograd saves: activation checkpointing, offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """What is computed here was recorded before somebody wanted to see what autograd saves."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def transforms_active() -> bool:
    """Inside of vmap, grad or another transform of torch.func."""
    return torch._C._are_functorch_transforms_active()


def dispatch_modes() -> list[Any]:
    """Modes of other people that see every op, and do not say that compiled code is none of their business."""
    return [m for m in _get_current_dispatch_mode_stack() if not m.ignore_compile_internals()]


def without_modes() -> AbstractContextManager[Any]:
    """No mode of other people sees what runs here: compiling is none of their business."""
    return _disable_current_modes()


class watching_ops(TorchDispatchMode):
    """Calls `see(op, args, kwargs)` for every op that runs."""

    def __init__(self, see: Callable[[Any, Any, Any], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def fake_of_sizes(mode: FakeTensorMode, x: torch.Tensor, dynamic: set[int], name: str) -> FakeTensor:
    """A fake twin whose `dynamic` dims are symbols, the same symbol for the same size."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    if not x.dim():  # with a source, its value would be a symbol, which some compilers refuse
        return mode.from_tensor(x, static_shapes=True)
    sizes = [DimDynamic.DUCK if d in dynamic else DimDynamic.STATIC for d in range(x.dim())]
    settings: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(x, symbolic_context=settings, source=ConstantSource(name))


def checks_of(env: ShapeEnv, fakes: Sequence[Any]) -> Callable[[Sequence[Any]], bool]:
    """Do other arguments fulfil everything that was assumed about the sizes and strides of these?"""
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

    text = env.produce_guards_expression(fakes, ignore_static=False) or "True"
    code = compile(text, "<sizes>", "eval")
    names, functions = [f"t{i}" for i in range(len(fakes))], dict(SYMPY_INTERP)
    return lambda args: bool(eval(code, functions, {"L": dict(zip(names, args, strict=True))}))


def teach_dynamo(
    kind: type,
    module: str,
    stand_in: Callable[[Any], torch.Tensor],
    takes: Callable[[Any], bool],
    value_of: Callable[[Any], Any],
) -> None:
    """Dynamo takes tensors of the subclass `kind` for plain ones that look like `stand_in(x)`, and does not trace what
    is written in `module`. Compiled code that `takes` does not know gets `value_of(x)` instead."""
    _teach_dynamo(kind, module, stand_in, takes, value_of)


@lru_cache(maxsize=1)
def _teach_dynamo(kind: type, module: str, stand_in: Any, takes: Any, value_of: Any) -> None:
    from torch._dynamo import output_graph, trace_rules
    from torch._dynamo.variables import builder

    trace_rules.add(module)
    trace_rules.add(__name__)
    wrap, infer = builder.VariableBuilder._wrap, builder.infer_subclass_type
    from_tensor, call_compiler = FakeTensorMode.from_tensor, output_graph.OutputGraph.call_user_compiler

    def _wrap(self: Any, value: Any) -> Any:
        return self.wrap_tensor(value) if type(value) is kind else wrap(self, value)

    def infer_subclass_type(value: Any) -> Any:
        return None if type(value) is kind else infer(value)

    def fake_from(self: Any, tensor: Any, **settings: Any) -> Any:
        return from_tensor(self, stand_in(tensor) if type(tensor) is kind else tensor, **settings)

    def call_user_compiler(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled = call_compiler(self, *args, **kwargs)
        if takes(getattr(compiled, "_torchdynamo_orig_callable", compiled)):
            return compiled
        if not any(type(a.example) is kind for a in self.graphargs):
            return compiled
        return lambda *given: compiled(*[value_of(x) for x in given])

    output_graph.OutputGraph.call_user_compiler = call_user_compiler  # type: ignore[method-assign]
    builder.VariableBuilder._wrap = _wrap  # type: ignore[method-assign]
    builder.infer_subclass_type = infer_subclass_type
    FakeTensorMode.from_tensor = fake_from  # type: ignore[method-assign]


@lru_cache(maxsize=1)
def teach_autograd(kind: type, value_of: Callable[[Any], Any], placed_of: Callable[[Any], Any]) -> None:
    """What Python gives to C++ autograd without asking a tensor of type `kind` is `value_of(x)`: the arguments of an
    `autograd.Function`, and the roots of a backward; `placed_of(x)` for what a backward's gradients are asked of."""
    from torch._functorch import utils
    from torch.utils._pytree import tree_map

    unwrap, backward = utils.unwrap_dead_wrappers, torch.autograd.backward

    def unwrap_dead_wrappers(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return unwrap(tuple([value_of(a) for a in args]) if kind in map(type, args) else args)

    @wraps(backward)
    def backward_of_values(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = placed_of(kwargs["inputs"])
        roots = tensors if type(tensors) is torch.Tensor else tree_map(value_of, tensors)
        return backward(roots, *args, **kwargs)

    utils.unwrap_dead_wrappers = unwrap_dead_wrappers
    torch.autograd.backward = backward_of_values
    if torch.distributed.is_available():
        _teach_ddp(kind)


def _teach_ddp(kind: type) -> None:
    """Outputs of a DDP module that looks for unused parameters go through a function of its own, which copies them;
    it does more only in the first step of a static graph. So these need no values there."""
    from torch.nn.parallel import distributed

    sink = distributed._DDPSink

    class _Sink(sink):  # type: ignore[misc, valid-type]
        @classmethod
        def apply(cls, ddp: Any, *outputs: Any) -> Any:
            if kind not in map(type, outputs) or ddp().static_graph:
                return sink.apply(ddp, *outputs)
            return tuple([x.clone() if isinstance(x, torch.Tensor) else x for x in outputs])

    distributed._DDPSink = _Sink  # type: ignore[misc]


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose frames Dynamo lets alone, and those of whatever it calls. Costs less than
    `torch.compiler.disable`."""
    switch = set_eval_frame

    def run(*args: Any, **kwargs: Any) -> Any:
        watcher = switch(None)
        try:
            return function(*args, **kwargs)
        finally:
            switch(watcher)

    return run


def apply_as_it_is(function: Any, *args: Any) -> Any:
    """Apply an `autograd.Function` to its very arguments."""
    return super(torch.autograd.Function, function).apply(*args)
