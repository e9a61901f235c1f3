"""sampled_softmax against cross-entropy of each row's logits, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from turbogr_compile import _torch
from turbogr_compile.kernels import sampled_softmax as kernel

from .layouts import LAYOUTS

ops = torch.ops.turbogr


@dataclass(frozen=True)
class Case:
    groups: tuple[tuple[int, int], ...] = ((3, 4), (0, 2), (2, 0), (0, 0), (1, 5))  # rows and negatives of each
    left: int = 0  # rows and negatives behind the last group
    width: int = 4
    ids: int = 0  # so many different ones; 0 for none
    scaled: bool = False
    scale: float = 0.7
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def inputs(self) -> tuple[Any, ...]:
        """Arguments of the op; random, and the same for the same case."""
        random = torch.Generator().manual_seed(self.seed)

        def normal(rows: int) -> torch.Tensor:
            x = torch.randn((rows, self.width), generator=random, dtype=torch.float64)
            return x.to(self.dtype).requires_grad_()

        rows, negatives = (sum(sizes) + self.left for sizes in (self.of(0), self.of(1)))
        offsets = [torch.tensor([0, *self.of(side)]).cumsum(0) for side in (0, 1)]
        ids = [torch.randint(self.ids, (n,), generator=random) if self.ids else None for n in (rows, negatives)]
        scales = 2.0 ** torch.randint(-3, 4, (len(self.groups),), generator=random) if self.scaled else None
        return normal(rows), normal(rows), normal(negatives), *offsets, *ids, scales, self.scale

    def of(self, side: int) -> list[int]:
        return [group[side] for group in self.groups]


CASES = st.builds(
    Case,
    groups=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=5).map(tuple),
    left=st.integers(0, 2),
    width=st.integers(1, 5),
    ids=st.sampled_from([0, 1, 3, 1000]),
    scaled=st.booleans(),
    scale=st.sampled_from([1.0, 0.3, -2.0]),
    seed=st.integers(0, 3),
)


def plain(query, positive, negative, query_offsets, negative_offsets, positive_ids, negative_ids, scales, scale):
    """Row by row: cross-entropy of the positive, which comes first, among the negatives that are no hits."""
    losses = [row.sum() * 0 for row in query]
    for g in range(query_offsets.shape[0] - 1):
        for t in range(query_offsets[g], query_offsets[g + 1]):
            near = torch.arange(negative_offsets[g], negative_offsets[g + 1])
            if positive_ids is not None:
                near = near[negative_ids[near] != positive_ids[t]]
            factor = 1.0 if scales is None else float(scales[g])
            logits = scale * torch.cat([positive[t : t + 1], factor * negative[near]]) @ query[t]
            losses[t] = torch.nn.functional.cross_entropy(logits, torch.tensor(0))
    return torch.stack(losses) if losses else query.sum(1)


def gradients(result, inputs, slope=None):
    return torch.autograd.grad(result, inputs[:3], slope, allow_unused=True, materialize_grads=True)


@settings(max_examples=60, deadline=None)
@given(CASES)
def test_losses_and_gradients(case):
    inputs = case.inputs()
    (found, log_sum), wanted = ops.sampled_softmax(*inputs), plain(*inputs)
    torch.testing.assert_close(found, wanted)
    belong = torch.arange(found.shape[0]) < sum(case.of(0))
    own = case.scale * (inputs[0] * inputs[1]).sum(1) * belong
    torch.testing.assert_close(log_sum, found + own)
    slope = torch.randn_like(wanted)
    for a, b in zip(gradients(found, inputs, slope), gradients(wanted, inputs, slope), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_rounds_only_at_the_end(dtype):
    inputs = Case(((60, 90), (7, 300)), width=16, ids=50, scaled=True, scale=0.2, dtype=dtype).inputs()
    wide = [x.detach().double().requires_grad_() for x in inputs[:3]]
    (found, log_sum), wanted = ops.sampled_softmax(*inputs), plain(*wide, *inputs[3:])
    assert found.dtype == log_sum.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    slope = torch.randn_like(found)
    for a, b in zip(gradients(found, inputs, slope), gradients(wanted, wide, slope.double()), strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=max(torch.finfo(dtype).eps, 2e-5), atol=1e-5)


def test_rows_divided_by_a_power_of_two_lose_nothing():
    case = Case(((4, 9), (3, 5)), ids=20, dtype=torch.float32)
    query, positive, negative, *rest, _, scale = case.inputs()
    scales = torch.tensor([2.0**12, 2.0**-9])
    divided = (negative.detach() / scales.repeat_interleave(torch.tensor(case.of(1)))[:, None]).requires_grad_()
    whole = (query, positive, negative, *rest, None, scale)
    apart = (query, positive, divided, *rest, scales, scale)
    found, wanted = ops.sampled_softmax(*apart)[0], ops.sampled_softmax(*whole)[0]
    assert torch.equal(found, wanted)
    for a, b in zip(gradients(found.sum(), apart)[:2], gradients(wanted.sum(), whole)[:2], strict=True):
        assert torch.equal(a, b)


def test_shared_and_repeated_negatives_agree():
    """One group of all rows, and a group for each row with the same negatives."""
    shared = Case(((6, 9),), ids=12).inputs()
    query, positive, negative, _, _, positive_ids, negative_ids, _, scale = shared
    each = (torch.arange(7), 9 * torch.arange(7), positive_ids, negative_ids.repeat(6), None, scale)
    repeated = (query, positive, negative.repeat(6, 1), *each)
    found, wanted = ops.sampled_softmax(*repeated), ops.sampled_softmax(*shared)
    torch.testing.assert_close(found, wanted)
    for a, b in zip(gradients(found[0].sum(), shared), gradients(wanted[0].sum(), shared), strict=True):
        torch.testing.assert_close(a, b)


def test_without_negatives_there_is_nothing_to_lose():
    for ids, negatives in ((0, 0), (1, 5)):  # none at all, or each a hit
        inputs = Case(((3, negatives),), ids=ids).inputs()
        loss, _ = ops.sampled_softmax(*inputs)
        assert (loss == 0).all()
        assert all((g == 0).all() for g in gradients(loss.sum(), inputs))


@pytest.mark.parametrize("size", [1e3, 1e30])
def test_large_logits_do_not_overflow(size):
    query, positive, negative, *rest = Case(((5, 8),)).inputs()
    inputs = ((size * query.detach()).requires_grad_(), positive, negative, *rest)
    found, wanted = ops.sampled_softmax(*inputs)[0], plain(*inputs)
    torch.testing.assert_close(found, wanted)
    for a, b in zip(gradients(found.sum(), inputs), gradients(wanted.sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_rows_and_negatives_in_no_group_are_not_looked_at():
    case = Case(left=2, ids=9)
    query, positive, negative, *rest = case.inputs()
    spoilt = [x.detach().clone() for x in (query, positive, negative)]
    for x in spoilt:
        x[-2:] = torch.nan
        x.requires_grad_()
    (wanted, top), (found, log_sum) = (
        ops.sampled_softmax(query, positive, negative, *rest),
        ops.sampled_softmax(*spoilt, *rest),
    )
    assert torch.equal(found, wanted) and torch.equal(log_sum, top)
    assert (found[-2:] == 0).all() and (log_sum[-2:] == 0).all()
    for a, b in zip(gradients(found.sum(), spoilt), gradients(wanted.sum(), (query, positive, negative)), strict=True):
        assert torch.equal(a, b) and (a[-2:] == 0).all()


@settings(max_examples=20, deadline=None)
@given(CASES, st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_only_wanted_gradients_are_made(case, wanted):
    with torch.no_grad():
        inputs = case.inputs()
        loss, log_sum = ops.sampled_softmax(*inputs)
        rest = (torch.randn_like(loss), log_sum, *inputs)
        all_of_them = kernel.sampled_softmax_backward(*rest, [True] * 3)
        found = ops.sampled_softmax_backward(*rest, list(wanted))
    for some, whole, want in zip(found, all_of_them, wanted, strict=True):
        assert torch.equal(some, whole) if want else some.shape == (0,)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_change_nothing(layout):
    with torch.no_grad():
        inputs = Case(ids=4, scaled=True).inputs()
        spread = [layout(x) if isinstance(x, torch.Tensor) and x.dim() == 2 else x for x in inputs]
        spread = [torch.stack([x, x], 1)[:, 0] if isinstance(x, torch.Tensor) and x.dim() == 1 else x for x in spread]
        loss, log_sum = ops.sampled_softmax(*inputs)
        torch.testing.assert_close(ops.sampled_softmax(*spread), (loss, log_sum))
        found, wanted = (ops.sampled_softmax_backward(loss, log_sum, *x, [True] * 3) for x in (spread, inputs))
        torch.testing.assert_close(found, wanted)


def test_autocast_stays_out():
    inputs = Case(dtype=torch.float32).inputs()
    wanted = ops.sampled_softmax(*inputs)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found = ops.sampled_softmax(*inputs)[0]
    assert torch.equal(found, wanted)
    assert all(map(torch.equal, gradients(found.sum(), inputs), gradients(wanted.sum(), inputs)))


# --- as an op ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [Case(), Case(ids=4, scaled=True, left=1)])
def test_gradcheck_and_opcheck(case):
    inputs = case.inputs()
    assert torch.autograd.gradcheck(lambda *x: ops.sampled_softmax(*x, *inputs[3:])[0], inputs[:3])
    torch.library.opcheck(ops.sampled_softmax.default, inputs)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    loss, log_sum = ops.sampled_softmax(*plain)
    for wanted in ([True, False, True], [False] * 3):
        torch.library.opcheck(ops.sampled_softmax_backward.default, (loss, log_sum, *plain, wanted))


def test_fakes_have_shapes_and_dtypes_of_results():
    for dtype in (torch.float16, torch.float32):
        real = [x.detach() if isinstance(x, torch.Tensor) else x for x in Case(ids=3, left=1, dtype=dtype).inputs()]
        loss, log_sum = ops.sampled_softmax(*real)
        fake = _torch.fake_inputs(real)
        results = (ops.sampled_softmax(*fake), ops.sampled_softmax(*real))
        grads = (
            ops.sampled_softmax_backward(*results[0], *fake, [True, False, True]),
            ops.sampled_softmax_backward(loss, log_sum, *real, [True, False, True]),
        )
        for made, given_ in (*zip(*results, strict=True), *zip(*grads, strict=True)):
            assert (made.shape, made.dtype) == (given_.shape, given_.dtype)


def test_unbacked_rows_are_not_guarded_on():
    query, positive, negative, *rest = (x.detach() if isinstance(x, torch.Tensor) else x for x in Case(ids=4).inputs())
    positive_ids, scale = rest[2], rest[-1]
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0]).bool()
    query, positive, positive_ids = (torch.cat([x, x[:1]]) for x in (query, positive, positive_ids))

    def step(query, positive, negative, query_offsets, negative_offsets, positive_ids, negative_ids, mask):
        query, negative = (x.detach().requires_grad_() for x in (query, negative))
        kept = mask.nonzero()[:, 0]
        own = (query[kept], positive[kept], negative, query_offsets, negative_offsets, positive_ids[kept])
        loss, _ = ops.sampled_softmax(*own, negative_ids, None, scale)
        return torch.autograd.grad(loss.sum(), [query, negative])

    offsets = torch.tensor([0, 3, 5]), torch.tensor([0, 6, 11])
    arguments = (query, positive, negative, *offsets, positive_ids, rest[3], mask)
    module = _torch.make_fx(step, tracing_mode="symbolic")(*arguments)
    env = _torch.shape_env_of(module.graph)
    assert not env.deferred_runtime_asserts and not [g for g in _torch.new_guards(env, 0) if "u" in g]
    torch.testing.assert_close(module(*arguments), step(*arguments))


def test_flops_are_those_of_pairs_in_a_group():
    case = Case(((3, 4), (2, 0), (1, 5)))
    inputs = case.inputs()
    with FlopCounterMode(display=False) as forward:
        loss, _ = ops.sampled_softmax(*inputs)
    pairs, rows = 3 * 4 + 5, 6
    assert forward.get_total_flops() == 2 * (pairs + rows) * case.width
    with FlopCounterMode(display=False) as backward:
        loss.sum().backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
    with FlopCounterMode(display=False) as fake:
        ops.sampled_softmax(*_torch.fake_inputs(list(inputs)))
    assert fake.get_total_flops() == 2 * (6 * 9 + 6) * case.width


def test_second_derivatives_are_refused():
    inputs = Case().inputs()
    (slope,) = torch.autograd.grad(ops.sampled_softmax(*inputs)[0].sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        slope.sum().backward()


# --- bad input ---------------------------------------------------------------------------------------

Q, P, N = torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(5, 4)
QO, NO = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 5])
PI, NI, S = torch.zeros(3).long(), torch.zeros(5).long(), torch.ones(2)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ((Q.long(), P, N, QO, NO, PI, NI, S), "query must be torch.float32 or"),
        ((Q[0], P, N, QO, NO, PI, NI, S), "query must have 2 dims"),
        ((Q, P.double(), N, QO, NO, PI, NI, S), "positive must be torch.float32, not torch.float64"),
        ((Q, P[:2], N, QO, NO, PI, NI, S), "positive.shape\\[0\\] must be 3 \\(T\\), not 2"),
        ((Q, P, N[:, :3], QO, NO, PI, NI, S), "negative.shape\\[1\\] must be 4 \\(D\\), not 3"),
        ((Q, P, N.half(), QO, NO, PI, NI, S), "negative must be torch.float32, not torch.float16"),
        ((Q, P, N, QO.int(), NO, PI, NI, S), "query_offsets must be torch.int64"),
        ((Q, P, N, QO, NO[:2], PI, NI, S), "negative_offsets.shape\\[0\\] must be 3 \\(G\\+1\\), not 2"),
        ((Q, P, N, QO, NO[None], PI, NI, S), "negative_offsets must have 1 dims"),
        ((Q, P, N, QO, NO, None, NI, S), "positive_ids and negative_ids come together"),
        ((Q, P, N, QO, NO, PI[:2], NI, S), "positive_ids.shape\\[0\\] must be 3 \\(T\\), not 2"),
        ((Q, P, N, QO, NO, PI, NI.int(), S), "negative_ids must be torch.int64"),
        ((Q, P, N, QO, NO, PI, NI, S.double()), "negative_scales must be torch.float32"),
        ((Q, P, N, QO, NO, PI, NI, S[:1]), "negative_scales.shape\\[0\\] must be 2 \\(G\\), not 1"),
        ((Q, P, N.to("meta"), QO, NO, PI, NI, S), "negative is on meta, another tensor on cpu|device"),
    ],
)
def test_bad_shapes_and_dtypes_raise_real_and_fake(tensors, message):
    for given_ in (tensors, _torch.fake_inputs(list(tensors))):
        with pytest.raises((ValueError, RuntimeError), match=message):
            ops.sampled_softmax(*given_, 1.0)


@pytest.mark.parametrize("bounds", [[0, 1, 9], [0, 3, 2], [-1, 2, 3], [0, 2**62, 5]])
@pytest.mark.parametrize("side", ["query_offsets", "negative_offsets"])
def test_offsets_outside_of_rows_raise(bounds, side):
    wrong = torch.tensor(bounds)
    offsets = (wrong, NO) if side == "query_offsets" else (QO, wrong)
    with pytest.raises(ValueError, match=f"sampled_softmax: {side}"):
        ops.sampled_softmax(Q, P, N, *offsets, PI, NI, S, 1.0)
    with pytest.raises(ValueError, match=f"sampled_softmax_backward: {side}"):
        ops.sampled_softmax_backward(torch.zeros(3), torch.zeros(3), Q, P, N, *offsets, PI, NI, S, 1.0, [True] * 3)


def test_offsets_without_a_number_raise():
    none = torch.zeros(0).long()
    with pytest.raises(ValueError, match=r"query_offsets.shape\[0\] must be of the form G\+1"):
        ops.sampled_softmax(Q, P, N, none, none, PI, NI, None, 1.0)


def test_arguments_of_the_backward_are_checked():
    rest = (Q, P, N, QO, NO, PI, NI, S, 1.0)
    one = torch.zeros(3)
    for arguments, message in (
        ((one[:2], one, *rest, [True] * 3), "grad.shape\\[0\\] must be 3 \\(T\\), not 2"),
        ((one, one[None], *rest, [True] * 3), "log_sum must have 1 dims"),
        ((one.long(), one, *rest, [True] * 3), "grad must be torch.float32, not"),
        ((one, one, *rest, [True]), "one entry for each of query, positive, negative"),
    ):
        with pytest.raises(ValueError, match=f"sampled_softmax_backward: .*{message}"):
            ops.sampled_softmax_backward(*arguments)


@pytest.mark.parametrize("width", [0, 1])
def test_nothing_at_all(width):
    inputs = replace(Case(groups=()), width=width).inputs()
    loss, log_sum = ops.sampled_softmax(*inputs)
    assert loss.shape == log_sum.shape == (0,)
    assert [g.shape for g in gradients(loss.sum(), inputs)] == [(0, width)] * 3
