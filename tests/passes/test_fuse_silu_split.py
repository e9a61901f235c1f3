"""fuse-silu-split: which cuts it finds, also behind a choice of rows, and what it says of others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from turbogr_compile.graph.shapes import real_inputs
from turbogr_compile.passes.fuse_silu_split import FuseSiluSplit
from turbogr_compile.testing import assert_rewrites, assert_unchanged, run_passes, trace_graph

ops = torch.ops.turbogr
PASS = [FuseSiluSplit()]
X, ROWS = "f64[b, n, 12]", "f64[t, 12] i64[k]"


def mixed(*parts):
    """Something of each part, so that none is dead and no two are mistaken for each other."""
    return torch.cat([(i + 1) * part for i, part in enumerate(parts)], -1)


def fused(sizes):
    return lambda x: mixed(*ops.silu_split(x, sizes))


CUTS = {
    "chunk": (lambda x: mixed(*F.silu(x).chunk(4, -1)), [3, 3, 3, 3]),
    "split": (lambda x: mixed(*F.silu(x).split(6, -1)), [6, 6]),
    "a shorter last part": (lambda x: mixed(*F.silu(x).split(5, 2)), [5, 5, 2]),
    "sizes": (lambda x: mixed(*F.silu(x).split([1, 4, 7], -1)), [1, 4, 7]),
    "slices": (lambda x: mixed((y := F.silu(x))[..., :5], y[..., 5:10], y[..., -2:]), [5, 5, 2]),
    "slices in another order": (lambda x: mixed((y := F.silu(x))[..., 5:], y[..., :5]), [5, 7]),
    "slices of a split": (lambda x: mixed(*(y := F.silu(x)).split(6, -1), y[..., 6:]), [6, 6]),
}


@pytest.mark.parametrize("name", CUTS)
def test_cuts_become_one_op(name):
    fn, sizes = CUTS[name]
    module = trace_graph(fn, X)
    run_passes(module, PASS)
    called = [n for n in module.graph.nodes if n.op == "call_function"]
    (split,) = [n for n in called if n.target is ops.silu_split.default]
    assert list(split.args[1]) == sizes
    assert not [n for n in called if n.target in (torch.ops.aten.silu.default, torch.ops.aten.split.Tensor)]
    (x,) = real_inputs(X)
    x.requires_grad_()
    found, wanted = module(x), fn(x)
    torch.testing.assert_close(found, wanted)
    slope = torch.randn_like(wanted)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, slope) for y in (found, wanted)))


def test_graph_is_what_one_would_write():
    for name in ("chunk", "sizes", "slices"):
        fn, sizes = CUTS[name]
        assert_rewrites(fn, fused(sizes), passes=PASS, inputs=X)


def test_parts_that_nobody_reads_are_cut_all_the_same():
    def before(x):
        _, _, q, k = F.silu(x).chunk(4, -1)
        return q * k

    def expected(x):
        _, _, q, k = ops.silu_split(x, [3, 3, 3, 3])
        return q * k

    assert_rewrites(before, expected, passes=[*PASS, "eliminate-dead-code"], inputs=X)


def test_rows_are_picked_from_the_parts_that_need_it():
    """A last layer asks for fewer queries and gates than keys and values."""

    def before(x, rows):
        y = F.silu(x)
        u, _, q, _ = ops.gather_rows(y, rows).chunk(4, -1)
        _, v, _, k = y.chunk(4, -1)
        return u * q, v + k

    def expected(x, rows):
        u, v, q, k = ops.silu_split(x, [3, 3, 3, 3])
        return ops.gather_rows(u, rows) * ops.gather_rows(q, rows), v + k

    assert_rewrites(before, expected, passes=PASS, inputs=ROWS)


MISSES = {
    "all of it read": (lambda x: mixed(*(y := F.silu(x)).chunk(4, -1), y), "not only its parts"),
    "returned": (lambda x: ((y := F.silu(x)), *(p * 2 for p in y.chunk(2, -1))), "the caller"),
    "columns left out": (lambda x: mixed((y := F.silu(x))[..., :5], y[..., 6:]), "do not cover"),
    "columns twice": (lambda x: mixed((y := F.silu(x))[..., :7], y[..., 5:]), "do not cover"),
    "every other column": (lambda x: mixed((y := F.silu(x))[..., ::2], y[..., :6], y[..., 6:]), "not only its parts"),
    "two ways to cut": (lambda x: mixed(*(y := F.silu(x)).split(6, -1), *y.split(4, -1)), "do not cover"),
    "another dim": (lambda x: mixed(*(y := F.silu(x)).split(6, -1)) + y.split(1, 0)[0], "not only its parts"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_say_why(name):
    fn, text = MISSES[name]
    module = trace_graph(fn, "f64[2, 3, 12]")
    (context,) = run_passes(module, PASS)
    assert not context.rewrites and [r.id for r in context.remarks] == ["silu-not-split"]
    assert text in context.remarks[0].text and "F.silu" in str(context.remarks[0].line)


def test_widths_that_are_not_fixed_stay():
    def fn(x):
        return mixed(*F.silu(x).split([4, x.shape[-1] - 4], -1))

    assert_unchanged(fn, passes=PASS, inputs="f32[b, d]")


def test_a_silu_that_nobody_cuts_is_no_business_of_this_pass():
    module = trace_graph(lambda x: F.silu(x) * x, X)
    (context,) = run_passes(module, PASS)
    assert not context.rewrites and not context.remarks
