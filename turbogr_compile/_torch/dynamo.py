"""Dynamo: its entry, its flags, the graphs and nodes it hands over, TORCH_TRACE."""

from __future__ import annotations

import logging
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._functorch.autograd_function import autograd_function_apply  # what Dynamo makes of an autograd.Function
from torch._guards import CompileContext, TracingContext  # Dynamo's fake mode and symbolic contexts of inputs
from torch._logging import trace_structured
from torch._ops import HigherOrderOperator  # to name and refuse ops that hold subgraphs
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode  # nodes Dynamo records
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..errors import TurbogrError
from .fake import FakeTensor, FakeTensorMode
from .tracing import is_traceable_wrapper_subclass

enter_autocast = torch.amp.autocast_mode._enter_autocast  # nodes Dynamo records for `torch.autocast`
exit_autocast = torch.amp.autocast_mode._exit_autocast
compile_lock = torch._dynamo.convert_frame.compile_lock  # while one thread compiles, no other one does
SIGNALS = (torch._dynamo.exc.RestartAnalysis, torch._dynamo.exc.SkipFrame)  # to Dynamo: not errors
set_grad_enabled = torch._C._set_grad_enabled  # node Dynamo records for `torch.no_grad`
get_data_attr = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # what Dynamo makes of `x.data`

__all__ = [
    "SIGNALS",
    "CompileContext",
    "DynamoFlags",
    "HigherOrderOperator",
    "TracingContext",
    "_enter_inference_mode",
    "_exit_inference_mode",
    "autograd_function_apply",
    "backend_errors_unwrapped",
    "break_reason",
    "compile_id",
    "compile_lock",
    "copy_graph",
    "enter_autocast",
    "exit_autocast",
    "get_data_attr",
    "mark_added_input",
    "optimize",
    "outside_compilation",
    "quiet_functions",
    "real_inputs",
    "set_grad_enabled",
    "trace_artifact",
    "trace_enabled",
    "trace_structured",
    "trace_transformer_layers",
    "tracing_with",
]


def break_reason(module: fx.GraphModule) -> tuple[str, list[traceback.FrameSummary]] | None:
    """Why Dynamo ended this graph, and where in the user's program; None at the end of a function."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return (reason.reason, list(reason.user_stack)) if reason is not None and reason.graph_break else None


def compile_id() -> str:
    """'0.0' for Dynamo's frame 0, compile 0; '-' outside of Dynamo."""
    current = CompileContext.current_compile_id()
    return str(current).strip("[]").replace("/", ".") if current is not None else "-"


def optimize(
    fn: Callable[..., Any],
    backend: Callable[..., Any],
    failed: Callable[[str], None] = lambda _: None,
    plain: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """torch.compile without its wrapper around the backend, which hides `backend_ctx_ctor`.

    Code that Dynamo fails to trace is traced again with the flags `plain`, once `failed` was told why.
    """
    context = torch._dynamo.optimize(backend, **settings)
    convert: Any = getattr(getattr(context, "callback", None), "_torchdynamo_orig_backend", None)
    if hasattr(convert, "_inner_convert"):  # not so for whole graphs only, or where Dynamo is switched off
        if settings.get("dynamic") is None:
            convert._inner_convert = _SizesThatChange(convert._inner_convert)
        if plain:
            convert._inner_convert = _AgainIfItFails(convert._inner_convert, failed, plain)
    return context(fn)


class _Converter:
    """Dynamo's converter of frames, and something more."""

    def __init__(self, convert: Any) -> None:
        self._convert = convert

    def __getattr__(self, name: str) -> Any:
        if name == "_convert":
            raise AttributeError(name)  # of a copy under way
        return getattr(self._convert, name)


class _AgainIfItFails(_Converter):
    """What fails with flags that Dynamo does not have by default is converted as it is by default."""

    def __init__(self, convert: Any, failed: Callable[[str], None], plain: Mapping[str, Any]) -> None:
        super().__init__(convert)
        self._failed, self._plain = failed, dict(plain)

    def __call__(self, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, skip: int = 0) -> Any:
        exc = torch._dynamo.exc
        try:
            return self._convert(frame, cache_entry, hooks, frame_state, skip=skip + 1)
        except (exc.TorchRuntimeError, exc.InternalTorchDynamoError, GuardOnDataDependentSymNode) as error:
            if isinstance(error, exc.BackendCompilerFailed):
                raise
            said = str(error)
        with torch._dynamo.config.patch(self._plain):
            result = self._convert(frame, cache_entry, hooks, frame_state, skip=skip + 1)
        self._failed(said)  # not where the program itself is at fault: then it has failed again
        return result


class _SizesThatChange(_Converter):
    """Where code is compiled for arguments of other sizes, those that changed become symbols; if that is not enough,
    all of them do.

    Dynamo alone makes a symbol of a size once it saw that size change: one more graph for a new width, one for a new
    number of sequences, and one where two sizes that it took for the same are not. A width that never changes, because
    the data are cut to it, stays a number.
    """

    def __init__(self, convert: Any) -> None:
        super().__init__(convert)
        self._first: weakref.WeakKeyDictionary[Any, list[tuple[int, ...]]] = weakref.WeakKeyDictionary()
        self._opened: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, frame: Any, cache_entry: Any, hooks: Any, frame_state: Any, skip: int = 0) -> Any:
        tensors = list(_tensors(list(frame.f_locals.values())))
        shapes = [tuple(x.shape) for x in tensors]
        first = self._first.setdefault(frame.f_code, shapes)
        if first == shapes or not torch._dynamo.config.automatic_dynamic_shapes:
            return self._convert(frame, cache_entry, hooks, frame_state, skip=skip + 1)
        whole = frame.f_code in self._opened or list(map(len, first)) != list(map(len, shapes))
        self._opened.add(frame.f_code)
        for value, was in zip(tensors, shapes if whole else first, strict=True):
            _mark_dynamic(value, [d for d in range(value.dim()) if whole or value.shape[d] != was[d]])
        with torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return self._convert(frame, cache_entry, hooks, frame_state, skip=skip + 1)


def _mark_dynamic(x: torch.Tensor, dims: Sequence[int]) -> None:
    """A wish, which Dynamo drops where code insists on a number. The last dim of a tensor of features is one."""
    features = x.dim() > 2 and x.is_floating_point()
    # Guards do not look at this attribute: tensors with and without it take the same graph.
    x._dynamo_propagated_dynamic_indices = {d for d in dims if d < x.dim() - features}  # type: ignore[attr-defined]


def _tensors(values: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Of arguments: collections, and objects that hold a batch; no parameters."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter) and not is_traceable_wrapper_subclass(value):
                yield value
        elif depth == 0 or isinstance(value, (torch.nn.Module, type, str, bytes)):
            continue
        elif isinstance(value, Mapping):
            yield from _tensors(list(value.values()), depth - 1)
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value, depth - 1)
        elif hasattr(value, "__dict__"):
            yield from _tensors(list(vars(value).values()), depth - 1)


@contextmanager
def backend_errors_unwrapped() -> Iterator[None]:
    """Dynamo wraps what a backend raises; let our own errors through as they are."""
    try:
        yield
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if isinstance(error.inner_exception, TurbogrError):
            raise error.inner_exception from None
        raise


class DynamoFlags(threading.local):
    """Settings of Dynamo, on while a compiled function is called; entered every step, so it must be cheap."""

    def __init__(self, **flags: Any) -> None:
        self._set = torch._dynamo.config._make_closure_patcher(**flags)
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._undo.append(self._set())

    def __exit__(self, *error: Any) -> None:
        self._undo.pop()()


@lru_cache(maxsize=1)
def trace_transformer_layers() -> None:
    """`nn.TransformerEncoder` looks at the values of its mask, for a hint that only fast paths read: not in a trace."""

    @torch.compiler.substitute_in_graph(torch.nn.modules.transformer._detect_is_causal_mask)
    def _detect_is_causal_mask(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True


def quiet_functions() -> set[Any]:
    """Functions whose calls Dynamo leaves out of a trace: a warning or a line of a log must not cut a graph.

    Libraries add methods of their own to loggers (`warning_once`): whatever is named after a level is one.
    """
    logs = {f for name, f in vars(logging.Logger).items() if name.startswith(_LEVELS) and callable(f)}
    return {*torch._dynamo.config.ignore_logging_functions, warnings.warn, *logs}


_LEVELS = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log")


def trace_enabled() -> bool:
    from torch._logging._internal import trace_log

    # torch's own handler is always there, and writes only where TORCH_TRACE names a directory; pytest listens to every
    # logger that does not propagate, and a user's tests would record all of their graphs.
    wanted = (handler for handler in trace_log.handlers if not type(handler).__module__.startswith("_pytest"))
    return any(getattr(handler, "root_dir", True) for handler in wanted)


def trace_artifact(name: str, encoding: str, payload: Any) -> None:
    trace_structured("artifact", lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: payload)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy that AOTAutograd still takes for Dynamo's: fx's own copy forgets where placeholders come from."""
    copied = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    returned = copied.graph_copy(graph, values, return_output_node=True)
    assert isinstance(returned, tuple)
    result, old_output = returned
    copied.output(result, type_expr=getattr(old_output, "type", None)).meta = dict(old_output.meta)
    copied._codegen = graph._codegen
    for old, new in zip(graph.find_nodes(op="placeholder"), copied.find_nodes(op="placeholder"), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copied


def mark_added_input(node: fx.Node) -> None:
    """A placeholder that stands for nothing in the user's program."""
    node._dynamo_source = None


def real_inputs(module: fx.GraphModule) -> list[Any] | None:
    """The caller's own arguments behind the placeholders of Dynamo's graph; None where one is out of reach."""
    found = []
    for node in module.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        example = getattr(argument, "example", None)
        if example is None or isinstance(example, (FakeTensor, torch.SymInt)):
            value = node.meta.get("example_value")
            example = value.node.hint if isinstance(value, torch.SymInt) and value.node.has_hint() else None
            if example is None:
                return None
        found.append(example)
    return found


@contextmanager
def tracing_with(mode: FakeTensorMode) -> Iterator[None]:
    """As if a compilation with that fake mode were under way, and no other."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with tracing(TracingContext(mode)), unset_fake_temporarily():
        yield


@contextmanager
def outside_compilation() -> Iterator[None]:
    """Hide the compilation that may be under way: its fake mode is not the one of the tensors used here."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with tracing(None), unset_fake_temporarily():
        yield
