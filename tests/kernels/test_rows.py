"""gather_rows and scatter_rows against indexing, and as each other's derivative."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from turbogr_compile import _torch

from .layouts import COMPILED, LAYOUTS, threads
from .references import references

ops = torch.ops.turbogr
BOTH = pytest.mark.parametrize(
    "gather, scatter",
    [(ops.gather_rows, ops.scatter_rows), (references.gather_rows, references.scatter_rows)],
    ids=["op", "reference"],
)
ROWS = torch.tensor([2, 0, 2, 3])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@BOTH
@pytest.mark.parametrize("width", [1, 67, 300])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_minus_zero_stays(gather, scatter, dtype, width):
    found = scatter(torch.full((3, width), -0.0, dtype=dtype), torch.tensor([0, 2, 2]), 4)
    assert torch.equal(found.signbit().all(1), torch.tensor([True, False, True, False]))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.int64])
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6),
    st.lists(st.integers(0, 5), max_size=8),
    st.sampled_from([(), (1,), (3,), (4, 16), (67,), (2, 3), (0,)]),
)
def test_equal_indexing_and_its_transpose(gather, scatter, dtype, count, chosen, rest):
    rows = torch.tensor([r % count for r in chosen], dtype=torch.int64)
    x = (4 * torch.randn(count, *rest)).to(dtype)
    assert torch.equal(gather(x, rows), x[rows])
    y = (4 * torch.randn(len(rows), *rest)).to(dtype)
    wanted = torch.zeros(count, *rest).to(torch.promote_types(dtype, torch.float32))
    for at, value in zip(rows.tolist(), y, strict=True):
        wanted[at] += value
    torch.testing.assert_close(scatter(y, rows, count), wanted.to(dtype))


@COMPILED
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("rest", [(7,), (64,), (3, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts_change_nothing(layout, rest, dtype):
    x, rows = torch.randn(9, *rest).to(dtype), torch.tensor([8, 0, 3, 3])
    every = torch.stack([rows, rows], 1)[:, 0]
    assert torch.equal(ops.gather_rows(layout(x), every), x[rows])
    y = torch.randn(4, *rest).to(dtype)
    assert torch.equal(ops.scatter_rows(layout(y), every, 9), ops.scatter_rows(y, rows, 9))


def test_rows_that_are_all_the_same_memory():
    x = torch.randn(67).expand(9, 67)
    assert torch.equal(ops.gather_rows(x, ROWS), x[:4])
    assert torch.equal(ops.scatter_rows(x[:4], ROWS, 5), ops.scatter_rows(x[:4].clone(), ROWS, 5))


@COMPILED
@pytest.mark.parametrize("count", [1, 3, 5000])
@pytest.mark.parametrize("width", [1, 67, 256])
def test_threads_change_no_bit(count, width):
    x, table, rows = torch.randn(3000, width), torch.randn(count, width), torch.randint(0, count, (3000,))
    found = []
    for number in (1, 2):
        with threads(number):
            found.append((ops.scatter_rows(x, rows, count), ops.gather_rows(table, rows)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert torch.equal(found[0][1], table[rows])
    exact = torch.zeros(count, width).double().index_add_(0, rows, x.double())
    torch.testing.assert_close(found[0][0].double(), exact, rtol=1e-5, atol=1e-3)


def test_nan_and_infinity_stay_in_their_row():
    x = torch.tensor([[1.0], [float("nan")], [float("inf")], [2.0], [-float("inf")]])
    found = ops.scatter_rows(x, torch.tensor([0, 1, 2, 0, 3]), 5).flatten()
    torch.testing.assert_close(found, torch.tensor([3, float("nan"), float("inf"), -float("inf"), 0]), equal_nan=True)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_is_kept(gather, scatter, dtype):
    x = torch.ones(5, 2).to(dtype)
    assert gather(x, ROWS).dtype == dtype
    scattered = scatter(x[:4], ROWS, 5)
    assert scattered.dtype == dtype
    assert scattered[:, 0].tolist() == torch.tensor([1, 0, 2, 1, 0]).to(dtype).tolist()


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_single_precision(gather, scatter, dtype):
    for rest in ((), (1,), (2, 3), (67,)):
        many = torch.ones(4096, *rest, dtype=dtype)
        assert (scatter(many, torch.zeros(4096, dtype=torch.int64), 2)[0] == 4096).all()


def test_first_and_second_derivatives():
    x, y = torch.randn(5, 2).double().requires_grad_(), torch.randn(4, 2).double().requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: ops.gather_rows(x, ROWS).square(), [x])
        assert check(lambda y: ops.scatter_rows(y, ROWS, 5).square(), [y])


def test_backward_is_the_other_op():
    def step(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(ops.scatter_rows(ops.gather_rows(x, ROWS), ROWS, 5).square().sum(), x)

    targets = [n.target for n in _torch.make_fx(step)(torch.randn(5, 2)).graph.nodes]
    assert targets.count(ops.gather_rows.default) == targets.count(ops.scatter_rows.default) == 2
    assert not any("index" in str(t) for t in targets)


@pytest.mark.parametrize("grad", [True, False])
def test_opcheck(grad):
    x = torch.randn(5, 2).requires_grad_(grad)
    torch.library.opcheck(ops.gather_rows.default, (x, ROWS))
    torch.library.opcheck(ops.scatter_rows.default, (x[:4].detach().requires_grad_(grad), ROWS, 7))


def test_unbacked_counts_are_not_guarded_on():
    def step(x, mask):
        x = x.detach().requires_grad_()
        rows = mask.nonzero()[:, 0]
        packed = ops.gather_rows(x, rows)
        return torch.autograd.grad(ops.scatter_rows(packed.square(), rows, x.shape[0]).sum(), x)[0]

    x, mask = torch.randn(5, 2), torch.tensor([1, 0, 1, 1, 0]).bool()
    module = _torch.make_fx(step, tracing_mode="symbolic")(x, mask)
    env = _torch.shape_env_of(module.graph)
    assert not env.deferred_runtime_asserts and not [g for g in _torch.new_guards(env, 0) if "u" in g]
    for kept in (mask, ~mask, torch.zeros(5).bool(), torch.ones(5).bool()):
        torch.testing.assert_close(module(x, kept), 2 * x * kept[:, None])


def test_inference_mode_and_no_flops():
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        assert ops.gather_rows(torch.eye(4), ROWS).is_inference()
    assert counter.get_total_flops() == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda x, rows: ops.gather_rows(x[0, 0], rows),
        lambda x, rows: ops.gather_rows(x, rows.int()),
        lambda x, rows: ops.gather_rows(x, rows[:, None]),
        lambda x, rows: ops.scatter_rows(x[0, 0], rows, 5),
        lambda x, rows: ops.scatter_rows(x, rows, 5),
        lambda x, rows: ops.scatter_rows(x[:4], rows.double(), 5),
        lambda x, rows: ops.scatter_rows(x[:4], rows, -1),
    ],
)
def test_bad_shapes_and_dtypes_raise_real_and_fake(call):
    x = torch.zeros(5, 2)
    with pytest.raises(ValueError, match="_rows: "):
        call(x, ROWS)
    with pytest.raises(ValueError, match="_rows: "):
        call(*_torch.fake_inputs([x, ROWS]))


@BOTH
@pytest.mark.parametrize("row", [-1, 5, 2**40, -(2**62)])
def test_rows_that_are_not_there_raise(gather, scatter, row):
    rows = torch.tensor([0, row, 1])
    for x in (torch.zeros(5, 2), torch.zeros(5)):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            gather(x, rows)
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            scatter(x[:3], rows, 5)
    with pytest.raises((IndexError, RuntimeError)):
        gather(torch.zeros(0, 2), torch.tensor([0]))


@COMPILED
def test_the_error_names_op_row_and_place():
    with pytest.raises(IndexError, match=r"gather_rows: row 7, entry 1 .* there are 5 rows"):
        ops.gather_rows(torch.zeros(5, 2), torch.tensor([0, 7]))
    with pytest.raises(IndexError, match="scatter_rows: row -1, entry 0"):
        ops.scatter_rows(torch.zeros(2, 2), torch.tensor([-1, 7]), 5)


def test_no_gradient_stays_none():
    """A norm of order zero has none, and zeros instead would let an optimizer decay what has none."""
    x = torch.randn(5, 3, requires_grad=True)
    packed = ops.gather_rows(x, ROWS)
    for result in (packed, ops.scatter_rows(packed, ROWS, 4)):
        assert torch.autograd.grad(result.norm(p=0), x, retain_graph=True, allow_unused=True) == (None,)
