"""AscendC kernel of jagged_attention in the twin: against the reference, across cores, and what it would cost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from turbogr_compile.kernels import jagged_attention as kernel
from turbogr_compile.kernels.twin import TwinFault, attention, device
from turbogr_compile.kernels.twin.build import KERNELS, kernels_from
from turbogr_compile.kernels.twin.launch import reports

from . import attention_cases as cases
from .attention_cases import BF16, F16, F32, FAR, LENGTHS, Case, Sizes, check_forward, near, wide

ops = torch.ops.turbogr
EVERY = (0, *LENGTHS, 0, 33)  # empty sequences first, in the middle and last
BOTH = pytest.mark.parametrize("activation", ["silu", "softmax"])


# --- against the reference ---------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "dtype, depth, cores", [(F16, 64, 20), (F16, 48, 1), (BF16, 16, 40), (BF16, 128, 2), (F32, 32, 48), (F32, 64, 3)]
)
def test_lengths(activation, dtype, depth, cores):
    check_forward(Case(EVERY, depth=depth, dtype=dtype, activation=activation), cores)
    check_forward(Case(EVERY[::-1], depth=depth, dtype=dtype, activation=activation, window=(-FAR, FAR)), cores)


@BOTH
@pytest.mark.parametrize(
    "dtype, options",
    [
        (F16, {"window": (0, 30)}),
        (BF16, {"window": (5, 200), "holes": True}),
        (F32, {"window": (-3, 3)}),
        (F16, {"window": (2, 1)}),  # nobody sees anything
        (BF16, {"valid": True, "window": (-FAR, FAR)}),
        (F32, {"position": 4}),
        (F16, {"position": 1, "holes": True, "window": (-FAR, FAR)}),
        (BF16, {"time": 4}),
        (F32, {"time": 1, "position": 4, "valid": True, "holes": True, "window": (0, 90)}),
        (F16, {"pair_mask": "shqk", "window": (-FAR, FAR)}),
        (BF16, {"pair_mask": "k", "bias": "hq"}),
        (F32, {"bias": "shqk", "holes": True}),
        (F16, {"bias": "hqk", "pair_mask": "sk", "position": 1}),
        (BF16, {"pair_mask": "hqk", "holes": True, "window": (0, 90)}),
        (F32, {"pair_mask": "sqk", "bias": "qk", "valid": True, "holes": True}),
        (F16, {"pair_mask": "sq"}),  # some rows see nothing
    ],
    ids=str,
)
def test_masks_and_biases(activation, dtype, options):
    check_forward(
        Case((0, 1, 130, 0, 31, 270), heads=4, groups=2, depth=32, dtype=dtype, activation=activation, **options)
    )


@BOTH
@pytest.mark.parametrize(
    "heads, groups, depth, value_depth",
    [(1, 1, 50, 50), (4, 4, 16, 64), (4, 1, 64, 24), (6, 3, 7, 130), (2, 2, 1, 1), (1, 1, 256, 512), (3, 1, 128, 128)],
)
def test_heads_and_depths(activation, heads, groups, depth, value_depth):
    case = Case((150, 5), heads=heads, groups=groups, depth=depth, value_depth=value_depth, activation=activation)
    check_forward(case)


@BOTH
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_queries_that_are_not_the_keys(activation, dtype):
    """A last layer asks for few rows; others for more than there are keys, or for none."""
    keys, queries = (300, 0, 40, 17, 256), (1, 9, 0, 200, 131)
    for options in ({"window": (-FAR, FAR)}, {"window": (0, 64), "holes": True}, {"window": (-FAR, 20), "valid": True}):
        check_forward(Case(keys, queries, dtype=dtype, activation=activation, around=3, **options), 5)


@BOTH
def test_rows_of_no_sequence_have_results(activation):
    result, log_sum = check_forward(Case((20, 0, 7), around=150, activation=activation), 3)
    outside = torch.ones(result.shape[0], dtype=torch.bool)
    outside[150:177] = False
    assert (result[outside] == 0).all()
    assert activation == "silu" or torch.isinf(log_sum[outside]).all()


def test_more_sequences_than_offsets_are_read_at_once():
    check_forward(Case((1, 0, 3, 2) * 80, heads=1), 4)
    check_forward(Case((1, 0, 3, 2) * 80, heads=1, dtype=BF16), 4)


@BOTH
def test_nothing_at_all(activation):
    for keys in ((), (0,), (0, 0)):
        result, log_sum = attention.jagged_attention(*Case(keys, activation=activation).inputs(), cores=40)
        assert result.shape == (0, 2, 16) and log_sum.numel() == 0
    check_forward(Case((0, 0), (3, 4), activation=activation))  # queries, but no keys


# --- numbers that are not ordinary -------------------------------------------------------------------


@pytest.mark.parametrize("dtype, spread", [(F16, 20.0), (BF16, 60.0), (F32, 1000.0), (F32, 1e-6)])
def test_silu_of_large_scores_has_the_right_limits(dtype, spread):
    check_forward(Case((40, 9), dtype=dtype, spread=spread, scale=1.0, post_scale=1e-6))


@pytest.mark.parametrize("dtype, spread", [(F16, 20.0), (BF16, 40.0), (F32, 60.0)])
def test_softmax_of_large_scores(dtype, spread):
    """Sums never overflow, whichever tile holds the maximum."""
    case = Case((600,), heads=1, dtype=dtype, activation="softmax", spread=spread, scale=0.5, window=(-FAR, FAR))
    a = case.inputs()
    result, log_sum = attention.jagged_attention(*a, cores=1, index=cases.INDEX[dtype])
    exact, exact_sum = kernel.attention(*wide(a))
    torch.testing.assert_close(log_sum.double(), exact_sum, rtol=1e-5, atol=1e-5)
    # An exponential has the relative error that its argument has in absolute terms.
    own = 1e-6 * float(exact_sum.abs().max())
    near(result, exact, Sizes(a).result * (1 + own / cases.TOLERANCE[dtype]), dtype)


@pytest.mark.parametrize("scale, post_scale", [(-0.3, 2.0), (0.0, 1.0), (0.3, -1.0)])
@BOTH
def test_other_factors(activation, scale, post_scale):
    check_forward(Case((70,), scale=scale, post_scale=post_scale, activation=activation, position=2))


@BOTH
def test_a_hidden_pair_has_no_weight_whatever_its_score(activation):
    """Models hide pairs by the least number of the dtype as well: both may come together."""
    a = Case((40, 9), dtype=F32, activation=activation, pair_mask="qk", bias="qk").inputs()
    a = a._replace(bias=torch.where(a.pair_mask, a.bias, torch.finfo(F32).min))
    result, _ = attention.jagged_attention(*a, cores=1)
    near(result, kernel.attention(*wide(a._replace(bias=a.bias.clamp(-10))))[0], Sizes(a).result, F32)


def test_time_buckets_are_exact():
    """At, just below and just above each bound, and as far apart as times can be."""
    a = Case((64,), heads=1, depth=16, dtype=F32, time=1, window=(-FAR, FAR)).inputs()
    edges = torch.tensor([bound + step for bound in cases.BOUNDS for step in (-1, 0, 1)])
    times = torch.cat([torch.zeros(1, dtype=torch.int64), edges, edges.neg()])[:64]
    for bounds in (cases.BOUNDS, range(12), range(2**29, 2**29 + 12), [0] * 6 + [2**30 - 2] * 6, [-5] * 11 + [2**40]):
        other = a._replace(query_times=times, key_times=times.flip(0), time_bounds=torch.tensor(list(bounds)))
        result, _ = attention.jagged_attention(*other, cores=1)
        near(result, kernel.attention(*wide(other))[0], Sizes(other).result, F32)


def test_times_far_apart_are_clamped():
    a = Case((16,), heads=1, dtype=F32, time=1, window=(-FAR, FAR)).inputs()
    other = a._replace(key_times=a.key_times - 2**40)
    assert torch.equal(
        attention.jagged_attention(*other, cores=1)[0],
        attention.jagged_attention(*a._replace(key_times=a.key_times - 2**29), cores=1)[0],
    )


# --- cores -------------------------------------------------------------------------------------------


@BOTH
def test_the_number_of_cores_changes_nothing(activation):
    case = Case((257, 0, 31, 140, 16), heads=3, groups=3, depth=32, activation=activation, window=(0, 100), valid=True)
    first = attention.jagged_attention(*case.inputs(), cores=1)
    for cores in (2, 7, 20, 40, 48, 64):
        again = attention.jagged_attention(*case.inputs(), cores=cores)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


# --- through torch -----------------------------------------------------------------------------------


@BOTH
def test_gradients_go_through_the_kernels(activation):
    case = Case((40, 0, 17), dtype=F32, activation=activation, position=2, time=2, bias="hqk")
    a = case.inputs()
    names = ("query", "key", "value", "bias", "position_bias", "time_bias")

    def run() -> list[Any]:
        leaves = {name: getattr(a, name).clone().requires_grad_() for name in names}
        ops.jagged_attention(*a._replace(**leaves))[0].square().sum().backward()
        return [leaf.grad for leaf in leaves.values()]

    with device(cores=4) as twin:
        found = run()
    assert twin.ran == ["jagged_attention", "jagged_attention_backward"]
    for x, y in zip(found, run(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "asked",
    [
        {"activation": "softmax", "sink": torch.tensor([0.5])},
        {"score_cap": 0.5},
        {"activation": "sigmoid"},
        {"activation": "squared_relu"},
    ],
    ids=["sink", "cap", "sigmoid", "squared_relu"],
)
def test_what_the_kernel_does_not_have_runs_by_reference(asked):
    """With a warning that names it; the kernel itself refuses, in Python and in its tiling function."""
    a = Case((40, 0, 17), heads=1, groups=1, dtype=F32, activation="silu").inputs()._replace(**asked)

    def run() -> list[Any]:
        query = a.query.clone().requires_grad_()
        result, log_sum = ops.jagged_attention(*a._replace(query=query))
        result.square().sum().backward()
        return [result, log_sum, query.grad]

    (absent,) = {"sink", "score_cap", "sigmoid", "squared_relu"} & {*asked, asked.get("activation")}
    with device(cores=4) as twin, pytest.warns(UserWarning, match=f"which has no {absent}"):
        found = run()
    assert twin.ran == [] and twin.left == ["jagged_attention", "jagged_attention_backward"]
    assert all(torch.equal(x, y) for x, y in zip(found, run(), strict=True))
    with pytest.raises(NotImplementedError, match=f"has no {absent}"):
        attention.jagged_attention(*a)
    problem = attention._problem(a, torch.int64, 4)
    assert not attention._fits("jagged_attention", {"QUERY": F32, "QUERY_OFFSETS": torch.int64}, problem)


def test_sizes_that_do_not_fit_are_refused():
    a = Case((5,), heads=1).inputs()
    with pytest.raises(NotImplementedError, match="sizes"):
        attention.jagged_attention(*a._replace(position_bias=torch.zeros(1, 2**17 - 1)))


# --- what it would cost ------------------------------------------------------------------------------


def busy(report: Any, pipe: str) -> list[float]:
    return [core["busy"][pipe] for core in report.cores]


@BOTH
def test_the_vector_pipe_is_as_busy_as_the_fact_sheet_says(activation):
    """At most 1.3 times 0.15 cycles for each visible pair and head, all waiting included."""
    case = Case((1536,), heads=2, groups=2, depth=64, activation=activation)
    with reports() as seen:
        attention.jagged_attention(*case.inputs(), cores=4)
    pairs = 2 * 1536 * 1537 / 2
    assert sum(busy(seen[0], "V")) / pairs <= 0.15
    assert 4 * max(core["totals"]["finish"] for core in seen[0].cores) / pairs <= 1.3 * 0.15


def test_work_is_dealt_evenly_where_lengths_have_a_heavy_tail():
    lengths = (1100, 900, 700, 512, 400, 400, 300, 300, *[200] * 6, *[100] * 16, *[20] * 80)
    with reports() as seen:
        attention.jagged_attention(*Case(lengths, heads=8, groups=1, depth=64).inputs(), cores=40)
    work = busy(seen[0], "V")
    assert len(work) == 40
    assert max(work) / (sum(work) / 40) < 1.05


# --- what must not pass ------------------------------------------------------------------------------


def test_a_ring_of_one_tile_is_caught(tmp_path: Path):
    """The cube would overwrite scores that the vector core still reads."""
    folder = tmp_path / "ascendc"
    for part in ("common", "jagged_attention"):
        shutil.copytree(KERNELS / part, folder / part)
    source = folder / "jagged_attention" / "op_kernel" / "jagged_attention_kernel.h"
    text = source.read_text()
    assert "stepNumber_ % 2" in text
    source.write_text(text.replace("stepNumber_ % 2", "0"))
    with kernels_from(folder), pytest.raises(TwinFault) as fault:
        attention.jagged_attention(*Case((600,), heads=1).inputs(), cores=1)
    assert fault.value.rule == "missing-sync"
