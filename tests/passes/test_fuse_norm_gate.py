"""fuse-norm-gate: before and expected, near misses, and the generated tests of each rule."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from turbogr_compile.passes.fuse_norm_gate import fuse_norm_gate, norm_gate, plain_norm_gate, scaled_norm_gate
from turbogr_compile.testing import assert_near_miss, assert_rewrites, assert_unchanged, rule_tests

ops = torch.ops.turbogr
TestNormGate = rule_tests(norm_gate)
TestScaledNormGate = rule_tests(scaled_norm_gate)
TestPlainNormGate = rule_tests(plain_norm_gate)

ROWS = "f32[b, n, d] f32[b, n, d] f32[d] f32[d]"


@pytest.mark.parametrize("inputs", [ROWS, ROWS.replace("b, n, ", ""), ROWS.replace("f32", "bf16")])
def test_either_order_becomes_one_op(inputs):
    def expected(x, gate, w, b):
        return ops.norm_gate(x, gate, w, b, 1e-3)[0]

    def before(x, gate, w, b):
        return F.layer_norm(x, w.shape, w, b, 1e-3) * gate

    def turned(x, gate, w, b):
        return gate * F.layer_norm(x, w.shape, w, b, 1e-3)

    for fn in (before, turned):
        assert_rewrites(fn, expected, rule=fuse_norm_gate, inputs=inputs)


def test_modules_without_weight_or_bias():
    def before(x, gate, w):
        return gate * F.layer_norm(x, (8,)) + gate * F.layer_norm(x, (8,), w)

    def expected(x, gate, w):
        return ops.norm_gate(x, gate, None, None, 1e-5)[0] + ops.norm_gate(x, gate, w, None, 1e-5)[0]

    assert_rewrites(before, expected, rule=fuse_norm_gate, inputs="f32[t, 8] f32[t, 8] f32[8]")


def norm(x, w, b):
    return F.layer_norm(x, w.shape, w, b)


NEAR = {
    "norm used elsewhere": (lambda x, g, w, b: (y := norm(x, w, b)) * g + y, "escape", ROWS, ""),
    "gate of rows": (lambda x, g, w, b: norm(x, w, b) * g, "shape", "f32[t, 8] f32[t, 1] f32[8] f32[8]", ""),
    "gate of another shape": (
        lambda x, g, w, b: norm(x, w, b) * g, "when", "f32[t, n, 8] f32[n, 8] f32[8] f32[8]", "provably of one shape",
    ),
    "gate of another type": (
        lambda x, g, w, b: norm(x, w, b) * g, "when", "f64[t, 8] f32[t, 8] f64[8] f64[8]", "the gate is torch.float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_say_why(name):
    fn, kind, inputs, text = NEAR[name]
    assert_near_miss(fn, norm_gate, kind, inputs, text=text)


def test_norms_over_two_dims_and_numbers_stay():
    def fn(x, g):
        return F.layer_norm(x, x.shape[1:]) * g + F.layer_norm(x, x.shape[-1:]) * 2.0

    assert_unchanged(fn, rule=fuse_norm_gate, inputs="f32[t, 3, 8] f32[t, 3, 8]")
