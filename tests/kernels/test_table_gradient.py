"""Gradients of tables against a dense matrix of slopes times queries; windows of rows of all kinds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.kernels import table_gradient as module

from .layouts import COMPILED, threads

ops = torch.ops.turbogr


def dense(slopes, own_slopes, query, table, ids, own_ids, group, eps):
    """Slopes of all pairs of row and query, times queries; through torch's normalize."""
    positions, each = ids.shape
    of_pairs = query.new_zeros(table.shape[0], positions)
    for t in range(positions):
        members = slice(t // group * group, min(t // group * group + group, positions))
        some = slopes[t * each : (t + 1) * each, : members.stop - members.start]
        of_pairs[:, members].index_add_(0, ids[t], some)
    if own_ids is not None:
        of_pairs.index_put_((own_ids, torch.arange(positions)), own_slopes, accumulate=True)
    if eps < 0:
        return of_pairs @ query
    rows = table.detach().requires_grad_()
    return torch.autograd.grad(F.normalize(rows, dim=-1, eps=eps), rows, of_pairs @ query)[0]


def example(positions, each, width, count, group, own, eps, draw=torch.randint, dtype=torch.float64):
    ids = draw(0, count, (positions, each))
    own_ids, own_slopes = torch.randint(0, count, (positions,)), torch.randn(positions, dtype=dtype)
    slopes, query = torch.randn(positions * each, group, dtype=dtype), torch.randn(positions, width, dtype=dtype)
    table = torch.randn(count, width, dtype=dtype)
    return slopes, own_slopes if own else None, query, table, ids, own_ids if own else None, group, eps


def popular(low, high, size):
    """Few rows are named often, many hardly ever."""
    return (high ** torch.rand(size, dtype=torch.float64)).long().clamp_max(high) - 1 + low


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0, 1, 2, 17, 64]),
    st.sampled_from([1, 3, 90]),
    st.sampled_from([1, 8, 64, 70, 128]),
    st.sampled_from([1, 2, 50, 3000]),
    st.sampled_from([1, 2, 3, 8, 11]),
    st.booleans(),
    st.sampled_from([-1.0, 1e-12, 8.0]),
    st.sampled_from([torch.randint, popular]),
    st.integers(0, 99),
)
def test_equals_dense_products(positions, each, width, count, group, own, eps, draw, seed):
    torch.manual_seed(seed)
    inputs = example(positions, each, width, count, group, own, eps, draw)
    wanted = dense(*inputs)
    torch.testing.assert_close(ops.lookup_table_gradient(*inputs), wanted)
    torch.testing.assert_close(module.table_gradient(*inputs), wanted)


@pytest.mark.parametrize("draw", [torch.randint, popular])
@pytest.mark.parametrize("count", [2, 3000, 100_000])
@pytest.mark.parametrize("group", [2, 8])
def test_rows_with_few_entries_and_with_many(group, count, draw):
    """Entries alone in their rows, some to a row, and more than a window has room for."""
    inputs = example(32, 600, 64, count, group, True, -1.0, draw)
    torch.testing.assert_close(ops.lookup_table_gradient(*inputs), dense(*inputs))


@COMPILED
@pytest.mark.parametrize("draw", [torch.randint, popular])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("eps", [-1.0, 0.5])
def test_bits_do_not_depend_on_threads(group, eps, draw):
    inputs = example(203, 90, 72, 3000, group, True, eps, draw, torch.float32)
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(ops.lookup_table_gradient(*inputs))
    assert torch.equal(*results)


@COMPILED
def test_more_slopes_than_are_dealt_at_once():
    positions, each, group = 2048, 520, 8
    inputs = example(positions, each, 8, 5000, group, True, -1.0, dtype=torch.float32)
    assert inputs[0].numel() * 4 > 32 << 20
    exact = dense(*(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs))
    torch.testing.assert_close(ops.lookup_table_gradient(*inputs).double(), exact, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("group", [1, 2])
def test_sums_of_a_row_are_in_the_order_of_positions(group):
    """A small number is lost beside a large one, unless that one is gone by then."""
    query, table, ids = torch.ones(3 * group, 8), torch.empty(5, 8), torch.full((3 * group, 1), 2)
    for order, wanted in (([1e9, 1.0, -1e9], 0.0), ([1e9, -1e9, 1.0], 1.0)):
        slopes = torch.zeros(3 * group, group)
        slopes[::group, 0] = torch.tensor(order)
        found = ops.lookup_table_gradient(slopes, None, query, table, ids, None, group, -1.0)
        assert found[2].tolist() == [wanted] * 8, order


@COMPILED
@pytest.mark.parametrize("group", [1, 3])
def test_a_large_gradient_is_written_whole(group):
    """Past the caches, where it is larger than they are; memory that held something else before."""
    count, width = 40_000, 128
    torch.full((count, width), float("nan"))
    inputs = example(6, 50, width, count, group, True, -1.0, dtype=torch.float32)
    torch.testing.assert_close(ops.lookup_table_gradient(*inputs), dense(*inputs))


def test_tables_of_16_bits():
    inputs = list(example(16, 40, 40, 300, 4, True, -1.0, dtype=torch.float32))
    wanted = dense(*inputs)
    inputs[3] = inputs[3].half()
    found = ops.lookup_table_gradient(*inputs)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found.float(), wanted, rtol=2e-3, atol=2e-3)
