"""gather_rows and scatter_rows against indexing, and as each other's derivative."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from turbogr_compile import _torch, kernels

assert kernels.rows  # importing registers the ops
ops = torch.ops.turbogr
ROWS = torch.tensor([2, 0, 2, 3])
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.lists(st.integers(0, 5), max_size=8), st.sampled_from([(), (3,), (2, 3), (0,)]))
def test_equal_indexing_and_its_transpose(count, chosen, rest):
    rows = torch.tensor([r % count for r in chosen], dtype=torch.int64)
    x = torch.randn(count, *rest).double()
    assert torch.equal(ops.gather_rows(x, rows), x[rows])
    y = torch.randn(len(rows), *rest).double()
    wanted = torch.zeros(count, *rest).double()
    for at, value in zip(rows.tolist(), y, strict=True):
        wanted[at] += value
    torch.testing.assert_close(ops.scatter_rows(y, rows, count), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtype_is_kept(dtype):
    x = torch.ones(5, 2).to(dtype)
    assert ops.gather_rows(x, ROWS).dtype == dtype
    scattered = ops.scatter_rows(x[:4], ROWS, 5)
    assert scattered.dtype == dtype
    assert scattered[:, 0].tolist() == torch.tensor([1, 0, 2, 1, 0]).to(dtype).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_summed_in_single_precision(dtype):
    for rest in ((), (1,), (2, 3)):
        many = torch.ones(4096, *rest, dtype=dtype)
        assert (ops.scatter_rows(many, torch.zeros(4096, dtype=torch.int64), 2)[0] == 4096).all()


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


@pytest.mark.parametrize("row", [-1, 5])
def test_rows_that_are_not_there_raise(row):
    with pytest.raises(IndexError):
        ops.gather_rows(torch.zeros(5, 2), torch.tensor([row]))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        ops.scatter_rows(torch.zeros(1, 2), torch.tensor([row]), 5)
