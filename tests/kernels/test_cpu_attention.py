"""The C++ attention against the reference, on problems of many blocks, and what it says about bad data."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.kernels.attention_inputs import ACTIVATIONS
from turbogr_compile.kernels.cpu import attention as cpu
from turbogr_compile.kernels.cpu.build import library
from turbogr_compile.kernels.jagged_attention import DIFFERENTIABLE, Inputs
from turbogr_compile.kernels.jagged_attention import attention as reference
from turbogr_compile.kernels.jagged_attention import attention_backward as reference_backward

from .test_jagged_attention import EACH, EVERYTHING, FAR, Case, combinations, ragged, with_sink

ops = torch.ops.turbogr
pytestmark = pytest.mark.skipif(library(torch.float32) is None, reason="no C++ kernels here")


def wanted_of(a: Inputs) -> list[bool]:
    return [getattr(a, name) is not None for name in DIFFERENTIABLE]


def gradient_like(result: torch.Tensor) -> torch.Tensor:
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(result.dtype)


def both_ways(a: Inputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Result, log_sum and gradients: of the kernel, and of the reference."""
    outcome = []
    for forward, backward in ((ops.jagged_attention, ops.jagged_attention_backward), (reference, reference_backward)):
        result, log_sum = forward(*a)
        grads = backward(gradient_like(result), result, log_sum, *a, wanted_of(a))
        outcome.append([result, log_sum, *grads])
    return outcome[0], outcome[1]


def compare(a: Inputs, **tolerance: float) -> None:
    found, wanted = both_ways(a)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, **tolerance)


@st.composite
def large_cases(draw: Any) -> Case:
    """Several blocks of keys and queries; columns with holes, invalid keys, windows, every bias, grouped heads."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    sequences, columns = draw(st.integers(1, 3)), draw(st.integers(1, 300))
    fill = draw(st.sampled_from((1.0, 0.5)))
    queries = (torch.rand(sequences, columns, generator=random) < fill) & ragged(
        torch.randint(0, columns + 1, (sequences,), generator=random).tolist(), columns
    )
    keys = queries if draw(st.booleans()) else torch.rand(sequences, columns, generator=random) < fill
    groups = draw(st.integers(1, 2))
    low = draw(st.sampled_from((-FAR, -60, 0, 1)))
    activation = draw(st.sampled_from(ACTIVATIONS))
    parts = (*EVERYTHING, "sink") if activation == "softmax" else EVERYTHING
    return Case(
        queries=queries,
        keys=keys,
        heads=groups * draw(st.integers(1, 2)),
        groups=groups,
        features=draw(st.sampled_from((1, 3, 8, 16, 25, 33))),
        value_features=draw(st.sampled_from((1, 2, 16, 19))),
        parts=tuple(sorted(draw(st.sets(st.sampled_from(parts))))),
        broadcast=draw(st.tuples(*[st.booleans()] * 4)),
        one_head=draw(st.booleans()),
        activation=activation,
        post_scale=draw(st.sampled_from((1.0, 0.25))),
        window=(low, draw(st.sampled_from((FAR, 70, max(low, 0))))),
        dropout=draw(st.sampled_from((0.0, 0.0, 0.4))),
        score_cap=draw(st.sampled_from((0.0, 0.0, 0.8))),
        seed=draw(st.integers(-(2**62), 2**62)),
    )


@settings(max_examples=60, deadline=None)
@given(large_cases())
def test_equals_the_reference(case):
    compare(case.inputs())


def test_activations_are_numbered_alike():
    """By attention.h, whose order the struct carries."""
    source = (Path(cpu.__file__).parent / "attention.h").read_text(encoding="utf-8")
    (names,) = re.findall(r"enum Activation : int64_t \{(.*?)\}", source)
    spelled = [re.sub(r"(?<!^)(?=[A-Z])", "_", name.strip()[1:]).lower() for name in names.split(",")]
    assert {name: place for place, name in enumerate(spelled)} == cpu.ACTIVATIONS
    assert set(spelled) == set(ACTIVATIONS)


@EACH
def test_every_combination_over_several_blocks(activation):
    lengths = ragged([130, 0, 21], 130)
    case = Case(lengths, lengths, heads=2, features=5, value_features=3, activation=activation, seed=4)
    for each in combinations(case):
        compare(each.inputs())


# What the kernel and the reference, both in single precision inside, may differ by: sums of 130 pairs, rounded at the
# end; the backward of softmax starts from the rounded result.
HALVES = {torch.float32: (2e-5, 2e-4), torch.float16: (4e-3, 4e-2), torch.bfloat16: (3e-2, 3e-1)}


@EACH
@pytest.mark.parametrize("dtype", HALVES)
def test_other_dtypes(activation, dtype):
    lengths = ragged([130, 0, 21], 130)
    case = Case(lengths, lengths, heads=2, features=16, value_features=16, activation=activation, dtype=dtype)
    rtol, atol = HALVES[dtype]
    for parts in ((), ("key_valid", "position_bias"), EVERYTHING):
        each = replace(case, parts=parts, scale=0.25, post_scale=0.1, window=(0, FAR))
        for capped in (each, with_sink(each)):
            compare(capped.inputs(), rtol=rtol, atol=atol)


def test_a_sink_keeps_a_dtype_of_its_own():
    lengths = ragged([70, 20], 70)
    a = Case(lengths, lengths, parts=("sink",), dtype=torch.bfloat16).inputs()
    for dtype in (torch.float32, torch.float64, torch.float16):
        result, log_sum = ops.jagged_attention(*a._replace(sink=a.sink.to(dtype)))
        grads = ops.jagged_attention_backward(result, result, log_sum, *a._replace(sink=a.sink.to(dtype)), wanted_of(a))
        assert grads[-1].dtype == dtype and grads[-1].shape == (2,)


@pytest.mark.parametrize("sink", [-1e30, -200.0, 200.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sink_far_from_scores(sink, dtype):
    lengths = ragged([150, 20], 150)
    a = Case(lengths, lengths, parts=("sink",), dtype=dtype, window=(0, FAR)).inputs()
    found, wanted = both_ways(a._replace(sink=torch.full_like(a.sink, sink)))
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-6)
    vanishes = sink > (100 if dtype == torch.float32 else 1000)
    assert (found[0] == 0).all() if vanishes else (found[0] != 0).all()


@EACH
def test_a_window_that_falls_into_holes(activation):
    """Columns of a panel span the window, none of its keys is inside."""
    queries = torch.zeros(1, 120, dtype=torch.bool)
    queries[0, :90] = True
    keys = torch.zeros(1, 120, dtype=torch.bool)
    keys[0, ::17] = True
    compare(Case(queries, keys, activation=activation, window=(1, 1)).inputs())


@EACH
@pytest.mark.parametrize("ascending", [True, False])
def test_times_of_any_order(activation, ascending):
    lengths = ragged([150, 90], 150)
    a = Case(lengths, lengths, parts=("time_bias", "position_bias"), activation=activation, window=(0, FAR)).inputs()
    times = torch.randint(-(10**12), 10**12, a.key_times.shape, generator=torch.Generator().manual_seed(1))
    if ascending:
        times = torch.cat([part.sort().values for part in times.split([150, 90])])
    bounds = torch.tensor([1, 10**6, 10**11])
    compare(a._replace(query_times=times, key_times=times, time_bounds=bounds))
    ends = torch.tensor([-(2**63), 2**63 - 1, 0]).repeat(80)
    compare(a._replace(query_times=ends, key_times=times, time_bounds=torch.tensor([1, 10**6, 2**62])))


@EACH
def test_a_long_sequence_is_split_and_says_the_same(activation):
    lengths = ragged([900, 30], 900)
    case = Case(lengths, lengths, heads=1, features=8, value_features=8, parts=("position_bias", "time_bias"))
    compare(with_sink(replace(case, activation=activation, window=(0, FAR))).inputs())


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_results_do_not_depend_on_threads(activation, dtype):
    lengths = ragged([700, 3, 180, 90, 0, 333], 700)
    case = Case(lengths, lengths, heads=4, groups=2, features=20, value_features=16, parts=EVERYTHING, dtype=dtype)
    case = replace(case, broadcast=(True, False, False, False), activation=activation, dropout=0.1)
    a = with_sink(case).inputs()
    before, outcomes = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5, 2):
            torch.set_num_threads(threads)
            result, log_sum = ops.jagged_attention(*a)
            grads = ops.jagged_attention_backward(gradient_like(result), result, log_sum, *a, wanted_of(a))
            outcomes.append([result, log_sum, *grads])
    finally:
        torch.set_num_threads(before)
    for other in outcomes[1:]:
        assert all(torch.equal(x, y) for x, y in zip(outcomes[0], other, strict=True))


@EACH
@pytest.mark.parametrize("capped", [False, True])
def test_single_precision_is_as_exact_as_it_can_be(activation, capped):
    lengths = ragged([400, 100], 400)
    case = Case(lengths, lengths, heads=2, groups=2, features=64, value_features=64, scale=0.125, window=(0, FAR))
    case = replace(case, activation=activation, post_scale=1.0 if activation == "softmax" else 1 / 400)
    a = (with_sink(case) if capped else case).inputs()
    wide, _ = both_ways(a)
    names = [n for n in ("query", "key", "value", "sink") if getattr(a, n) is not None]
    narrow, _ = both_ways(a._replace(**{n: getattr(a, n).float() for n in names}))
    for x, y in zip(narrow, wide, strict=True):
        if y.numel():
            assert (x.double() - y).abs().max() <= 2e-6 * y.abs().max()


@EACH
@pytest.mark.parametrize("capped", [False, True])
def test_extreme_scores(activation, capped):
    lengths = ragged([40], 40)
    case = Case(lengths, lengths, heads=1, activation=activation, window=(0, FAR), dtype=torch.float32, scale=1.0)
    a = (with_sink(case) if capped else case).inputs()
    for factor in (30.0, 1e3, 1e18):
        large = a._replace(query=a.query * factor)
        found, wanted = both_ways(large)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-4)
    nan = a._replace(query=a.query.masked_fill(torch.arange(40)[:, None, None] == 7, torch.nan))
    result = ops.jagged_attention(*nan)[0]
    assert result[7].isnan().all() and result[:7].isfinite().all() and result[8:].isfinite().all()


@pytest.mark.parametrize("activation", ["silu", "sigmoid", "squared_relu"])
@pytest.mark.parametrize("filled", [-3e38, -1e30, -1e9, -1e4])
def test_a_filled_score_weighs_nothing(activation, filled):
    """Exactly: scores that a mask made very small have no weight and no gradient, in single precision too."""
    lengths = ragged([40], 40)
    a = Case(lengths, lengths, heads=1, activation=activation, dtype=torch.float32).inputs()
    hidden = torch.ones(40, 40).triu(1).bool()[None, None]
    a = a._replace(bias=torch.zeros(1, 1, 40, 40).masked_fill(hidden, filled))
    found, _ = both_ways(a)
    wanted, _ = both_ways(a._replace(bias=torch.zeros(1, 1, 40, 40), pair_mask=~hidden))
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)


def test_hyperbolic_tangent_is_exact_to_a_few_bits():
    """A cap of 1, a query of 1 and squared ReLU leave tanh² of each key, whatever its size."""
    keys = torch.cat([torch.logspace(-6, 1.5, 4000), torch.tensor([0.0, 0.7, 0.69999999, 1e30])])
    rows = torch.ones(1, len(keys), dtype=torch.bool)
    a = Case(rows, rows, heads=1, features=1, value_features=1, activation="squared_relu", scale=1.0, score_cap=1.0)
    for sign in (1.0, -1.0):
        b = a.inputs()._replace(
            query=torch.full((len(keys), 1, 1), sign),
            key=sign * keys[:, None, None],
            value=torch.ones(len(keys), 1, 1),
            min_distance=0,
            max_distance=0,
        )
        exact = keys.double().tanh().square()
        error = (ops.jagged_attention(*b)[0].flatten().double() - exact).abs()
        assert (error <= 8e-7 * exact).all()


def test_strided_and_misaligned_rows():
    lengths = ragged([70, 20], 70)
    a = Case(lengths, lengths, heads=2, groups=2, features=16, value_features=16, window=(0, FAR)).inputs()
    wanted = ops.jagged_attention(*a)[0]
    together = torch.stack([a.query, a.key, a.value], 1)  # (T, 3, H, D), as one projection would give
    q, k, v = together.unbind(1)
    assert torch.equal(ops.jagged_attention(*a._replace(query=q, key=k, value=v))[0], wanted)
    shifted = torch.empty(a.query.numel() + 1, dtype=torch.float64)[1:].view(a.query.shape).copy_(a.query)
    assert torch.equal(ops.jagged_attention(*a._replace(query=shifted))[0], wanted)


# --- bad data -------------------------------------------------------------------------------------


def small(**parts: Any) -> Inputs:
    lengths = ragged([3, 2], 3)
    return Case(lengths, lengths, window=(0, FAR), **parts).inputs()


@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize(
    ("offsets", "reason"),
    [([0, 4, 3], "must ascend"), ([-1, 3, 5], "none below zero"), ([0, 3, 9], "end at row 9, and there are 5 rows")],
)
def test_bad_offsets(side, offsets, reason):
    with pytest.raises(ValueError, match=reason):
        ops.jagged_attention(*small()._replace(**{f"{side}_offsets": torch.tensor(offsets)}))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-3, 9) | st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=3), st.booleans())
def test_any_offsets_are_taken_or_refused(offsets, swap):
    a = small()
    offsets = torch.tensor(offsets)
    a = a._replace(**{"key_offsets" if swap else "query_offsets": offsets})
    good = (offsets.diff() >= 0).all() and offsets[0] >= 0 and offsets[-1] <= 5
    if good and bool(((offsets >= 0) & (offsets <= 5)).all()):
        compare(a)
    else:
        with pytest.raises(ValueError, match="offsets"):
            ops.jagged_attention(*a)


@pytest.mark.parametrize("column", [-1, 2**40])
def test_columns_out_of_range(column):
    a = small()
    with pytest.raises(ValueError, match="columns"):
        ops.jagged_attention(*a._replace(key_columns=torch.full((5,), column)))


def test_columns_outside_of_tables_are_index_errors():
    a = small(parts=EVERYTHING)
    far = torch.tensor([0, 1, 2, 0, 7])
    for name, reason in (("pair_mask", "pair_mask"), ("bias", "exceed bias"), ("position_bias", "distances")):
        only = a._replace(**{n: None for n in ("pair_mask", "bias", "position_bias") if n != name})
        with pytest.raises(IndexError, match=reason):
            ops.jagged_attention(*only._replace(key_columns=far))


def test_bounds_must_ascend():
    with pytest.raises(ValueError, match="time_bounds must ascend"):
        ops.jagged_attention(*small(parts=("time_bias",))._replace(time_bounds=torch.tensor([5, 1, 20])))
