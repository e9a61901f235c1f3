"""Write attention as the AscendC kernels take it: times in 32 bits, from the start of a sequence; biases in fp32.

Timestamps of 64 bits become distances to the first key of their sequence, which fit 32 bits: only gaps matter, and the
bounds of buckets fit as well.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..graph.phases import Phase
from ..kernels.jagged_attention import Inputs
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass

aten = torch.ops.aten
FAR = (1 << 30) - 1  # as far as times of a sequence are told apart
NEVER = (1 << 31) - 1  # a bound that no gap reaches


@register
@dataclass(frozen=True)
class NarrowAttention(Pass):
    """Write attention as the AscendC kernels take it: times in 32 bits, biases in fp32."""

    name = "narrow-attention"
    phase = Phase.PRE_GRAD
    after = ("pack-rows", "eliminate-common", "simplify-masks")
    before = ("eliminate-dead-code",)

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.turbogr.jagged_attention.default):
            a = Inputs(*node.args)
            if not _wide(a):
                continue
            with ctx.rewrite("32 bits", node), graph.inserting_before(node):
                node.args = tuple(_narrowed(graph, a))


def _wide(a: Inputs) -> bool:
    tables = [t for t in (a.position_bias, a.time_bias, a.bias) if t is not None]
    times = a.query_times is not None and _dtype(a.query_times) == torch.int64
    return times or any(_dtype(t) != torch.float32 for t in tables)


def _dtype(node: Any) -> torch.dtype:
    found: torch.dtype = node.meta["val"].dtype
    return found


def _narrowed(graph: fx.Graph, a: Inputs) -> Inputs:
    def call(target: Any, *arguments: Any, **named: Any) -> Any:
        return graph.call_function(target, arguments, named)

    def cast(x: Any, dtype: torch.dtype) -> Any:
        return x if x is None or _dtype(x) == dtype else call(aten.to.dtype, x, dtype)

    names = ("bias", "position_bias", "time_bias")
    a = a._replace(**{name: cast(getattr(a, name), torch.float32) for name in names})
    if a.query_times is None or _dtype(a.query_times) != torch.int64:
        return a

    def relative(times: Any, offsets: Any) -> Any:
        """To the first key of the same sequence."""
        rows = call(aten.arange.default, call(aten.sym_size.int, times, 0), device=times.meta["val"].device)
        counted = call(aten.sub.Tensor, call(aten.searchsorted.Tensor, offsets, rows, right=True), 1)
        sequences = call(aten.clamp.default, counted, 0)
        gaps = call(aten.sub.Tensor, times, call(aten.index_select.default, origins, 0, sequences))
        return call(aten.to.dtype, call(aten.clamp.default, gaps, -FAR, FAR), torch.int32)

    last = call(aten.sym_size.int, a.key_times, 0)
    first_keys = call(aten.clamp.default, a.key_offsets, None, call(operator.sub, last, 1))
    origins = call(aten.index_select.default, a.key_times, 0, first_keys)
    bounds = call(aten.to.dtype, call(aten.clamp.default, a.time_bounds, 0, NEVER), torch.int32)
    return a._replace(
        time_bounds=bounds,
        query_times=relative(a.query_times, a.query_offsets),
        key_times=relative(a.key_times, a.key_offsets),
    )
