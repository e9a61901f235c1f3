"""torch.compile through torchair and the GE simulator, as a target would do it: own AOTAutograd, both graphs kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from turbogr_compile.lowering.ge import graph
from turbogr_compile.lowering.torchair import load as torchair

aten = torch.ops.aten

needs_torchair = pytest.mark.skipif(
    torchair.find() is None,
    reason="torchair not found: unpack a wheel of torch_npu and set TURBOGR_TORCHAIR (turbogr doctor --fetch-torchair)",
)


def index_put(
    self: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False
) -> Any:
    """torchair converts no index_put: integer indices of the leading axes, as rows that are added or written."""
    if any(i is None or i.dtype == torch.bool for i in indices):
        return NotImplemented
    lead, rest = self.shape[: len(indices)], list(self.shape[len(indices) :])
    place = indices[0]
    for size, more in zip(lead[1:], indices[1:], strict=True):
        place = place * size + more
    rows = place.reshape(-1)
    updates = values.expand([*place.shape, *rest]).reshape([-1, *rest])
    flat = self.reshape([-1, *rest])
    if accumulate:
        return flat.index_add(0, rows, updates).reshape(self.shape)
    return flat.scatter(0, rows.reshape([-1] + [1] * len(rest)).expand_as(updates), updates).reshape(self.shape)


def select_backward(grad: torch.Tensor, input_sizes: Sequence[int], dim: int, index: int) -> torch.Tensor:
    """torchair's converter writes the selected row into memory that nobody has cleared."""
    return torch.select_scatter(grad.new_zeros(input_sizes), grad, dim, index)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What these tests' models need and torchair has no converter for, or a wrong one."""
    known = get_decompositions([aten.binary_cross_entropy_with_logits, aten.silu_backward])
    ours = {aten.index_put.default: index_put, aten.select_backward.default: select_backward}
    return {**torchair.decompositions(), **known, **ours}


class Simulated:
    """A compiled function or module, with the GE graphs it consists of."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        dynamic: bool = False,
        view_optimize: bool = False,
        take_apart: dict[Any, Any] | None = None,
        configure: Callable[[Any], None] | None = None,
    ) -> None:
        """`view_optimize` is off, because torchair's loses transposes; test_view_fault shows it."""
        self.compiled: list[Any] = []
        self.torchair = torchair.simulated()
        self._take_apart = decompositions() if take_apart is None else take_apart
        self._config = self.torchair.CompilerConfig()
        self._config.experimental_config.enable_view_optimize = view_optimize
        if configure:
            configure(self._config)
        torch._dynamo.reset()
        self._run = torch.compile(function, backend=self._backend, dynamic=dynamic, fullgraph=True)

    def __call__(self, *arguments: Any) -> Any:
        # Numbers such as an epsilon are constants; as symbols they make Dynamo trace twice.
        with torch._dynamo.config.patch(specialize_float=True):
            return self._run(*arguments)

    @property
    def graphs(self) -> list[graph.Graph]:
        return [graph.of(compiled) for compiled in self.compiled]

    @property
    def types(self) -> set[str]:
        return {op for found in self.graphs for op in found.types}

    def _backend(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with torchair.patched():
            return aot_autograd(
                fw_compiler=self._compile,
                bw_compiler=self._compile,
                inference_compiler=self._compile,
                decompositions=self._take_apart,
                partition_fn=min_cut_rematerialization_partition,
                keep_inference_input_mutations=True,
            )(module, inputs)

    def _compile(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with torchair.patched():
            self.compiled.append(self.torchair.get_compiler(self._config)(module, inputs))
        return make_boxed_func(self.compiled[-1])
