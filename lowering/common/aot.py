"""AOTAutograd around a function that compiles one graph: the road of targets that do not bring their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ... import _torch
from ...graph.phases import Role
from ...pipeline.target import Hooks
from ...runtime.ranks.agreement import agreeing

GraphCompiler = Callable[[fx.GraphModule, Sequence[Any], Role], Callable[..., Any]]


def aot(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    hooks: Hooks,
    compile_graph: GraphCompiler,
    partition: Callable[..., Any],
    decompositions: dict[Any, Any] | None = None,
) -> Callable[..., Any]:
    """Forward and backward graphs through the compiler's passes and then `compile_graph` (boxed)."""

    def compiler(role: Role) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
        def run(graph: fx.GraphModule, values: Sequence[Any]) -> Callable[..., Any]:
            _torch.donate_nothing()
            hooks.post_grad(graph, role, values)
            gate = agreeing(graph.graph)
            return gate(compile_graph(graph, values, role))

        return run

    def partition_joint(joint: fx.GraphModule, values: Sequence[Any], **kwargs: Any) -> Any:
        hooks.joint(joint)
        return partition(joint, values, **kwargs)

    return _torch.aot_autograd(
        module,
        inputs,
        fw_compiler=compiler(Role.FORWARD),
        bw_compiler=compiler(Role.BACKWARD),
        inference_compiler=compiler(Role.INFERENCE),
        partition_fn=partition_joint,
        decompositions=decompositions or {},
    )
