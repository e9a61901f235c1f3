"""The built-in rules: before and expected, near misses, and the four generated tests of each."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from turbogr_compile.passes import fold_views, recognize_activations, simplify_masks
from turbogr_compile.testing import assert_near_miss, assert_rewrites, assert_unchanged, rule_tests

TestTransposeTwice = rule_tests(fold_views.transpose_twice)
TestUnsqueezeSqueeze = rule_tests(fold_views.unsqueeze_squeeze)
TestNotNot = rule_tests(simplify_masks.not_not)
TestNotEqual = rule_tests(simplify_masks.not_equal)
TestNotThisId = rule_tests(simplify_masks.not_this_id)
TestZeroedTwice = rule_tests(simplify_masks.zeroed_twice)
TestSilu = rule_tests(recognize_activations.silu)
TestGelu = rule_tests(recognize_activations.gelu)


def test_views_that_cancel_disappear():
    def before(x):
        return x.transpose(0, 1).transpose(0, 1).unsqueeze(1).squeeze(1).relu()

    assert_rewrites(before, lambda x: x.relu(), rule=fold_views.fold_views, inputs="f32[a, b]")


def test_mask_multiplied_twice_with_broadcasting():
    def before(x, m):
        x = x * m.unsqueeze(-1)
        return (x * m.unsqueeze(-1)).sum()

    def expected(x, m):
        return (x * m.unsqueeze(-1)).sum()

    passes = "eliminate-common, simplify-masks"
    assert_rewrites(before, expected, passes=passes, inputs="f32[b, n, d] bool[b, n]")


def test_float_weights_are_not_masks():
    assert_unchanged(lambda x, w: x * w * w, rule=simplify_masks.simplify_masks, inputs="f32[b, n] f32[b, n]")


NEAR = [
    (recognize_activations.gelu, lambda x: x * 0.5 * (1.0 + torch.erf(x / 1.4)), "literal", "f32[a, b]"),
    (recognize_activations.silu, lambda x: (x * (gate := torch.sigmoid(x)), gate), "escape", "f32[a, b]"),
    (fold_views.transpose_twice, lambda x: x.transpose(0, 1).transpose(0, 2), "literal", "f32[a, b, c]"),
    (simplify_masks.zeroed_twice, lambda x, m: x * m * m, "dtype", "f32[a, b] f32[a, b]"),
]


@pytest.mark.parametrize(("rule", "fn", "kind", "inputs"), NEAR, ids=[f"{r.name}-{k}" for r, _, k, _ in NEAR])
def test_near_misses_say_why(rule, fn, kind, inputs):
    assert_near_miss(fn, rule, kind, inputs)


def test_recbole_gelu_becomes_one_op():
    def before(x):
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))

    assert_rewrites(before, F.gelu, rule=recognize_activations.gelu, inputs="f32[b, n, d]")
