"""Costs are formulas in symbolic sizes; what has no formula is unknown, never zero."""

from __future__ import annotations

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from turbogr_compile.graph import costs
from turbogr_compile.graph.shapes import real_inputs
from turbogr_compile.testing import trace_graph

CASES = {
    "linear": (lambda x, w: F.linear(x, w), "f32[b, n, d] f32[k, d]"),
    "matmul": (lambda x, y: x @ y, "f32[b, h, n, d] f32[b, h, d, m]"),
    "bmm": (torch.bmm, "f32[b, n, d] f32[b, d, m]"),
    "einsum": (lambda q, k: torch.einsum("bnhd,bmhd->bhnm", q, k), "f32[b, n, h, d] f32[b, m, h, d]"),
    "attention": (F.scaled_dot_product_attention, "f32[b, h, n, d] f32[b, h, m, d] f32[b, h, m, k]"),
    "conv1d": (F.conv1d, "f32[b, d, n] f32[k, d, 1]"),
}


@pytest.mark.parametrize("name", CASES)
def test_formula_agrees_with_torchs_own_counter(name):
    fn, inputs = CASES[name]
    cost = costs.cost(trace_graph(fn, inputs).graph)
    sizes = {"b": 2, "n": 3, "d": 4, "k": 5, "h": 2, "m": 7}
    real = real_inputs(inputs, sizes)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        fn(*real)
    static = costs.cost(trace_graph(fn, real).graph)
    assert static.flops == counter.get_total_flops() and static.flops > 0
    assert cost.flops.free_symbols and not cost.unknown


def test_bytes_count_reads_and_writes_but_not_views():
    cost = costs.cost(trace_graph(lambda x: x.reshape(-1).exp(), "f32[4, 8]").graph)
    assert cost.bytes == 2 * 4 * 8 * 4


def test_op_without_a_formula_is_unknown():
    with torch.library._scoped_library("turbogr_test_stats", "FRAGMENT") as lib:
        lib.define("mystery(Tensor x) -> Tensor")
        lib.impl("mystery", lambda x: x.clone(), "CompositeExplicitAutograd")
        cost = costs.cost(trace_graph(lambda x: torch.ops.turbogr_test_stats.mystery(x), "f32[4]").graph)
    assert dict(cost.unknown) == {"turbogr_test_stats.mystery": 1}


def test_numbers_at_the_sizes_seen():
    graph = trace_graph(lambda x, y: x @ y, "f32[a=10, b=20] f32[b=20, c=5]").graph
    assert costs.at_hints(costs.cost(graph).flops, graph) == 2 * 10 * 20 * 5
    assert costs.at_hints(sympy.Symbol("u0"), graph) is None
    assert [costs.human(v) for v in (None, 0, 1234, 2.5e9)] == ["?", "0", "1.23 k", "2.5 G"]
