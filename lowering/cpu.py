"""Target `cpu`: kernels called one by one, or Inductor.

Calling kernels is the default: what is worth fusing here has kernels of its own, matrix products dominate the rest, and
a training step compiles in seconds. Inductor fuses elementwise ops for which nobody has written a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..graph.nodes import is_collective
from ..graph.phases import Role
from ..pipeline.target import BaseTarget, Hooks, Missing
from ..runtime.entrance import run_behind_entrance
from ..runtime.ranks.agreement import agreeing
from .common.aot import aot
from .common.pipelines import PACKING, SCHEDULE

aten = torch.ops.aten
# Packing, then what puts the graph into C++ kernels.
FUSION = "fuse-sampling, fuse-loss, fuse-silu-split, fuse-norm-gate, fuse-embedding"
DEFAULT_PIPELINE = f"{PACKING}, {FUSION}, eliminate-dead-code, {SCHEDULE}"


@dataclass(frozen=True)
class Cpu(BaseTarget):
    def missing(self, codegen: str) -> list[Missing]:
        if codegen == "inductor" and not _torch.cpp_compiler():
            return [Missing("C++ compiler", "install g++, or use options={'codegen': 'aten'}, which needs none")]
        return []

    def decompositions(self, codegen: str) -> dict[Any, Callable[..., Any]]:
        return _torch.inductor_decompositions() if codegen == "inductor" else {}

    def lower(self, module: fx.GraphModule, inputs: Sequence[Any], codegen: str, hooks: Hooks) -> Callable[..., Any]:
        return (_inductor if codegen == "inductor" else _aten)(module, inputs, hooks)


def _aten(module: fx.GraphModule, inputs: Sequence[Any], hooks: Hooks) -> Callable[..., Any]:
    """Each ATen op by its own kernel: compiles at once, and loses nothing where large kernels dominate."""

    def compile_graph(graph: fx.GraphModule, values: Sequence[Any], role: Role) -> Callable[..., Any]:
        # Kernels may return other strides than their fake twins promise; then a view is not possible, a reshape is.
        for node in graph.graph.nodes:
            if node.target in (aten.view.default, aten._unsafe_view.default):
                node.target = aten.reshape.default
        return run_behind_entrance(graph)

    # Recomputing to save memory pays only where the recomputation is fused; here every op is a kernel of its own.
    return aot(module, inputs, hooks, compile_graph, _torch.default_partition)


def _inductor(module: fx.GraphModule, inputs: Sequence[Any], hooks: Hooks) -> Callable[..., Any]:
    def inner(graph: fx.GraphModule, values: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        role = (
            Role.BACKWARD
            if kwargs.get("is_backward")
            else (Role.INFERENCE if kwargs.get("is_inference") else Role.FORWARD)
        )
        _torch.donate_nothing()
        hooks.post_grad(graph, role, values)
        if not any(is_collective(node) for node in graph.graph.nodes):
            return _torch.compile_fx_inner(graph, values, *args, **kwargs)
        gate = agreeing(graph.graph)
        compiled = _torch.compile_fx_inner(graph, values, *args, keep_order=True, **kwargs)
        _torch.call_through(compiled, gate)
        return compiled

    # Out of a cache, graphs would come without the gate, on some ranks but not on others.
    reuse = not hooks.watched and not any(is_collective(node) for node in module.graph.nodes)
    return _torch.inductor(module, inputs, inner, hooks.joint, hooks.key, reuse_autograd=reuse)


TARGET = Cpu(
    name="cpu",
    summary="any CPU: turbogr's and ATen's kernels one by one, or Inductor",
    codegens=("aten", "inductor"),
    default_pipeline=DEFAULT_PIPELINE,
)
