"""Scores of looked-up rows against embedding, normalize and einsum; gradients in a fixed order; rows in FP16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.kernels import lookup_dot as module

from .layouts import COMPILED, LAYOUTS, threads
from .references import references

ops = torch.ops.turbogr
HALVES = [torch.float16, torch.bfloat16]
BOTH = pytest.mark.parametrize("of", [ops, references], ids=["op", "reference"])


def eager(query, table, ids, eps):
    """What people write."""
    rows = F.embedding(ids, table)
    rows = rows if eps < 0 else F.normalize(rows, dim=-1, eps=eps)
    return torch.einsum("td,tkd->tk", query, rows)


def gradients(function, query, table, *rest):
    """Scores, and gradients of something that is not linear in them."""
    query, table = query.detach().requires_grad_(), table.detach().requires_grad_()
    scores = function(query, table, *rest)
    return scores.detach(), *torch.autograd.grad(scores.square().sum() + scores.sum(), (query, table))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0, 1, 2, 7]),
    st.sampled_from([1, 2, 31]),
    st.sampled_from([1, 3, 8, 70, 128]),
    st.sampled_from([1, 5, 300]),
    st.sampled_from([-1.0, 0.0, 1e-12, 1.5, 1e9]),
    st.integers(0, 99),
)
def test_equals_eager(positions, each, width, count, eps, seed):
    torch.manual_seed(seed)
    query, table = torch.randn(positions, width).double(), torch.randn(count, width).double()
    ids = torch.randint(0, count, (positions, each))
    for found, wanted in zip(
        gradients(ops.lookup_dot, query, table, ids, eps), gradients(eager, query, table, ids, eps), strict=True
    ):
        torch.testing.assert_close(found, wanted)


@BOTH
@pytest.mark.parametrize("eps", [-1.0, 0.5])
def test_backward_gives_what_is_wanted(of, eps):
    query, table, ids = torch.randn(5, 9).double(), torch.randn(6, 9).double(), torch.randint(0, 6, (5, 4))
    grad = torch.randn(5, 4).double()
    q, t = query.clone().requires_grad_(), table.clone().requires_grad_()
    wanted = torch.autograd.grad(eager(q, t, ids, eps), (q, t), grad)
    for which in ([True, True], [True, False], [False, True]):
        for found, exact, want in zip(
            of.lookup_dot_backward(grad, query, table, ids, eps, which), wanted, which, strict=True
        ):
            torch.testing.assert_close(found, exact if want else exact.new_empty(0))


@pytest.mark.parametrize("eps", [-1.0, 0.1])
def test_float32_and_the_reference_agree_with_float64(eps):
    query, table, ids = torch.randn(40, 100), torch.randn(500, 100), torch.randint(0, 500, (40, 60))
    exact = gradients(eager, query.double(), table.double(), ids, eps)
    for found, wanted in zip(gradients(ops.lookup_dot, query, table, ids, eps), exact, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(module.lookup_dot(query, table, ids, eps).double(), exact[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("wide", [False, True], ids=["half-query", "float-query"])
def test_halves_are_summed_in_single_precision(dtype, wide):
    table = torch.ones(3, 4096, dtype=dtype)
    query = torch.ones(2, 4096, dtype=torch.float32 if wide else dtype)
    ids = torch.tensor([[0, 2], [2, 2]])
    query.requires_grad_(), table.requires_grad_()
    scores = ops.lookup_dot(query, table, ids, -1.0)
    assert scores.dtype == query.dtype and (scores == 4096).all()
    of_query, of_table = torch.autograd.grad(scores.sum(), (query, table))
    assert of_query.dtype == query.dtype and (of_query == 2).all()
    assert of_table.dtype == dtype and of_table[:, 0].tolist() == [1, 0, 3]


@COMPILED
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_change_nothing(layout):
    query, table, ids = torch.randn(4, 70), torch.randn(9, 70), torch.randint(0, 9, (4, 5))
    grad = torch.randn(4, 5)
    for eps in (-1.0, 0.5):
        turned = layout(query), layout(table), ids.T.contiguous().T
        assert torch.equal(ops.lookup_dot(*turned, eps), ops.lookup_dot(query, table, ids, eps))
        for found, wanted in zip(
            ops.lookup_dot_backward(layout(grad), *turned, eps, [True, True]),
            ops.lookup_dot_backward(grad, query, table, ids, eps, [True, True]),
            strict=True,
        ):
            assert torch.equal(found, wanted)


@COMPILED
@pytest.mark.parametrize("eps", [-1.0, 0.5])
def test_bits_do_not_depend_on_threads(eps):
    query, table, ids = torch.randn(200, 72), torch.randn(3000, 72), (3000 ** torch.rand(200, 90)).long() - 1
    grad = torch.randn(200, 90)
    results = []
    for count in (1, 2):
        with threads(count):
            found = ops.lookup_dot_backward(grad, query, table, ids, eps, [True, True])
            results.append([ops.lookup_dot(query, table, ids, eps), *found])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@BOTH
def test_what_is_not_a_number_flows_as_in_eager(of):
    query, table, ids = torch.randn(3, 9), torch.randn(5, 9), torch.tensor([[0, 1], [2, 3], [1, 1]])
    table[1, 4], table[3, 2] = float("nan"), float("inf")
    found, wanted = of.lookup_dot(query, table, ids, -1.0), eager(query, table, ids, -1.0)
    torch.testing.assert_close(found, wanted, equal_nan=True)


# --- rows in place of the table's --------------------------------------------------------------------


@pytest.mark.parametrize("of", [ops, references], ids=["op", "reference"])
@pytest.mark.parametrize("eps", [-1.0, 0.5])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_stand_in_for_the_table_which_gets_the_gradient(of, eps, dtype):
    query, table, ids = torch.randn(4, 19), torch.randn(9, 19), torch.randint(0, 9, (4, 5))
    half, scales = (torch.randn(20, 19) * 3).to(dtype), torch.tensor([0.5, 4.0])
    places = torch.arange(20).view(4, 5)
    rows = half.float() * scales.repeat_interleave(10)[:, None]
    found = of.lookup_dot(query, table, ids, eps, half, places, scales)
    torch.testing.assert_close(found, eager(query, rows, places, eps))
    grad = torch.randn(4, 5)
    of_query, of_table = of.lookup_dot_backward(grad, query, table, ids, eps, [True, True], half, places, scales)
    q = query.clone().requires_grad_()
    torch.testing.assert_close(of_query, *torch.autograd.grad(eager(q, rows, places, eps), q, grad))
    t = table.clone().requires_grad_()
    torch.testing.assert_close(of_table, *torch.autograd.grad(eager(query, t, ids, eps), t, grad))


def test_a_copy_of_the_whole_table_needs_no_places():
    query, ids = torch.randn(4, 32), torch.randint(0, 130, (4, 5))
    table = torch.randn(130, 32) * 10 ** torch.linspace(-3, 3, 130)[:, None]
    half, scales = ops.half_rows(table, 64)
    assert len(scales.unique()) == 3
    copy = half.float() * scales.repeat_interleave(44)[:130, None]
    torch.testing.assert_close(
        ops.lookup_dot(query, table, ids, -1.0, half, None, scales), eager(query, copy, ids, -1.0), rtol=1e-5, atol=1e-2
    )


# --- refusals ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("bad", [-1, 5, 2**40, -(2**62)])
def test_ids_that_are_not_there_raise(of, bad):
    query, table, ids = torch.zeros(1, 2), torch.zeros(5, 2), torch.tensor([[0, bad, 1]])
    with pytest.raises(IndexError, match=f"row {bad}, entry 1 of ids, is out of range: there are 5 rows"):
        of.lookup_dot(query, table, ids, -1.0)
    with pytest.raises(IndexError, match="out of range"):
        of.lookup_dot_backward(torch.zeros(1, 3), query, table, ids, -1.0, [True, False])
    with pytest.raises(IndexError, match="out of range"):
        of.lookup_dot_backward(torch.zeros(1, 3), query, table, ids, -1.0, [False, True])
    with pytest.raises(IndexError, match=f"row {bad}, entry 1 of places"):
        of.lookup_dot(query, table, torch.zeros_like(ids), -1.0, torch.zeros(5, 2).half(), ids)


X, TABLE, IDS = torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, 4, dtype=torch.int64)
WRONG = {
    "ids of 32 bits": ((X, TABLE, IDS.int(), -1.0), "ids must be torch.int64"),
    "width": ((X, torch.zeros(5, 4), IDS, -1.0), "table.shape\\[1\\] must be 3 \\(D\\), not 4"),
    "positions": ((X, TABLE, IDS[:1], -1.0), "ids.shape\\[0\\] must be 2 \\(T\\), not 1"),
    "dtypes": ((X, TABLE.double(), IDS, -1.0), "table is torch.float64, while query is torch.float32"),
    "scales alone": ((X, TABLE, IDS, -1.0, None, None, torch.ones(1)), "come with half"),
    "copy of another size": ((X, TABLE, IDS, -1.0, torch.zeros(4, 3).half()), "half has 4 rows"),
    "wide copy": ((X, TABLE, IDS, -1.0, TABLE), "half must be torch.float16 or torch.bfloat16"),
    "scales for no blocks": ((X, TABLE, IDS, -1.0, TABLE.half(), None, torch.ones(4)), "no equal blocks of 5 rows"),
}


@BOTH
@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_arguments_say_what_is_wrong(of, case):
    arguments, message = case
    with pytest.raises(ValueError, match=message):
        of.lookup_dot(*arguments)


def test_opcheck():
    query, table = torch.randn(2, 3).requires_grad_(), torch.randn(5, 3).requires_grad_()
    torch.library.opcheck(ops.lookup_dot.default, (query, table, IDS, -1.0))
    torch.library.opcheck(ops.lookup_dot.default, (query, table, IDS, 0.5, table.detach().half()))
    torch.library.opcheck(ops.lookup_dot_backward.default, (torch.ones(2, 4), X, TABLE, IDS, 0.5, [True, False]))
    arguments = torch.ones(8, 1), torch.ones(2), X, TABLE, IDS, IDS[:, 0], 1, -1.0
    torch.library.opcheck(ops.lookup_table_gradient.default, arguments)


def test_compiles_whole_with_sizes_unknown():
    def loss(query, table, ids):
        return ops.lookup_dot(query, table, ids, 0.5).square().sum()

    query, table = torch.randn(6, 3).requires_grad_(), torch.randn(5, 3).requires_grad_()
    ids = torch.randint(0, 5, (6, 4))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(*(torch.autograd.grad(f(query, table, ids), (query, table)) for f in (compiled, loss)))


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    query, table = torch.randn(2, 3).requires_grad_(), torch.randn(5, 3).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        ops.lookup_dot(query, table, IDS, -1.0).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 2 * 4 * 3
