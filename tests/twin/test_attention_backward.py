"""AscendC kernel of jagged_attention_backward in the twin: against the reference, across cores, in a fixed order."""

from __future__ import annotations

import pytest
import torch

from turbogr_compile.kernels.twin import attention
from turbogr_compile.kernels.twin.launch import reports

from .attention_cases import BF16, F16, F32, FAR, LENGTHS, Case, check_backward, run_backward

EVERY = (0, *LENGTHS, 0, 33)  # empty sequences first, in the middle and last
BOTH = pytest.mark.parametrize("activation", ["silu", "softmax"])
ORDER = pytest.mark.parametrize("deterministic", [False, True])


@BOTH
@pytest.mark.parametrize(
    "dtype, depth, cores, deterministic",
    [
        (F16, 64, 20, False),
        (F16, 48, 1, True),
        (BF16, 16, 40, True),
        (BF16, 128, 2, False),
        (F32, 32, 48, False),
        (F32, 64, 3, True),
    ],
)
def test_lengths(activation, dtype, depth, cores, deterministic):
    check_backward(Case(EVERY, depth=depth, dtype=dtype, activation=activation), cores, deterministic=deterministic)


@BOTH
@pytest.mark.parametrize(
    "dtype, options",
    [
        (F16, {"window": (0, 30)}),
        (BF16, {"window": (5, 200), "holes": True}),
        (F32, {"window": (2, 1)}),  # nobody sees anything
        (F16, {"valid": True, "window": (-FAR, FAR)}),
        (BF16, {"position": 4}),
        (F32, {"position": 1, "holes": True, "window": (-FAR, FAR)}),
        (F16, {"time": 4}),
        (BF16, {"time": 1, "position": 4, "valid": True, "holes": True, "window": (0, 90)}),
        (F32, {"pair_mask": "k", "bias": "hq"}),
        (F16, {"bias": "shqk", "holes": True}),
        (BF16, {"bias": "hqk", "pair_mask": "sk", "position": 1}),
        (F32, {"pair_mask": "hqk", "holes": True, "window": (0, 90)}),
        (F16, {"pair_mask": "sq", "valid": True}),  # some rows see nothing
    ],
    ids=str,
)
def test_masks_and_biases(activation, dtype, options):
    case = Case((0, 1, 40, 0, 270), heads=4, groups=2, depth=32, dtype=dtype, activation=activation, **options)
    check_backward(case, deterministic=dtype == F16)


@BOTH
@pytest.mark.parametrize(
    "heads, groups, depth, value_depth",
    [(1, 1, 50, 50), (4, 4, 16, 64), (4, 1, 64, 24), (6, 3, 7, 130), (2, 2, 1, 1), (3, 1, 128, 128)],
)
def test_heads_and_depths(activation, heads, groups, depth, value_depth):
    case = Case((150, 5), heads=heads, groups=groups, depth=depth, value_depth=value_depth, activation=activation)
    check_backward(case, deterministic=False)


@BOTH
@ORDER
def test_queries_that_are_not_the_keys(activation, deterministic):
    keys, queries = (300, 0, 40, 17, 256), (1, 9, 0, 200, 131)
    for options in ({"window": (-FAR, FAR)}, {"window": (0, 64), "holes": True, "position": 2}):
        case = Case(keys, queries, dtype=BF16, activation=activation, around=3, **options)
        check_backward(case, 5, deterministic=deterministic)


@BOTH
def test_rows_of_no_sequence_have_no_gradient(activation):
    found = run_backward(Case((20, 0, 7), around=300, activation=activation), 3, deterministic=False)
    for grad in found[:3]:
        assert (grad[:300] == 0).all() and (grad[327:] == 0).all()
        assert (grad[300:327] != 0).any()


@BOTH
def test_keys_that_nobody_asks(activation):
    for case in (Case((9,), (0,), activation=activation), Case((0, 3), (4, 0), activation=activation)):
        found = run_backward(case, deterministic=True)
        assert all((grad == 0).all() for grad in found[:3])


@pytest.mark.parametrize("place", range(6))
def test_only_what_is_wanted(place):
    case = Case((60, 9), bias="hqk", position=2, time=2, depth=16, value_depth=32)
    wanted = tuple(i == place for i in range(7))
    check_backward(case, wanted=wanted, deterministic=False)
    assert [grad.numel() > 0 for grad in run_backward(case, wanted=wanted, deterministic=False)] == list(wanted)


@pytest.mark.parametrize("dtype, spread", [(F16, 4.0), (BF16, 30.0), (F32, 300.0)])
def test_silu_of_large_scores_has_the_right_limits(dtype, spread):
    check_backward(Case((40, 9), dtype=dtype, spread=spread, scale=1.0, post_scale=1e-4), deterministic=False)


@pytest.mark.parametrize("scale, post_scale", [(-0.3, 2.0), (0.0, 1.0), (0.3, -1.0)])
@BOTH
def test_other_factors(activation, scale, post_scale):
    case = Case((70,), scale=scale, post_scale=post_scale, activation=activation, position=2, dtype=F32)
    check_backward(case, deterministic=False)


@BOTH
def test_a_fixed_order_does_not_depend_on_the_number_of_cores(activation):
    case = Case(
        (257, 0, 31, 140),
        heads=4,
        groups=2,
        depth=32,
        activation=activation,
        window=(0, 200),
        position=1,
        time=4,
        bias="qk",
    )
    first = run_backward(case, 1, deterministic=True)
    for cores in (2, 20, 40, 48):
        again = run_backward(case, cores, deterministic=True)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_torch_says_whether_the_order_is_fixed(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    monkeypatch.setattr(attention, "launch", lambda *a, **k: seen.append(a[3].deterministic))
    for flag in (False, True):
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda flag=flag: flag)
        run_backward(Case((5,)))
    assert seen == [0, 1]


def test_work_is_dealt_evenly_where_lengths_have_a_heavy_tail():
    lengths = (1100, 900, 700, 512, 400, 400, 300, 300, *[200] * 6, *[100] * 16, *[20] * 80)
    with reports() as seen:
        run_backward(Case(lengths, heads=8, groups=8, depth=16), 40, deterministic=False)
    work = [core["busy"]["V"] for core in seen[0].cores]
    assert max(work) / (sum(work) / 40) < 1.05
