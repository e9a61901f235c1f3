"""Embeddings against F.embedding, and both forms of their gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from turbogr_compile import _torch

from .layouts import COMPILED, LAYOUTS, threads
from .references import references

ops = torch.ops.turbogr
BOTH = pytest.mark.parametrize("of", [ops, references], ids=["op", "reference"])
COALESCE = pytest.mark.parametrize("coalesce", [ops.coalesce_rows, references.coalesce_rows], ids=["op", "reference"])
IDS = torch.tensor([[2, 0, 2], [4, 2, 0]])


@BOTH
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from([1, 3, 64, 70]),
    st.sampled_from([(), (0,), (7,), (2, 3)]),
    st.sampled_from([torch.int64, torch.int32]),
    st.integers(-1, 8),
)
def test_equals_embedding(of, count, width, shape, dtype, padding):
    padding = padding if padding < count else -1
    ids = torch.randint(0, count, shape, dtype=dtype)
    weight = torch.randn(count, width).double().requires_grad_()
    wanted = F.embedding(ids, weight, padding if padding >= 0 else None)
    assert torch.equal(of.embedding(weight.detach(), ids, padding), wanted)
    grad = torch.randn_like(wanted)
    (exact,) = torch.autograd.grad(wanted, weight, grad)
    torch.testing.assert_close(of.embedding_backward(grad, ids, count, padding), exact)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_halves_are_summed_in_single_precision(of, dtype):
    grad = torch.ones(4096, 9, dtype=dtype)
    found = of.embedding_backward(grad, torch.zeros(4096, dtype=torch.int64), 3, -1)
    assert found.dtype == dtype and (found[0] == 4096).all() and (found[1:] == 0).all()


@COMPILED
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_change_nothing(layout):
    weight, grad = torch.randn(5, 70), torch.randn(2, 3, 70)
    ids = IDS.T.contiguous().T
    assert torch.equal(ops.embedding(layout(weight), ids, -1), weight[IDS])
    found = ops.embedding_backward(layout(grad), ids, 5, 0)
    assert torch.equal(found, ops.embedding_backward(grad, IDS, 5, 0))
    for one, other in zip(
        ops.coalesce_rows(layout(grad.flatten(0, 1)), IDS.flatten()),
        ops.coalesce_rows(grad.flatten(0, 1), IDS.flatten()),
        strict=True,
    ):
        assert torch.equal(one, other)


# Rows by the thousand: several passes of the sort, and ids that occur often, rarely and never.
SKEWED = {
    "uniform": torch.randint(0, 10_000, (6000,)),
    "few": torch.randint(0, 3, (6000,)),
    "one": torch.zeros(6000, dtype=torch.int64),
    "skewed": (10_000 ** torch.rand(6000).double()).long() - 1,
    "ascending": torch.arange(6000) // 2,
    "descending": torch.arange(6000).flip(0),
}


@COMPILED
@pytest.mark.parametrize("ids", SKEWED.values(), ids=SKEWED)
def test_sums_are_in_the_order_of_positions_for_any_number_of_threads(ids):
    grad = torch.randn(6000, 130)
    exact = torch.zeros(10_000, 130)
    for at in range(0, 6000):
        exact[ids[at]] += grad[at]
    for count in (1, 2):
        with threads(count):
            assert torch.equal(ops.embedding_backward(grad, ids, 10_000, -1), exact)
            unique, sums = ops.coalesce_rows(grad, ids)
            assert torch.equal(unique, ids.unique()) and torch.equal(sums, exact[unique])


@COALESCE
@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 5, 2047, 2048, 2**40, 2**62]), max_size=9), st.sampled_from([(), (3,), (2, 9)]))
def test_coalesced_rows_are_unique_sorted_and_complete(coalesce, chosen, rest):
    rows, x = torch.tensor(chosen, dtype=torch.int64), torch.randn(len(chosen), *rest).double()
    unique, sums = coalesce(x, rows)
    assert unique.tolist() == sorted(set(chosen)) and sums.shape == (len(set(chosen)), *rest)
    for row, total in zip(unique, sums, strict=True):
        torch.testing.assert_close(total, x[rows == row].sum(0))


def test_derivatives():
    weight = torch.randn(5, 2).double().requires_grad_()
    grad = torch.randn(2, 3, 2).double().requires_grad_()
    x, rows = torch.randn(6, 2).double().requires_grad_(), IDS.flatten()
    for padding in (-1, 2):
        assert torch.autograd.gradcheck(ops.embedding_backward, [grad, IDS, 5, padding])
    for derivative in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert derivative(lambda w: ops.embedding(w, IDS, -1).square(), [weight])
        assert derivative(lambda x: ops.coalesce_rows(x, rows)[1].square(), [x])


def test_opcheck():
    weight, grad = torch.randn(5, 2).requires_grad_(), torch.randn(2, 3, 2).requires_grad_()
    torch.library.opcheck(ops.embedding.default, (weight, IDS, 2))
    torch.library.opcheck(ops.embedding.default, (weight, IDS.int(), -1))
    torch.library.opcheck(ops.embedding_backward.default, (grad, IDS, 5, 2))
    # Its test of AOTAutograd adds up all outputs in the dtype of the first: no derivative where that is of integers.
    torch.library.opcheck(ops.coalesce_rows.default, (torch.randn(6, 2), IDS.flatten()))


def test_unique_rows_are_a_data_dependent_size():
    def step(x, rows):
        unique, sums = ops.coalesce_rows(x, rows)
        return unique + 1, sums * 2

    x, rows = torch.randn(6, 2), IDS.flatten()
    traced = _torch.make_fx(step, tracing_mode="symbolic")(x, rows)
    for some in (rows, rows // 4):
        torch.testing.assert_close(traced(x, some), step(x, some))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compiles_whole():
    def loss(weight, ids):
        rows = ops.embedding(weight, ids, 2).flatten(0, 1)
        return ops.coalesce_rows(rows, ids.flatten())[1].square().sum()

    weight = torch.randn(5, 2).requires_grad_()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(*(torch.autograd.grad(f(weight, IDS), weight) for f in (compiled, loss)))


@BOTH
@pytest.mark.parametrize("bad", [-1, 5, 2**40, -(2**62)])
def test_ids_that_are_not_there_raise(of, bad):
    ids = torch.tensor([0, bad, 1])
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        of.embedding(torch.zeros(5, 2), ids, -1)
    with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
        of.embedding_backward(torch.zeros(3, 2), ids, 5, -1)


@COALESCE
def test_negative_rows_raise(coalesce):
    with pytest.raises(IndexError, match="coalesce_rows: "):
        coalesce(torch.zeros(2, 2), torch.tensor([0, -1]))


WRONG = {
    "weight of one dim": lambda w, ids: ops.embedding(w[0], ids, -1),
    "weight of integers": lambda w, ids: ops.embedding(w.long(), ids, -1),
    "ids of floats": lambda w, ids: ops.embedding(w, ids.float(), -1),
    "padding below -1": lambda w, ids: ops.embedding(w, ids, -2),
    "padding behind the rows": lambda w, ids: ops.embedding(w, ids, 3),
    "grad without a dim": lambda w, ids: ops.embedding_backward(w[:, 0], ids, 3, -1),
    "grad of another length": lambda w, ids: ops.embedding_backward(w[:2], ids, 3, -1),
    "negative count": lambda w, ids: ops.embedding_backward(w, ids, -3, -1),
    "rows of another length": lambda w, ids: ops.coalesce_rows(w[:2], ids),
    "rows of 32 bits": lambda w, ids: ops.coalesce_rows(w, ids.int()),
    "sums of integers": lambda w, ids: ops.coalesce_rows(w.long(), ids),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_bad_shapes_and_dtypes_raise_real_and_fake(call):
    weight, ids = torch.zeros(3, 2), torch.tensor([0, 1, 2])
    for arguments in ((weight, ids), _torch.fake_inputs([weight, ids])):
        with pytest.raises(ValueError, match=r"embedding|coalesce_rows"):
            call(*arguments)
