"""fuse-embedding: lookups become the kernel's, in the flavours it knows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from turbogr_compile.passes.fuse_embedding import fuse_embedding
from turbogr_compile.testing import assert_near_miss, assert_rewrites, assert_unchanged, rule_tests

ops = torch.ops.turbogr
TestFuseEmbedding = rule_tests(fuse_embedding, inputs="float[8, d], i64[b, n]", literals={"padding_idx": 0})


@pytest.mark.parametrize("ids", ["i64[b, n]", "i64[t]", "i32[b]", "i64[]"])
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_lookups_become_the_kernel(ids, padding):
    def before(weight, ids):
        return F.embedding(ids, weight, padding_idx=padding)

    def expected(weight, ids):
        return ops.embedding(weight, ids, {None: -1, 0: 0, -1: 9}[padding])

    assert_rewrites(before, expected, rule=fuse_embedding, inputs=f"f32[10, d] {ids}")


@pytest.mark.parametrize("flag", ["sparse", "scale_grad_by_freq"])
def test_other_gradients_are_not_the_kernels(flag):
    def fn(weight, ids):
        return F.embedding(ids, weight, **{flag: True})

    assert_near_miss(fn, fuse_embedding, "literal", "f32[v, d] i64[b]", line="F.embedding")


def test_a_norm_that_writes_to_the_table_stays():
    def fn(weight, ids):
        return F.embedding_bag(ids, weight, mode="mean")

    assert_unchanged(fn, rule=fuse_embedding, inputs="f32[v, d] i64[b, n]")
