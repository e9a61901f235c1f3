"""remove-noops, eliminate-common, fold-masks, eliminate-dead-code: what they do, and what they must leave alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import turbogr_compile
from turbogr_compile.runtime.prologue import providers
from turbogr_compile.testing import assert_rewrites, assert_unchanged, run_passes, trace_graph

XY = "f32[a, b] f32[a, b]"


def ops(module):
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def test_noops_disappear():
    def before(x, y):
        h = F.dropout(x, 0.3, training=False).float().contiguous() * 1.0
        return h[:, :].expand(h.shape) @ y.T.reshape(y.shape[1], y.shape[0]).permute(0, 1)

    assert_rewrites(before, lambda x, y: x @ y.T, passes="remove-noops", inputs=XY)


def test_what_changes_something_stays():
    def fn(x, y):
        a = F.dropout(x, 0.3, training=True)
        return a.double().sum(), x[1:].sum(), x[:, ::2].sum(), (y * 1.5).sum(), y.expand(3, *y.shape).sum()

    assert_unchanged(fn, passes="remove-noops", inputs=XY)


def test_copy_the_caller_sees_keeps_its_own_memory():
    assert_unchanged(lambda x, y: (x.clone(), (y + 1).clone().reshape(-1)), passes="remove-noops", inputs=XY)


def test_integer_times_one_that_becomes_float_stays():
    assert_unchanged(lambda x: (x * 1.0).sum(), passes="remove-noops", inputs="i64[a]")


def test_equal_expressions_are_computed_once():
    def before(x, y):
        return (torch.exp(x) + torch.exp(x)) * torch.sum(y, dim=1, keepdim=True) + y.sum(1, keepdim=True)

    def expected(x, y):
        e, s = torch.exp(x), y.sum(1, keepdim=True)
        return (e + e) * s + s

    assert_rewrites(before, expected, passes="eliminate-common", inputs=XY)


def test_random_returned_and_differently_typed_values_are_not_merged():
    def fn(x, y):
        noise = torch.rand_like(x) + torch.rand_like(x)
        return noise.sum(), x + y, x + y, (torch.add(y, 1).sum() + torch.full_like(y, 1).sum())

    assert_unchanged(fn, passes="eliminate-common", inputs=XY)


def test_aranges_stay_apart():
    def fn(x):
        i, j = torch.arange(x.shape[0]), torch.arange(x.shape[0])
        return (i[:, None] >= j[None]).sum() + x.sum()

    assert_unchanged(fn, passes="eliminate-common", inputs="f32[8, 8]")


def test_mask_of_constants_is_evaluated_once():
    def fn(x):
        causal = torch.tril(torch.ones(6, 6, dtype=torch.bool))
        far = (torch.arange(6)[:, None] - torch.arange(6)[None]) > 3
        return x.masked_fill(~causal | far, -1e9).softmax(-1).sum(0)

    module = trace_graph(fn, "f32[6, 6]")
    run_passes(module, "fold-masks")
    assert ops(module) == [
        torch.ops.aten.masked_fill.Scalar, torch.ops.aten.softmax.int, torch.ops.aten.sum.dim_IntList,
    ]  # fmt: skip
    x = torch.randn(6, 6)
    torch.testing.assert_close(module(x, *[p([x]) for p in providers(module.graph)]), fn(x))


def test_expanded_mask_is_stored_once():
    def fn(x):
        mask = torch.tril(torch.ones(6, 6, dtype=torch.bool))[None].expand(x.shape[0], 6, 6)
        return x.masked_fill(~mask, 0.0), x.masked_fill(mask, 0.0)

    module = trace_graph(fn, "f32[3, 6, 6]")
    run_passes(module, "fold-masks")
    assert [tuple(v.shape) for p in providers(module.graph) for v in [p([])]] == [(6, 6), (1, 6, 6)]
    x = torch.randn(3, 6, 6)
    for actual, expected in zip(module(x, *[p([x]) for p in providers(module.graph)]), fn(x), strict=True):
        torch.testing.assert_close(actual, expected)


def test_equal_constants_share_one_input():
    def fn(x):
        first, second = (torch.tril(torch.ones(6, 6)) for _ in range(2))
        return (x * first).exp() * second

    module = trace_graph(fn, "f32[6, 6]")
    run_passes(module, "fold-masks")
    assert len(providers(module.graph)) == 1


def test_constant_too_large_is_left_with_a_remark():
    module = trace_graph(lambda x: x * torch.tril(torch.ones(6, 6)), "f32[6, 6]")
    (context,) = run_passes(module, "fold-masks{max_elements=8}")
    assert [r.id for r in context.remarks] == ["constant-too-large"] and not context.rewrites
    assert "torch.tril" in str(context.remarks[0].line)


def test_symbolic_sizes_are_not_constants():
    def fn(x):
        return x * torch.tril(torch.ones(x.shape[0], x.shape[0]))

    assert_unchanged(fn, passes="fold-masks", inputs="f32[a, a]")


def test_dead_values_go_but_random_ones_stay():
    def fn(x, y):
        x.exp().sum()
        torch.rand_like(y)
        return x + y

    module = trace_graph(fn, XY)
    run_passes(module, "eliminate-dead-code")
    assert [str(t) for t in ops(module)] == ["aten.rand_like.default", "aten.add.Tensor"]


def test_whole_default_pipeline_keeps_loss_and_gradients():
    def step(x, w, mask):
        h = F.dropout(x * 1.0, 0.0) @ w
        h = h * mask.unsqueeze(-1) * mask.unsqueeze(-1)
        return F.silu(h).pow(2).sum() + (h * torch.tril(torch.ones(5, 5))).sum()

    torch.manual_seed(0)
    x = torch.randn(3, 5, 5, dtype=torch.float64)
    mask = torch.rand(3, 5) > 0.5
    w1, w2 = (torch.eye(5, dtype=torch.float64).requires_grad_() for _ in range(2))
    expected = step(x, w1, mask)
    expected.backward()
    actual = turbogr_compile.compile(step, codegen="aten", verify="numeric", on_error="raise")(x, w2, mask)
    actual.backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(w2.grad, w1.grad)
