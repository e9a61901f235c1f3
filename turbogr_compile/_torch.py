"""Every private torch API turbogr uses, in one place, so that an upgrade breaks in one place.

`tests/turbogr_compile/test_torch_api.py` has one smoke test per name.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._decomp import _should_decompose_because_unsafe_op  # composites whose schema hides writes or views
from torch._dispatch.python import enable_python_dispatcher  # symbolic sizes inside composite ops
from torch._dynamo.source import ConstantSource  # AOTAutograd wants a source for every lifted constant
from torch._functorch._aot_autograd.functional_utils import (
    from_fun,  # current value of a functional tensor
    has_data_mutation,  # was it written to?
    has_metadata_mutation,  # was its shape or storage replaced?
    to_fun,  # wrap a tensor for functionalization
)
from torch._guards import (  # Dynamo's fake mode and symbolic contexts of inputs
    CompileContext,
    TracingContext,
    detect_fake_mode,
)
from torch._logging import trace_structured
from torch._ops import HigherOrderOperator  # to name and refuse ops that hold subgraphs
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # values without data
from torch._subclasses.functional_tensor import (
    FunctionalTensor,
    FunctionalTensorMode,  # rewrites in-place ops and views; subclassed for our vocabulary
)
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode  # nodes Dynamo records
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,  # the tracer that is recording
    make_fx,
    maybe_enable_thunkify,  # arithmetic on sizes is recorded only where it is used; halves the time of tracing
    track_tensor_tree,  # makes a value known to the tracer
)
from torch.fx.experimental.symbolic_shapes import (
    PropagateUnbackedSymInts,  # interpreter that keeps Dynamo's names for data-dependent sizes
    ShapeEnv,
    statically_known_true,
)
from torch.multiprocessing.reductions import StorageWeakRef  # identity of memory
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees every op that runs
    is_traceable_wrapper_subclass,  # DTensor and friends
)

from .errors import TurbogrError

enter_autocast = torch.amp.autocast_mode._enter_autocast  # nodes Dynamo records for `torch.autocast`
exit_autocast = torch.amp.autocast_mode._exit_autocast
set_grad_enabled = torch._C._set_grad_enabled  # node Dynamo records for `torch.no_grad`
get_data_attr = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]  # what Dynamo makes of `x.data`


__all__ = [
    "CompileContext",
    "ConstantSource",
    "DynamoFlags",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "HigherOrderOperator",
    "PropagateUnbackedSymInts",
    "ShapeEnv",
    "StorageWeakRef",
    "TorchDispatchMode",
    "TracingContext",
    "_enter_inference_mode",
    "_exit_inference_mode",
    "_should_decompose_because_unsafe_op",
    "aot_autograd",
    "backend_errors_unwrapped",
    "boxed",
    "call_through",
    "compile_fx_inner",
    "compile_id",
    "compile_parts",
    "copy_graph",
    "cpp_compiler",
    "decompositions",
    "default_partition",
    "default_store",
    "detect_fake_mode",
    "enable_python_dispatcher",
    "enter_autocast",
    "exit_autocast",
    "fake_inputs",
    "fake_mode_of",
    "free_unbacked",
    "from_fun",
    "get_data_attr",
    "get_proxy_mode",
    "group_of",
    "group_tag",
    "group_timeout",
    "guard_count",
    "has_data_mutation",
    "has_metadata_mutation",
    "ignore_fresh_unbacked",
    "inductor",
    "inductor_decompositions",
    "is_alias",
    "is_erased",
    "is_functional",
    "is_impure",
    "is_random",
    "is_traceable_wrapper_subclass",
    "make_fx",
    "mark_added_input",
    "maybe_enable_thunkify",
    "min_cut_partition",
    "mutated_arguments",
    "name_group",
    "named_symbol",
    "new_fake_mode",
    "new_guards",
    "new_row_count",
    "optimize",
    "outside_compilation",
    "process_group",
    "propagate",
    "quiet_functions",
    "real_inputs",
    "run_backward",
    "run_plainly",
    "set_grad_enabled",
    "shape_env_of",
    "statically_known_true",
    "surely_contiguous",
    "symbolic_int",
    "to_fun",
    "trace_artifact",
    "trace_enabled",
    "trace_structured",
    "trace_transformer_layers",
    "tracing_with",
    "track_tensor_tree",
    "trying",
    "version_of",
    "without_autocast",
]  # fmt: skip


def compile_id() -> str:
    """'0.0' for Dynamo's frame 0, compile 0; '-' outside of Dynamo."""
    current = CompileContext.current_compile_id()
    return str(current).strip("[]").replace("/", ".") if current is not None else "-"


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """The mode that made the graph's fake values."""
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else (values,):
            if isinstance(value, FakeTensor):
                return value.fake_mode
    return detect_fake_mode()


def shape_env_of(graph: fx.Graph) -> ShapeEnv | None:
    mode = fake_mode_of(graph)
    return mode.shape_env if mode is not None else None


def guard_count(env: ShapeEnv | None) -> int:
    """Changes when somebody specialises a symbolic size."""
    if env is None:
        return 0
    return len(env.guards) + sum(len(v) for v in env.deferred_runtime_asserts.values())


def new_guards(env: ShapeEnv | None, since: int) -> list[str]:
    return [str(g.expr) for g in env.guards[since:]] if env is not None else []


def ignore_fresh_unbacked(env: ShapeEnv | None) -> AbstractContextManager[Any]:
    """Re-running an op that makes an unbacked size must not leave a second symbol behind."""
    return env.ignore_fresh_unbacked_symbols() if env is not None else nullcontext()


def free_unbacked(value: Any) -> set[Any]:
    """Unbacked symbols in a fake value's sizes."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return set(free_unbacked_symbols(value))


def mutated_arguments(node: fx.Node) -> list[Any]:
    """Arguments the op writes to, decided by its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [given[name] for name in written if name in given]


def is_functional(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or not schema.is_mutable


def is_impure(node: fx.Node) -> bool:
    """Must stay even when nobody reads it: mutation, random state, assertions, modes."""
    return node.is_impure()


def is_random(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def optimize(fn: Callable[..., Any], backend: Callable[..., Any], **settings: Any) -> Any:
    """torch.compile without its wrapper around the backend, which hides `backend_ctx_ctor`."""
    return torch._dynamo.optimize(backend, **settings)(fn)


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
    """Functions whose calls Dynamo leaves out of a trace: a warning must not cut a graph."""
    return {*torch._dynamo.config.ignore_logging_functions, warnings.warn}


# --- AOTAutograd and Inductor ------------------------------------------------------------------------


def boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Calling convention in which the callee may free its inputs early."""
    from functorch.compile import make_boxed_func

    return make_boxed_func(fn)


def run_plainly(graph: fx.GraphModule) -> Callable[..., Any]:
    """A graph of AOTAutograd as a boxed function: values are freed after their last use, inputs included.

    Its ops go straight to their kernels: what has a derivative is settled, and ops written in Python save half a call.
    """
    from torch.fx.graph import _BoxedCodeGen

    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()

    def run(values: list[Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return graph.forward(values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def aot_autograd(module: fx.GraphModule, inputs: Any, **settings: Any) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd as dynamo_aot_autograd

    return dynamo_aot_autograd(**settings)(module, inputs)


def default_partition(*args: Any, **kwargs: Any) -> Any:
    from torch._functorch.partitioners import default_partition as partition

    return partition(*args, **kwargs)


def min_cut_partition(*args: Any, **kwargs: Any) -> Any:
    from torch._functorch.partitioners import min_cut_rematerialization_partition as partition

    return partition(*args, **kwargs)


def compile_fx_inner(graph: fx.GraphModule, values: Any, *args: Any, keep_order: bool = False, **kwargs: Any) -> Any:
    """Inductor's own; `keep_order` keeps nodes where passes put them as far as fusion allows."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner as inner

    kept = {"reorder_for_peak_memory": False, "reorder_for_locality": False} if keep_order else {}
    with config.patch(kept):
        return inner(graph, values, *args, **kwargs)


def call_through(compiled: Any, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put something around the calls of what Inductor compiled."""
    compiled.current_callable = around(compiled.current_callable)


def decompositions(*ops: Any) -> dict[Any, Callable[..., Any]]:
    """torch's own, for these ops; an op stands for all of its overloads."""
    from torch._decomp import get_decompositions

    return dict(get_decompositions(ops))


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor(
    module: fx.GraphModule,
    inputs: Any,
    inner: Callable[..., Any],
    joint: Callable[[fx.GraphModule], None],
    key: str,
    reuse_autograd: bool,
) -> Callable[..., Any]:
    """Inductor with our passes inside, and `key` in its cache key."""
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Joint(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            # Inductor runs its joint passes on inference graphs too; those have no tangents and are not joint.
            if any(n.name.startswith("tangents") for n in graph.find_nodes(op="placeholder")):
                module = graph.owning_module
                assert module is not None
                joint(module)

        def uuid(self) -> str:
            return f"turbogr-{key}"

    # Negatives drawn in the graph and dropout must be eager's: same seed, same numbers.
    patches = {"joint_custom_pre_pass": Joint(), "fallback_random": True}
    # The cache of AOTAutograd skips the joint and post-grad graphs altogether; off while somebody wants to see them.
    with functorch_config.patch(enable_autograd_cache=functorch_config.enable_autograd_cache and reuse_autograd):
        compiled: Any = compile_fx(module, inputs, inner_compile=inner, config_patches=patches)
    return compiled


def cpp_compiler() -> str:
    """The C++ compiler Inductor would use, or ''."""
    import shutil

    from torch._inductor import config

    wanted = config.cpp.cxx
    candidates = [c for c in (wanted if isinstance(wanted, (list, tuple)) else [wanted]) if c]
    return next((path for c in [*candidates, "g++", "clang++"] if (path := shutil.which(c))), "")


# --- TORCH_TRACE -------------------------------------------------------------------------------------


def trace_enabled() -> bool:
    from torch._logging._internal import trace_log

    # torch's own handler is always there, and writes only where TORCH_TRACE names a directory.
    return any(getattr(handler, "root_dir", True) for handler in trace_log.handlers)


def trace_artifact(name: str, encoding: str, payload: Any) -> None:
    trace_structured("artifact", lambda: {"name": name, "encoding": encoding}, payload_fn=lambda: payload)


# --- running and faking ------------------------------------------------------------------------------


def fake_inputs(inputs: Any) -> list[Any]:
    """Fake twins of real tensors, static sizes, with a shape environment for data-dependent ones."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    return [mode.from_tensor(x, static_shapes=True) if isinstance(x, torch.Tensor) else x for x in inputs]


def run_backward(result: Any) -> None:
    """Backward of everything differentiable in a result; the user's `.grad` stays as it is."""
    from torch.utils._pytree import tree_leaves

    outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.requires_grad]
    leaves = _leaves([x.grad_fn for x in outputs])
    if leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs], allow_unused=True)


def _leaves(functions: list[Any]) -> list[torch.Tensor]:
    """Tensors at which the autograd graph ends."""
    seen, found = set(), []
    while functions:
        fn = functions.pop()
        if fn is None or fn in seen:
            continue
        seen.add(fn)
        if hasattr(fn, "variable"):
            found.append(fn.variable)
        functions += [following for following, _ in fn.next_functions]
    return found


# --- graphs from Dynamo ------------------------------------------------------------------------------


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


def new_row_count(mode: FakeTensorMode, limit: int | None, least: int = 1) -> torch.SymInt:
    """A size that only the run knows, at least one (or `least`) and at most `limit`."""
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    env = mode.shape_env
    assert env is not None
    with env.ignore_fresh_unbacked_symbols():
        count = env.create_unbacked_symint()
    _constrain_range_for_size(count, min=least, max=limit)
    return count


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


# --- tracing beside a compilation --------------------------------------------------------------------

_NOISY = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


def named_symbol(env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    """A backed symbolic size for traces that are not part of a compilation."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(name)
    symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
    size = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)
    return size


def new_fake_mode() -> FakeTensorMode:
    """For symbols that are no business of the compilation under way."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def symbolic_int(env: ShapeEnv, expression: Any) -> Any:
    """A size that is an expression of known symbols."""
    hint = env.size_hint(expression)
    return env.create_symintnode(expression, hint=None if hint is None else int(hint))


def propagate(module: fx.GraphModule, mode: FakeTensorMode, values: Any) -> None:
    """Describe each value of a graph anew, from fake inputs of a mode."""

    class Describe(fx.Interpreter):
        def run_node(self, node: fx.Node) -> Any:
            result = super().run_node(node)
            if node.op == "get_attr" and isinstance(result, torch.Tensor):
                result = mode.from_tensor(_plain(result), static_shapes=True)
            node.meta.pop("unbacked_bindings", None)  # names of another environment
            node.meta["val"] = result
            return result

    with mode:
        Describe(module).run(*values)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """A tensor of no fake mode, to make one of another from."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, FakeTensor) else x


def compile_parts(
    module: fx.GraphModule, takes: Callable[[fx.Node], bool], compile_part: Callable[[fx.GraphModule], Any]
) -> fx.GraphModule:
    """The largest connected parts made of nodes that `takes` are replaced by what `compile_part` makes of each."""
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import OperatorSupportBase

    class Takes(OperatorSupportBase):
        def is_node_supported(self, submodules: Any, node: fx.Node) -> bool:
            return node.op == "call_function" and takes(node)

    whole = CapabilityBasedPartitioner(module, Takes(), allows_single_node_partition=True).partition_and_fuse()
    for node in list(whole.graph.find_nodes(op="call_module")):
        assert isinstance(node.target, str)
        part = getattr(whole, node.target)
        _inputs_first(part.graph)
        setattr(whole, node.target, _Called(compile_part(part)))
    return whole


def _inputs_first(graph: fx.Graph) -> None:
    """Parts are made with their inputs where they are first used."""
    inputs = graph.find_nodes(op="placeholder")
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in inputs:
        first.prepend(node)


def process_group(group: Any) -> Any:
    """What a functional collective names its group by, as the group."""
    from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

    return _resolve_process_group(GroupName(group)) if isinstance(group, str) else group


def group_tag(group: Any) -> str:
    """With the ranks, the name of a group that torchair writes down."""
    from torch.distributed.distributed_c10d import _get_group_tag

    return _get_group_tag(process_group(group))


def group_of(tag: str, ranks: list[int]) -> Any:
    """The process group that torchair wrote down so, or None."""
    from torch.distributed.distributed_c10d import _find_pg_by_ranks_and_tag

    return _find_pg_by_ranks_and_tag(tag, ranks)


def name_group(group: Any, backend: Any, name: str) -> None:
    """Make a process group written in Python known to functional collectives; what it lacks, `backend` does."""
    group._register_backend(torch.device("cpu"), torch.distributed.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(name)


def group_timeout(group: Any) -> Any:
    """How long ranks of a group wait for each other; None where its backend does not say."""
    try:
        return group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None


def default_store() -> Any:
    """Where the ranks of the job can leave words for each other, apart from collectives."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def surely_contiguous(x: torch.Tensor) -> bool:
    """False where it depends on a size that is not known."""
    from torch._prims_common import is_contiguous_or_false

    return is_contiguous_or_false(x)


def is_alias(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, fake ones too, share memory."""
    return bool(getattr(torch._C, "_is_alias_of")(a, b))  # noqa: B009  (the stubs do not know it)


def version_of(x: torch.Tensor) -> int | None:
    """Grows with every write to the tensor's memory through torch; None where torch does not count them."""
    return None if x.is_inference() else x._version


class _Called(torch.nn.Module):
    """A function where a graph expects a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


@contextmanager
def tracing_with(mode: FakeTensorMode) -> Iterator[None]:
    """As if a compilation with that fake mode were under way, and no other."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with tracing(TracingContext(mode)), unset_fake_temporarily():
        yield


@contextmanager
def trying(env: ShapeEnv | None = None) -> Iterator[None]:
    """Run fake tensors through code that may not fit them. A wish for a guard on `env` raises instead, and torch
    logs nothing: the caller says what came of it."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    were = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        with env.error_on_new_guards() if env is not None else nullcontext(), ignore_fresh_unbacked(env):
            yield
    finally:
        for logger, was in zip(loggers, were, strict=True):
            logger.disabled = was


@contextmanager
def outside_compilation() -> Iterator[None]:
    """Hide the compilation that may be under way: its fake mode is not the one of the tensors used here."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with tracing(None), unset_fake_temporarily():
        yield


def without_autocast() -> AbstractContextManager[Any]:
    return torch._C._DisableAutocast()


def is_erased(node: fx.Node) -> bool:
    return node._erased
