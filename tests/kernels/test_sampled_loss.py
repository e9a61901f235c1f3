"""Sampled losses against embedding, normalize, products, where(hit), log_softmax or softplus."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.kernels import sampled_loss as module

from .layouts import COMPILED, threads
from .references import references

ops = torch.ops.turbogr
NAN, INF = math.nan, math.inf


def eager(query, table, positive_ids, ids, weights, scale, eps, hit_value, group, kind):
    """What people write, group by group."""
    table = table if eps < 0 else F.normalize(table, dim=-1, eps=eps)
    losses = [query.new_zeros(0)]
    for first in range(0, ids.shape[0], group):
        rows = slice(first, first + group)
        negatives, own = ids[rows].reshape(-1), positive_ids[rows]
        logits = scale * query[rows] @ F.embedding(negatives, table).T
        positive = scale * (query[rows] * F.embedding(own, table)).sum(-1)
        if not math.isnan(hit_value):
            logits = torch.where(negatives == own[:, None], torch.tensor(hit_value, dtype=logits.dtype), logits)
        if kind == "softmax":
            losses.append(-torch.cat([positive[:, None], logits], 1).log_softmax(1)[:, 0])
        else:
            losses.append(F.softplus(-positive) + F.softplus(logits).sum(-1))
    losses = torch.cat(losses)
    return losses.sum() if weights is None else (losses * weights).sum()


def reference(*arguments):
    """The op in plain torch, differentiated as the op is."""

    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, table, weights):
            inputs = query, table, *arguments[2:4], weights, *arguments[5:10], [True, True], *arguments[10:]
            results = module.ahead(*inputs)
            module._save(ctx, (*inputs, *[None] * (14 - len(inputs))), results)
            return results[0]

        @staticmethod
        def backward(ctx, grad):
            found = ctx.saved_tensors
            query, table, ids, own_ids, losses, query_grad, slopes, own_slopes = found
            of_table = module.ops.lookup_table_gradient(
                slopes, own_slopes, query * grad, table, ids, own_ids, *ctx.attributes
            )
            return query_grad * grad, of_table, losses * grad

    return Total.apply(arguments[0], arguments[1], arguments[4])


BOTH = pytest.mark.parametrize("of", [ops.sampled_loss_total, reference], ids=["op", "reference"])


def example(positions=7, each=5, width=9, count=6, dtype=torch.float64):
    query, table = torch.randn(positions, width, dtype=dtype), torch.randn(count, width, dtype=dtype)
    weights = torch.rand(positions, dtype=dtype)
    ids = torch.randint(0, count, (positions,)), torch.randint(0, count, (positions, each))
    return query, table, *ids, weights


def gradients(function, query, table, positive_ids, ids, weights, *rest):
    leaves = [x.detach().requires_grad_() for x in (query, table, weights)]
    total = function(leaves[0], leaves[1], positive_ids, ids, leaves[2], *rest)
    return total.detach(), *torch.autograd.grad(total * 1.3, leaves, materialize_grads=True)


def same(found, wanted, **tolerance):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@BOTH
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([0, 1, 2, 7, 26]),
    st.sampled_from([1, 2, 30]),
    st.sampled_from([1, 9, 16, 70]),
    st.sampled_from([1, 6, 200]),
    st.sampled_from([-1.0, 1e-12, 2.0]),
    st.sampled_from([NAN, -INF, -1e4, 0.7]),
    st.sampled_from([1, 2, 3, 8, 13]),
    st.sampled_from(module.KINDS),
    st.integers(0, 99),
)
def test_equals_eager(of, positions, each, width, count, eps, hit_value, group, kind, seed):
    torch.manual_seed(seed)
    inputs = *example(positions, each, width, count), 0.8, eps, hit_value, group, kind
    same(gradients(of, *inputs), gradients(eager, *inputs))


@pytest.mark.parametrize("kind", module.KINDS)
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("eps", [-1.0, 0.1])
def test_float32_agrees_with_float64(kind, group, eps):
    query, table, own, ids, weights = example(50, 60, 100, 500)
    rest = own, ids, weights, 0.3, eps, -1e4, group, kind
    exact = gradients(eager, query, table, *rest)
    found = gradients(ops.sampled_loss_total, query.float(), table.float(), own, ids, weights.float(), *rest[3:])
    same([x.double() for x in found], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", module.KINDS)
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("scale", [40.0, -40.0])
def test_large_logits_do_not_overflow(kind, group, scale):
    query, table, own, ids, weights = example(dtype=torch.float32)
    inputs = query * 20, table, own, ids, weights, scale, -1.0, -INF, group, kind
    wide = (*(x.double() for x in inputs[:2]), own, ids, weights.double(), *inputs[5:])
    found, exact = gradients(ops.sampled_loss_total, *inputs), gradients(eager, *wide)
    for one, other in zip(found, exact, strict=True):  # logits of thousands are rounded at the fourth digit
        assert (one.double() - other).abs().max() <= 5e-3 * other.abs().max()


@pytest.mark.parametrize("kind", module.KINDS)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("bad", [NAN, INF], ids=["nan", "inf"])
def test_what_is_not_a_number_reaches_the_total_and_its_own_query(kind, group, bad):
    query, table, own, ids, weights = example(8, 5, 9, 40, torch.float32)
    own[own == ids[2, 1]] = (ids[2, 1] + 1) % 40  # a positive that is the bad row would be set right below
    weights[2] = 1.0
    table[ids[2, 1], 3] = bad
    table[own[2]] = 1.0
    query[:, 3] = query[:, 3].abs() + 0.1
    inputs = query, table, own, ids, weights, 1.0, -1.0, NAN, group, kind
    found, wanted = gradients(ops.sampled_loss_total, *inputs), gradients(eager, *inputs)
    assert found[0].isnan() == wanted[0].isnan() and found[0].isinf() == wanted[0].isinf()
    fine = wanted[1].isfinite().all(1)
    assert not fine.all() and torch.equal(found[1].isfinite().all(1), fine)


@pytest.mark.parametrize("kind", module.KINDS)
@pytest.mark.parametrize("group", [1, 2])
def test_rows_of_nothing_but_hits(kind, group):
    query, table, own, ids, weights = example(4, 3)
    own[:] = 2
    ids[:] = 2
    inputs = query, table, own, ids, weights, 1.0, -1.0, -INF, group, kind
    found = gradients(ops.sampled_loss_total, *inputs)
    same(found, gradients(eager, *inputs))
    assert kind == "bce" or (found[0] == 0 and not found[1].any() and not found[2].any())


@COMPILED
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("kind", module.KINDS)
def test_bits_do_not_depend_on_threads(group, kind):
    query, table, own, ids, weights = example(203, 60, 72, 900, torch.float32)
    results = []
    for count in (1, 2):
        with threads(count):
            inputs = query, table, own, ids, weights, 0.3, 0.5, -1e4, group, kind
            results.append(gradients(ops.sampled_loss_total, *inputs))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# --- rows in place of the table's --------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3])
def test_negatives_are_read_from_halves_positives_from_the_table(group):
    query, table, own, ids, weights = example(7, 5, 20, 50, torch.float32)
    table *= 10 ** torch.linspace(-2, 0, 50)[:, None]
    half, scales = ops.half_rows(table, 16)
    assert len(scales.unique()) > 2
    copy = half.float() * scales.repeat_interleave(13)[:50, None]
    attributes = 1.0, -1.0, NAN, group, "softmax"
    found = ops.sampled_loss_total(query, table, own, ids, weights, *attributes, half, None, scales)
    both = torch.cat([table, copy])
    wanted = ops.sampled_loss_total(query, both, own, ids + 50, weights, *attributes)
    torch.testing.assert_close(found, wanted)
    moved, each = ops.quantize_rows(table, ids.flatten(), torch.tensor([0, 10, 10, 35]))
    places = torch.arange(35).view(7, 5)
    per_row = each.repeat_interleave(torch.tensor([10, 0, 25]))
    table.requires_grad_()
    total = ops.sampled_loss_total(query, table, own, ids, weights, *attributes, moved, places, per_row)
    torch.testing.assert_close(total, wanted, rtol=1e-3, atol=1e-3)
    (found,) = torch.autograd.grad(total, table)
    exact = ops.sampled_loss_total(query, table, own, ids, weights, *attributes)
    torch.testing.assert_close(found, *torch.autograd.grad(exact, table), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_tables_of_16_bits(dtype):
    query, table, own, ids, weights = example(7, 5, 20, 50, torch.float32)
    rest = own, ids, weights, 0.5, -1.0, -INF, 1, "softmax"
    exact = gradients(eager, query, table.to(dtype).float(), *rest)
    found = gradients(ops.sampled_loss_total, query, table.to(dtype), *rest)
    assert found[0].dtype == torch.float32 and found[2].dtype == dtype
    same([x.float() for x in found], exact, rtol=1e-2, atol=1e-2)


# --- the op as others see it -------------------------------------------------------------------------


def test_gradients_that_nobody_asks_for_are_not_computed():
    query, table, own, ids, _ = example()
    attributes = 1.0, -1.0, NAN, 2, "softmax"
    exact = eager(query, table, own, ids, None, *attributes)
    torch.testing.assert_close(ops.sampled_loss_total(query, table, own, ids, None, *attributes), exact)
    _, _, of_query, slopes, own_slopes = ops.sampled_loss_ahead(
        query, table, own, ids, None, *attributes, [False, False]
    )
    assert of_query.numel() == slopes.numel() == own_slopes.numel() == 0
    q, t = query.clone().requires_grad_(), table.clone().requires_grad_()
    for pair in ((q, table), (query, t)):
        leaf = next(x for x in pair if x.requires_grad)
        (found,) = torch.autograd.grad(ops.sampled_loss_total(*pair, own, ids, None, *attributes), leaf)
        torch.testing.assert_close(found, *torch.autograd.grad(eager(*pair, own, ids, None, *attributes), leaf))


def test_opcheck():
    query, table, own, ids, weights = example(dtype=torch.float32)
    query.requires_grad_(), table.requires_grad_()
    for wanted in ([True, True], [False, False]):
        leaves = [x if want else x.detach() for x, want in zip((query, table), wanted, strict=True)]
        arguments = *leaves, own, ids, weights, 1.0, -1.0, -1e4, 3, "bce", wanted
        torch.library.opcheck(ops.sampled_loss_ahead.default, arguments)


def test_compiles_whole_with_sizes_unknown():
    query, table, own, ids, weights = example()
    query.requires_grad_(), table.requires_grad_()

    def loss(query, table):
        return ops.sampled_loss_total(query, table, own, ids, weights, 1.0, 0.5, -INF, 3, "softmax") * 2

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    same(*(torch.autograd.grad(f(query, table), (query, table)) for f in (compiled, loss)))


def test_flops():
    from torch.utils.flop_counter import FlopCounterMode

    query, table, own, ids, weights = example(7, 5, 9, 6)
    query.requires_grad_(), table.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        ops.sampled_loss_total(query, table, own, ids, weights, 1.0, -1.0, NAN, 1, "softmax").backward()
    assert counter.get_total_flops() == 3 * 2 * 7 * (5 + 1) * 9


WRONG = {
    "kind": ({"kind": "hinge"}, ValueError, "kind must be one of softmax, bce, not 'hinge'"),
    "group": ({"group": 0}, ValueError, "group must be from 1 to 1048576, not 0"),
    "weights": ({"weights": torch.ones(3)}, ValueError, "weights.shape\\[0\\] must be 7 \\(T\\), not 3"),
    "positives": (
        {"positive_ids": torch.zeros(3, dtype=torch.int64)},
        ValueError,
        "positive_ids.shape\\[0\\] must be 7",
    ),
    "id": ({"ids": torch.full((7, 5), 6)}, IndexError, "row 6, entry 0 of ids, is out of range: there are 6 rows"),
    "positive": (
        {"positive_ids": torch.full((7,), -1)},
        IndexError,
        "row -1, entry 0 of positive_ids, is out of range",
    ),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_wrong_arguments_say_what_is_wrong(case):
    changes, error, message = case
    inputs = module.Inputs(*example(), 1.0, -1.0, NAN, 1, "softmax")
    with pytest.raises(error, match=message):
        ops.sampled_loss_total(*inputs._replace(**changes))
    if error is IndexError:
        with pytest.raises(error, match=message):
            references.sampled_loss_ahead(*inputs._replace(**changes)[:10], [True, True])
