"""Converters that torchair lacks, for ops GE has a twin of."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from .exchanges import run_without_npu

aten = torch.ops.aten


def register(torchair: ModuleType) -> None:
    from torchair._ge_concrete_graph import ge_apis as ge

    run_without_npu()
    converter = torchair.register_fx_node_ge_converter

    @converter(aten.silu_backward.default)
    def silu_backward(grad_output: Any, self: Any, meta_outputs: Any = None) -> Any:
        return ge.SwishGrad(grad_output, self, ge.Swish(self), scale=1.0)

    @converter(aten.amax.default)
    def amax(self: Any, dim: Any = (), keepdim: bool = False, meta_outputs: Any = None) -> Any:
        return ge.ReduceMax(self, list(dim), keep_dims=keepdim)

    @converter(aten.amin.default)
    def amin(self: Any, dim: Any = (), keepdim: bool = False, meta_outputs: Any = None) -> Any:
        return ge.ReduceMin(self, list(dim), keep_dims=keepdim)
