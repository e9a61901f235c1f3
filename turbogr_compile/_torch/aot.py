"""AOTAutograd and Inductor: partitions, decompositions, calling conventions, parts of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = [
    "aot_autograd",
    "boxed",
    "call_through",
    "compile_fx_inner",
    "compile_parts",
    "cpp_compiler",
    "decompositions",
    "default_partition",
    "donate_nothing",
    "inductor",
    "inductor_decompositions",
    "min_cut_partition",
    "run_plainly",
]


def boxed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Calling convention in which the callee may free its inputs early."""
    from functorch.compile import make_boxed_func

    return make_boxed_func(fn)


def run_plainly(graph: fx.GraphModule) -> Callable[..., Any]:
    """A graph of AOTAutograd as a boxed function: values are freed after their last use, inputs included.

    Its ops go straight to their kernels: what has a derivative is settled, and ops written in Python save half a call.
    Casts are among them: a backward that runs inside of somebody's autocast must not get others.
    """
    from torch.fx.graph import _BoxedCodeGen

    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()

    def run(values: list[Any]) -> Any:
        with torch._C._DisableAutocast(), torch._C._AutoDispatchBelowAutograd():
            return graph.forward(values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def aot_autograd(module: fx.GraphModule, inputs: Any, **settings: Any) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd as dynamo_aot_autograd

    return dynamo_aot_autograd(**settings)(module, inputs)


def donate_nothing() -> None:
    """Say of the graphs under compilation that the backward writes into no saved tensor, so that it may run twice.

    AOTAutograd takes donation for granted wherever it is possible, and then refuses backward(retain_graph=True).
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


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


class _Called(torch.nn.Module):
    """A function where a graph expects a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)
