"""jagged_attention against the dense formula on the padded batch: results, gradients, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from turbogr_compile import _torch
from turbogr_compile.kernels import dropout
from turbogr_compile.kernels.attention_inputs import ACTIVATIONS
from turbogr_compile.kernels.jagged_attention import DIFFERENTIABLE, Inputs

ops = torch.ops.turbogr
FAR = 2**62
SUMS = 4e-4  # what sums in single precision may be off by, over a few thousand pairs
EVERYTHING = ("key_valid", "pair_mask", "bias", "position_bias", "time_bias")


@dataclass(frozen=True)
class Case:
    """A ragged problem: which columns of each sequence are queries and keys, and what shapes the scores."""

    queries: torch.Tensor  # bool (S, N)
    keys: torch.Tensor  # bool (S, N)
    heads: int = 2
    groups: int = 1
    features: int = 3
    value_features: int = 2
    parts: tuple[str, ...] = ()
    broadcast: tuple[bool, bool, bool, bool] = (False, False, False, False)
    one_head: bool = False
    activation: str = "softmax"
    scale: float = 0.7
    post_scale: float = 1.0
    window: tuple[int, int] = (-FAR, FAR)
    dropout: float = 0.0
    score_cap: float = 0.0
    seed: int = 0
    dtype: torch.dtype = torch.float64

    def inputs(self) -> Inputs:
        """Packed arguments; random, and the same for the same case."""
        random = torch.Generator().manual_seed(self.seed)
        sequences, columns = self.queries.shape
        shape = [
            1 if one else size
            for one, size in zip(self.broadcast, (sequences, self.heads, columns, columns), strict=True)
        ]
        heads = 1 if self.one_head else self.heads
        rows, seen = int(self.queries.sum()), int(self.keys.sum())

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=random, dtype=torch.float64).to(self.dtype)

        def either(*size: int) -> torch.Tensor:
            return torch.rand(size, generator=random) < 0.7

        times = torch.randint(0, 50, (sequences, columns), generator=random)
        timed = "time_bias" in self.parts
        return Inputs(
            query=normal(rows, self.heads, self.features),
            key=normal(seen, self.groups, self.features),
            value=normal(seen, self.groups, self.value_features),
            query_offsets=offsets(self.queries),
            key_offsets=offsets(self.keys),
            query_columns=self.queries.nonzero()[:, 1],
            key_columns=self.keys.nonzero()[:, 1],
            key_valid=either(seen) if "key_valid" in self.parts else None,
            pair_mask=either(*shape) if "pair_mask" in self.parts else None,
            bias=normal(*shape) if "bias" in self.parts else None,
            position_bias=normal(heads, 2 * columns - 1) if "position_bias" in self.parts else None,
            time_bias=normal(heads, 4) if timed else None,
            time_bounds=torch.tensor([1, 5, 20]) if timed else None,
            query_times=times[self.queries] if timed else None,
            key_times=times[self.keys] if timed else None,
            dropout_seed=torch.tensor([self.seed]) if self.dropout else None,
            activation=self.activation,
            scale=self.scale,
            post_scale=self.post_scale,
            min_distance=self.window[0],
            max_distance=self.window[1],
            dropout=self.dropout,
            sink=normal(self.heads) if "sink" in self.parts else None,
            score_cap=self.score_cap,
        )


def attention(*arguments: Any, **named: Any) -> torch.Tensor:
    return ops.jagged_attention(*arguments, **named)[0]


def offsets(mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)])


def padded(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rows at the places of a mask, zeros elsewhere; differentiable."""
    return x.new_zeros((*mask.shape, *x.shape[1:])).index_put((mask,), x)


def dense(case: Case, a: Inputs) -> torch.Tensor:
    """The formula as a model would write it, on (S, H, N, N); rows of queries are taken out at the end."""
    sequences, columns = case.queries.shape
    q, k, v = padded(a.query, case.queries), padded(a.key, case.keys), padded(a.value, case.keys)
    k, v = (x.repeat_interleave(case.heads // case.groups, 2) for x in (k, v))
    scores = torch.einsum("sihd,sjhd->shij", q, k) * a.scale
    if a.score_cap:
        scores = a.score_cap * torch.tanh(scores / a.score_cap)
    distance = torch.arange(columns)[:, None] - torch.arange(columns)[None, :]
    visible = case.keys[:, None, None, :] & (distance >= a.min_distance) & (distance <= a.max_distance)
    if a.key_valid is not None:
        visible = visible & padded(a.key_valid, case.keys)[:, None, None, :]
    if a.pair_mask is not None:
        visible = visible & a.pair_mask
    if a.bias is not None:
        scores = scores + a.bias
    if a.position_bias is not None:
        scores = scores + a.position_bias[:, distance + columns - 1]
    if a.time_bias is not None:
        earlier, later = padded(a.key_times, case.keys), padded(a.query_times, case.queries)
        gap = (later[:, :, None] - earlier[:, None, :]).abs()
        bucket = sum((gap >= bound).long() for bound in a.time_bounds)
        scores = scores + a.time_bias[:, bucket].transpose(0, 1)
    weights = activated(a, scores.masked_fill(~visible, -1e30)) * visible
    weights = weights * a.post_scale
    if a.dropout_seed is not None:
        every = torch.arange(columns)
        seed = int(a.dropout_seed)
        kept = torch.stack([dropout.kept(seed, s, case.heads, every, every, a.dropout) for s in range(sequences)])
        weights = weights * kept / (1 - a.dropout)
    return torch.einsum("shij,sjhd->sihd", weights, v)[case.queries]


def activated(a: Inputs, scores: torch.Tensor) -> torch.Tensor:
    """Weights from scores (S, H, N, N); a sink is one more column, as GPT-OSS writes it."""
    if a.activation == "softmax":
        if a.sink is None:
            return scores.softmax(-1)
        sink = a.sink[:, None, None].expand(*scores.shape[:3], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    if a.activation == "linear":
        return scores
    if a.activation == "silu":
        return torch.nn.functional.silu(scores)
    return scores.sigmoid() if a.activation == "sigmoid" else scores.relu().square()


def differentiable(a: Inputs) -> tuple[Inputs, list[torch.Tensor]]:
    leaves = {n: x.detach().clone().requires_grad_() for n in DIFFERENTIABLE if (x := getattr(a, n)) is not None}
    return a._replace(**leaves), list(leaves.values())


def compare(case: Case) -> None:
    a, leaves = differentiable(case.inputs())
    found, wanted = attention(*a), dense(case, a)
    torch.testing.assert_close(found, wanted)
    cotangent = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(1))
    found_grads = torch.autograd.grad(found, leaves, cotangent)
    wanted_grads = torch.autograd.grad(wanted, leaves, cotangent)
    torch.testing.assert_close(found_grads, wanted_grads)


@st.composite
def cases(draw: Any) -> Case:
    sequences, columns = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rows = st.lists(st.lists(st.booleans(), min_size=columns, max_size=columns), min_size=sequences, max_size=sequences)
    groups = draw(st.integers(1, 2))
    low = draw(st.sampled_from((-FAR, -2, 0, 1)))
    activation = draw(st.sampled_from(ACTIVATIONS))
    parts = (*EVERYTHING, "sink") if activation == "softmax" else EVERYTHING
    return Case(
        queries=torch.tensor(draw(rows)),
        keys=torch.tensor(draw(rows)),
        heads=groups * draw(st.integers(1, 2)),
        groups=groups,
        parts=tuple(draw(st.sets(st.sampled_from(parts)))),
        broadcast=draw(st.tuples(*[st.booleans()] * 4)),
        one_head=draw(st.booleans()),
        activation=activation,
        post_scale=draw(st.sampled_from((1.0, 0.25))),
        window=(low, draw(st.sampled_from((FAR, 2, max(low, 0))))),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.4))),
        score_cap=draw(st.sampled_from((0.0, 0.0, 0.8))),
        seed=draw(st.integers(0, 2**40)),
    )


def ragged(lengths: list[int], columns: int) -> torch.Tensor:
    return torch.arange(columns) < torch.tensor(lengths)[:, None]


CAUSAL = Case(ragged([3, 0, 5, 1], 5), ragged([3, 2, 5, 0], 5), window=(0, FAR))
FULL = replace(CAUSAL, heads=4, groups=2, parts=EVERYTHING, one_head=True, post_scale=0.5)
EACH = pytest.mark.parametrize("activation", ACTIVATIONS)


def with_sink(case: Case) -> Case:
    """With a cap, and a sink where there is a place for one."""
    parts = (*case.parts, "sink") if case.activation == "softmax" else case.parts
    return replace(case, parts=parts, score_cap=0.9)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_equals_the_dense_formula(case):
    compare(case)


def combinations(case: Case) -> list[Case]:
    """Cap, sink, kind of bias, kind of mask and dropout, each with each."""
    sinks = ((), ("sink",)) if case.activation == "softmax" else ((),)
    biases = ((), ("bias",), ("position_bias",), ("time_bias",))
    masks = (((), (-FAR, FAR)), ((), (0, 2)), (("key_valid",), (0, FAR)), (("pair_mask",), (-FAR, FAR)))
    return [
        replace(case, score_cap=cap, parts=(*sink, *bias, *mask), dropout=dropped, window=window)
        for cap, sink, bias, (mask, window), dropped in product((0.0, 0.7), sinks, biases, masks, (0.0, 0.3))
    ]


@EACH
def test_every_combination(activation):
    for case in combinations(replace(CAUSAL, activation=activation, seed=11)):
        compare(case)


@EACH
@pytest.mark.parametrize("part", EVERYTHING)
def test_each_part_alone(part, activation):
    compare(replace(CAUSAL, parts=(part,), activation=activation, seed=3))
    compare(replace(CAUSAL, parts=(part,), activation=activation, broadcast=(True,) * 4, one_head=True, seed=4))


@EACH
def test_last_layer_asks_for_one_row_of_each_sequence(activation):
    last = torch.zeros(3, 6, dtype=torch.bool)
    last[0, 5] = last[2, 3] = True
    compare(Case(last, ragged([6, 2, 4], 6), window=(0, FAR), activation=activation))


def test_left_padding_and_holes_keep_their_columns():
    rows = torch.tensor([[0, 0, 1, 1, 1], [1, 0, 1, 0, 1]]).bool()
    compare(Case(rows, rows, window=(0, 2), parts=("position_bias",)))


def test_query_without_visible_key_is_zero_and_has_finite_gradients():
    a, leaves = differentiable(CAUSAL.inputs()._replace(key_valid=torch.zeros(10, dtype=torch.bool)))
    result = attention(*a)
    assert (result == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(result.sum(), leaves))


def test_query_without_visible_key_gives_all_to_the_sink():
    """Zero, as if the sink were a key whose value is zero; the sink moves nothing there, so its gradient is zero."""
    a = replace(CAUSAL, parts=("sink", "key_valid")).inputs()
    a, leaves = differentiable(a._replace(key_valid=torch.zeros(10, dtype=torch.bool)))
    result, log_sum = ops.jagged_attention(*a)
    assert (result == 0).all() and (log_sum == torch.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(result.sum(), leaves))


def test_log_sum_holds_the_sink():
    a = replace(CAUSAL, parts=("sink",), heads=1).inputs()
    plain, wanted = ops.jagged_attention(*a._replace(sink=None))[1], ops.jagged_attention(*a)[1]
    torch.testing.assert_close(wanted, torch.logaddexp(plain, a.sink))


def test_a_sink_of_minus_infinity_is_none():
    a, leaves = differentiable(replace(CAUSAL, parts=("sink",)).inputs())
    a.sink.data.fill_(-torch.inf)
    result = attention(*a)
    assert torch.equal(result, attention(*a._replace(sink=None)))
    *_, grad = torch.autograd.grad(result.sum(), leaves)
    assert (grad == 0).all()


def test_a_cap_far_above_scores_changes_nothing_and_one_below_bounds_them():
    a = replace(CAUSAL, heads=1, activation="squared_relu", scale=50.0).inputs()
    torch.testing.assert_close(attention(*a._replace(score_cap=1e9)), attention(*a))
    ones = a._replace(value=torch.ones_like(a.value), score_cap=2.0)
    assert attention(*ones).max() <= 5 * 2.0**2  # five keys, none with a score above the cap
    assert attention(*ones._replace(score_cap=0.0)).max() > 5 * 2.0**2


def test_a_bias_hides_a_pair_despite_the_cap():
    """The cap is of products alone, as in Gemma 2: what a mask adds stays."""
    a = replace(CAUSAL, score_cap=0.5).inputs()
    hidden = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    hidden.diagonal(dim1=2, dim2=3).fill_(False)
    filled = torch.zeros(1, 1, 5, 5).double().masked_fill(hidden, -1e9)
    torch.testing.assert_close(attention(*a._replace(bias=filled)), attention(*a._replace(pair_mask=~hidden)))


def test_calls_without_the_later_arguments_are_as_before():
    a, leaves = differentiable(CAUSAL.inputs())
    assert a.sink is None and a.score_cap == 0.0
    found, wanted = attention(*a[:-2]), attention(*a)
    assert torch.equal(found, wanted)
    for x, y in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves), strict=True):
        assert torch.equal(x, y)
    by_name = attention(*a[:-2], sink=torch.zeros(2).double(), score_cap=1.5)
    assert torch.equal(by_name, attention(*a._replace(sink=torch.zeros(2).double(), score_cap=1.5)))


def test_bias_of_minus_infinity_hides_a_pair():
    a = replace(CAUSAL, window=(-FAR, FAR)).inputs()
    hidden = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.5
    hidden[..., 2, :] = True
    by_bias, leaves = differentiable(a._replace(bias=torch.zeros(1, 1, 5, 5).double().masked_fill(hidden, -torch.inf)))
    result = attention(*by_bias)
    assert torch.equal(result, attention(*a._replace(pair_mask=~hidden)))
    assert all(g.isfinite().all() for g in torch.autograd.grad(result.sum(), leaves))


def test_a_time_gap_on_a_bound_falls_behind_it():
    two = ragged([1], 1)
    a = Case(two, two, heads=1, parts=("time_bias",), activation="silu", scale=0.0).inputs()
    a = a._replace(value=torch.ones(1, 1, 1).double(), time_bias=torch.tensor([[10.0, 20.0, 30.0, 40.0]]).double())
    for gap, entry in ((0, 10.0), (1, 20.0), (4, 20.0), (5, 30.0), (20, 40.0), (99, 40.0)):
        for sign in (1, -1):
            b = a._replace(query_times=torch.tensor([100 + sign * gap]), key_times=torch.tensor([100]))
            assert attention(*b).item() == pytest.approx(entry, abs=1e-2)


def test_rows_behind_the_last_offset_belong_to_nobody():
    a = with_sink(CAUSAL).inputs()
    more = a._replace(
        **{n: torch.cat([getattr(a, n), getattr(a, n)[:2]]) for n in ("query", "key", "value")},
        query_columns=torch.cat([a.query_columns, torch.zeros(2, dtype=torch.int64)]),
        key_columns=torch.cat([a.key_columns, torch.zeros(2, dtype=torch.int64)]),
    )
    more, leaves = differentiable(more)
    result = attention(*more)
    torch.testing.assert_close(result[:-2], attention(*a))
    assert (result[-2:] == 0).all()
    *rows, sink = torch.autograd.grad(result.sum(), leaves)
    assert all((g[-2:] == 0).all() for g in rows)
    alone, own = differentiable(a)
    torch.testing.assert_close(sink, torch.autograd.grad(attention(*alone).sum(), own)[-1])


# --- derivatives ----------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("capped", [False, True])
def test_gradcheck(activation, capped):
    case = replace(FULL, queries=ragged([2, 3], 3), keys=ragged([3, 2], 3), activation=activation, dropout=0.3, seed=5)
    a, given = differentiable((with_sink(case) if capped else case).inputs())
    names = [name for name in DIFFERENTIABLE if getattr(a, name) is not None]

    def call(*leaves):
        return attention(*a._replace(**dict(zip(names, leaves, strict=True))))

    assert torch.autograd.gradcheck(call, given)


def test_gradients_nobody_wants_are_not_computed():
    a = FULL.inputs()
    a = a._replace(query=a.query.requires_grad_())
    grad = torch.ones(a.query.shape[0], 4, 2).double()
    wanted = [True, *[False] * 6]
    found = ops.jagged_attention_backward(grad, *ops.jagged_attention(*a), *a, wanted)
    assert [x.numel() for x in found] == [a.query.numel(), *[0] * 6]
    assert torch.equal(torch.autograd.grad(attention(*a), a.query, grad)[0], found[0])


def test_second_derivatives_are_refused():
    a, leaves = differentiable(CAUSAL.inputs())
    (first, *_) = torch.autograd.grad(attention(*a).square().sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="jagged_attention_backward has no derivative"):
        first.sum().backward()


# --- dtypes, modes and empty inputs ---------------------------------------------------------------


@EACH
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_at_the_end(dtype, activation, capped):
    lengths = ragged([40, 0, 7, 33], 40)
    case = replace(FULL, queries=lengths, keys=lengths, broadcast=(True,) * 4, dtype=dtype, activation=activation)
    a, leaves = differentiable((with_sink(case) if capped else case).inputs())
    wide = a._replace(**{n: x.detach().double() for n in DIFFERENTIABLE if (x := getattr(a, n)) is not None})
    wide, wide_leaves = differentiable(wide)
    found, wanted = attention(*a), attention(*wide)
    assert found.dtype == dtype
    sums = SUMS if activation != "linear" else 4 * SUMS  # whose weights are as large as scores
    close = partial(torch.testing.assert_close, rtol=0.51 * torch.finfo(dtype).eps, atol=sums)
    close(found.double(), wanted)
    grads = torch.autograd.grad(found.sum(), leaves)
    assert [g.dtype for g in grads] == [dtype] * len(leaves)
    wanted_grads = torch.autograd.grad(wanted.sum(), wide_leaves)
    if activation == "softmax":  # its backward starts from the result, which has been rounded
        eps = torch.finfo(dtype).eps
        close = partial(torch.testing.assert_close, rtol=eps, atol=4 * eps + SUMS)
    close([g.double() for g in grads], list(wanted_grads))


def test_bias_keeps_a_dtype_of_its_own():
    a = replace(FULL, dtype=torch.bfloat16).inputs()
    a, leaves = differentiable(a._replace(bias=a.bias.float()))
    grads = torch.autograd.grad(attention(*a).sum(), leaves)
    assert [g.dtype for g in grads] == [x.dtype for x in leaves]


@EACH
@pytest.mark.parametrize("lengths", [([], []), ([0, 0], [0, 0]), ([2, 0], [0, 0]), ([0, 0], [1, 2])])
def test_without_rows(lengths, activation):
    queries, keys = (torch.zeros(len(x), 3, dtype=torch.bool) if not sum(x) else ragged(x, 3) for x in lengths)
    case = with_sink(Case(queries, keys, parts=EVERYTHING, activation=activation, dropout=0.5))
    a, leaves = differentiable(case.inputs())
    result = attention(*a)
    assert result.shape == (sum(lengths[0]), 2, 2) and (result == 0).all()
    grads = torch.autograd.grad(result.sum(), leaves)
    assert all(g.shape == x.shape and (g == 0).all() for g, x in zip(grads, leaves, strict=True))


def test_modes_without_gradients():
    a, _ = differentiable(FULL.inputs())
    wanted = attention(*a)
    with torch.no_grad():
        plain = attention(*a)
    with torch.inference_mode():
        inference = attention(*a)
    assert wanted.requires_grad and not plain.requires_grad and inference.is_inference()
    assert torch.equal(wanted, plain) and torch.equal(wanted, inference)


@EACH
def test_autocast_does_not_reach_inside(activation):
    a, leaves = differentiable(with_sink(replace(FULL, dtype=torch.float32, activation=activation)).inputs())
    wanted = attention(*a)
    wanted_grads = torch.autograd.grad(wanted.sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(*a)
        grads = torch.autograd.grad(found.sum(), leaves)
    assert torch.equal(found, wanted)
    assert all(torch.equal(x, y) for x, y in zip(grads, wanted_grads, strict=True))


def test_strided_inputs_and_the_same_result_twice():
    a = FULL.inputs()
    strided = a._replace(
        query=a.query.transpose(0, 2).contiguous().transpose(0, 2),
        key=a.key.transpose(0, 1).contiguous().transpose(0, 1),
        bias=a.bias.transpose(2, 3).contiguous().transpose(2, 3),
    )
    first, second = attention(*strided), attention(*strided)
    assert first.is_contiguous() and torch.equal(first, second)
    torch.testing.assert_close(first, attention(*a))


# --- compilers ------------------------------------------------------------------------------------


@EACH
@pytest.mark.parametrize("parts", [(), EVERYTHING])
def test_opcheck(parts, activation):
    case = replace(FULL, parts=parts, activation=activation, dropout=0.2 if parts else 0.0)
    a, _ = differentiable((with_sink(case) if parts else case).inputs())
    torch.library.opcheck(ops.jagged_attention.default, tuple(a))
    grad = torch.randn(a.query.shape[0], 4, 2).double()
    plain = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in a)
    wanted = [x is not None for x in (getattr(a, n) for n in DIFFERENTIABLE)]
    pair = ops.jagged_attention(*plain)
    torch.library.opcheck(ops.jagged_attention_backward.default, (grad, *pair, *plain, wanted))


@pytest.mark.parametrize("case", [FULL, with_sink(FULL)], ids=["plain", "sink"])
def test_aot_autograd_takes_a_backward_of_its_own(case):
    a, leaves = differentiable(case.inputs())
    seen = []

    def compiler(module, inputs):
        seen.append([n.target for n in module.graph.nodes if n.op == "call_function"])
        return _torch.boxed(module.forward)

    def backend(module, inputs):
        return _torch.aot_autograd(module, inputs, fw_compiler=compiler, bw_compiler=compiler)

    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: attention(*x), backend=backend, fullgraph=True, dynamic=True)
    found, wanted = compiled(*a), attention(*a)
    assert torch.equal(found, wanted)
    for x, y in zip(torch.autograd.grad(found.sum(), leaves), torch.autograd.grad(wanted.sum(), leaves), strict=True):
        assert torch.equal(x, y)
    forward, backward = seen
    assert ops.jagged_attention.default in forward and ops.jagged_attention_backward.default in backward
    assert ops.jagged_attention.default not in backward


def test_unbacked_sizes_are_not_guarded_on():
    """T of queries and keys are data: tracing says nothing about them, in forward and backward."""
    a = replace(FULL, dropout=0.1).inputs()

    def step(query_rows, key_rows, query, key, value, bias, position_bias, time_bias):
        leaves = [
            ops.gather_rows(query, query_rows.nonzero()[:, 0]),
            ops.gather_rows(key, key_rows.nonzero()[:, 0]),
            ops.gather_rows(value, key_rows.nonzero()[:, 0]),
        ]
        b = a._replace(
            **dict(zip(("query", "key", "value"), leaves, strict=True)),
            query_columns=a.query_columns[query_rows.nonzero()[:, 0]],
            key_columns=a.key_columns[key_rows.nonzero()[:, 0]],
            key_valid=a.key_valid[key_rows.nonzero()[:, 0]],
            query_times=a.query_times[query_rows.nonzero()[:, 0]],
            key_times=a.key_times[key_rows.nonzero()[:, 0]],
            bias=bias,
            position_bias=position_bias,
            time_bias=time_bias,
        )
        result = attention(*b)
        return torch.autograd.grad(result.sum(), [query, key, value, bias, position_bias, time_bias])

    leaves = [getattr(a, n).requires_grad_() for n in DIFFERENTIABLE if n != "sink"]
    masks = torch.ones(a.query.shape[0], dtype=torch.bool), torch.ones(a.key.shape[0], dtype=torch.bool)
    module = _torch.make_fx(step, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*masks, *leaves)
    (node,) = module.graph.find_nodes(op="call_function", target=ops.jagged_attention.default)
    assert _torch.free_unbacked(node.meta["val"])
    env = _torch.shape_env_of(module.graph)
    assert not env.deferred_runtime_asserts and not [g for g in _torch.new_guards(env, 0) if "u" in g]
    wanted, own = differentiable(a)
    for x, y in zip(module(*masks, *leaves), torch.autograd.grad(attention(*wanted).sum(), own), strict=True):
        assert torch.equal(x, y)


# --- costs ----------------------------------------------------------------------------------------


def test_flops_count_pairs_within_sequences():
    a, _ = differentiable(FULL.inputs())
    with FlopCounterMode(display=False) as forward:
        result = attention(*a)
    pairs = 3 * 3 + 0 * 2 + 5 * 5 + 1 * 0
    assert forward.get_total_flops() == 2 * pairs * 4 * (3 + 2)
    with FlopCounterMode(display=False) as backward:
        result.sum().backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()


def test_flops_of_fake_offsets_are_an_upper_bound():
    fake = [*_torch.fake_inputs(FULL.inputs())]
    with fake[0].fake_mode, FlopCounterMode(display=False) as counter:
        attention(*fake)
    assert counter.get_total_flops() == 2 * 9 * 10 * 4 * (3 + 2)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any op makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return result


@EACH
def test_no_tensor_is_larger_than_one_sequence(activation):
    from turbogr_compile.kernels.jagged_attention import attention, attention_backward

    length, sequences = 64, 8
    mask = torch.ones(sequences, length, dtype=torch.bool)
    parts = ("key_valid", "position_bias", "time_bias")
    case = Case(mask, mask, heads=2, parts=parts, activation=activation, dropout=0.1, window=(0, FAR))
    a = with_sink(case).inputs()
    grad = torch.ones(sequences * length, 2, 2).double()
    with Largest() as largest:
        pair = attention(*a)
        attention_backward(grad, *pair, *a, [getattr(a, x) is not None for x in DIFFERENTIABLE])
    assert largest.bytes == 2 * length * length * 8


# --- bad input ------------------------------------------------------------------------------------

WRONG = {
    "query has 2 dims": dict(query=torch.zeros(9, 4)),
    "key features": dict(key=torch.zeros(10, 2, 7).double()),
    "dtypes differ": dict(value=torch.zeros(10, 2, 2)),
    "integers": dict(query=torch.zeros(9, 4, 3, dtype=torch.int64)),
    "heads": dict(query=torch.zeros(9, 3, 3).double()),
    "value rows": dict(value=torch.zeros(11, 2, 2).double()),
    "offsets int32": dict(query_offsets=torch.zeros(5, dtype=torch.int32)),
    "offsets of unequal length": dict(key_offsets=torch.tensor([0, 10])),
    "columns": dict(key_columns=torch.zeros(3, dtype=torch.int64)),
    "key_valid float": dict(key_valid=torch.ones(10)),
    "key_valid length": dict(key_valid=torch.ones(9, dtype=torch.bool)),
    "pair_mask dims": dict(pair_mask=torch.ones(5, 5, dtype=torch.bool)),
    "pair_mask float": dict(pair_mask=torch.ones(1, 1, 5, 5)),
    "bias sequences": dict(bias=torch.ones(2, 1, 5, 5)),
    "bias heads": dict(bias=torch.ones(1, 3, 5, 5)),
    "position_bias even": dict(position_bias=torch.ones(1, 8)),
    "time_bias alone": dict(time_bounds=None),
    "time_bias entries": dict(time_bias=torch.ones(1, 3)),
    "seed float": dict(dropout_seed=torch.ones(1)),
    "two seeds": dict(dropout_seed=torch.ones(2, dtype=torch.int64)),
    "sink dims": dict(sink=torch.zeros(4, 1)),
    "sink heads": dict(sink=torch.zeros(3)),
    "sink integers": dict(sink=torch.zeros(4, dtype=torch.int64)),
    "sink of silu": dict(sink=torch.zeros(4), activation="silu"),
    "cap below zero": dict(score_cap=-1.0),
    "cap infinite": dict(score_cap=float("inf")),
    "cap not a number": dict(score_cap=float("nan")),
    "activation": dict(activation="relu"),
    "dropout": dict(dropout=1.5),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_bad_shapes_and_dtypes_raise_real_and_fake(change):
    a = FULL.inputs()._replace(**change)
    with pytest.raises(ValueError, match="jagged_attention: "):
        attention(*a)
    fake = _torch.fake_inputs(a)
    with pytest.raises(ValueError, match="jagged_attention: "):
        attention(*fake)


@pytest.mark.parametrize("bounds", [[0, 3, 3, 8, 99], [0, 3, 2, 8, 9], [-1, 3, 3, 8, 9]])
def test_offsets_outside_of_rows_raise(bounds):
    with pytest.raises(ValueError, match="query_offsets"):
        attention(*FULL.inputs()._replace(query_offsets=torch.tensor(bounds)))


@pytest.mark.parametrize("part", ["position_bias", "bias", "pair_mask"])
@pytest.mark.parametrize("column", [-1, -7, 5, 99])
@pytest.mark.parametrize("side", ["query_columns", "key_columns"])
def test_columns_outside_of_a_table_raise(part, column, side):
    a = replace(CAUSAL, parts=(part,)).inputs()
    columns = getattr(a, side).clone()
    columns[7] = column  # of the third sequence, which has queries and keys in every column
    error, message = (IndexError, f"exceed {part}") if column >= 0 else (ValueError, f"row {column}, entry 7 of {side}")
    with pytest.raises(error, match=message):
        attention(*a._replace(**{side: columns}))
