"""Routing a batch ahead changes no bit; semi-async training is the algorithm of docs/semi-async.md, and bounded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks import these modules by their bare names

import pipelines
from ranks import run_several

SMALL = 0.12  # by which the loss of a semi-async step may differ from that of a synchronous one, of up to 1.1

LARGEST_GAP = 0.03  # of the loss at the end of 100 steps, relative


@pytest.fixture(scope="module")
def two():
    trained = {how: (pipelines.train, {"how": how}) for how in ("sync", "prefetch", "held", "semi")}
    return run_several(2, {
        **trained,
        "simulated": (pipelines.simulated, {"warmup": 3}),
        "drained": (pipelines.drained, {}),
        "bounded": (pipelines.bounded, {}),
        "failing": (pipelines.failing, {}),
        "refused": (pipelines.refused, {}),
    }, timeout=300, compiles=True)  # fmt: skip


@pytest.fixture(scope="module")
def apart():
    return run_several(2, {
        "prefetch": (pipelines.leaving, {"how": "prefetch"}),
        "cold": (pipelines.leaving, {"how": "cold"}),
        "compiling": (pipelines.compiling_alone, {}),
        "refusing": (pipelines.refusing_alone, {}),
    }, timeout=300, compiles=True)  # fmt: skip


@pytest.mark.parametrize("how", ["prefetch", "held"])
def test_nothing_stale_is_synchronous_to_the_last_bit(two, how: str):
    """20 steps: ids exchanged ahead; and the machinery of semi-async with a delay of 0."""
    for found, wanted in zip(two[how], two["sync"], strict=True):
        assert found["losses"] == wanted["losses"]
        assert found["table"].equal(wanted["table"]) and found["dense"].equal(wanted["dense"])
        assert found["ahead"] == 19
    assert all(set(rank["delays"]) == {0} for rank in two["held"])


def test_semi_async_is_the_algorithm_as_stated(two):
    for found, wanted in zip(two["semi"], two["simulated"], strict=True):
        apart = [abs(a - b) for a, b in zip(found["losses"], wanted["losses"], strict=True)]
        assert max(apart) < 1e-12 and (found["table"] - wanted["table"]).abs().max() < 1e-12


def test_rows_miss_one_update_at_most_and_none_in_the_warm_up(two):
    for rank in two["semi"]:
        assert rank["delays"] == {0: 3, 1: 17} and rank["counts"] == (20, 20)
        assert 0 < rank["fraction"] <= 1


def test_semi_async_says_that_it_is_on(two):
    assert all("stale-rows" in rank["remarks"] for rank in two["semi"])
    assert not any("stale-rows" in rank["remarks"] for rank in two["prefetch"])


def test_the_loss_gap_is_there_and_small(two):
    for semi, sync in zip(two["semi"], two["sync"], strict=True):
        gaps = [abs(a - b) for a, b in zip(semi["losses"], sync["losses"], strict=True)]
        assert max(gaps[:3]) == 0 and 0 < max(gaps) < SMALL, gaps


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adagrad", marks=pytest.mark.slow)])
def test_the_loss_gap_over_seeds(optimizer: str):
    """100 steps on five sets of batches, by the simulation that ranks agree with; figures are in the docs."""
    ends = {}
    for warmup in (0, 1000):
        runs = [simulated(seed, warmup, optimizer) for seed in range(5)]
        ends[warmup] = [sum(losses[-20:]) / 20 for losses in runs]
    gaps = [abs(a - b) / b for a, b in zip(ends[0], ends[1000], strict=True)]
    assert 0 < max(gaps) < LARGEST_GAP, (ends, gaps)


def simulated(seed: int, warmup: int, optimizer: str) -> list[float]:
    return pipelines.simulated(0, 2, warmup, steps=100, optimizer=optimizer, first=1000 * seed)["losses"]


def test_two_updates_in_a_step_fetch_rows_again(two):
    for rank in two["bounded"]:
        assert rank["delays"] == {0: 6} and rank["again"] == 5
        assert "rows of table 'items' have missed 2 updates, and at most 1 is allowed" in rank["said"]


def test_whoever_reads_the_table_finds_all_updates(two):
    assert two["drained"] == [None, None]  # they assert on the ranks


def test_an_update_that_fails_beside_the_step_fails_the_next(two):
    for said in two["failing"]:
        assert said == "3: an update of table 'items' failed beside the step: ZeroDivisionError: no rate"


def test_what_cannot_be_is_said(two):
    assert all(len(said) == 3 and "staleness of 0 (exact) or 1" in said[0] for said in two["refused"])


# --- ranks that part ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["prefetch", "cold"])
def test_all_ranks_leave_a_loop_early_and_go_on(apart, how: str):
    for rank in apart[how]:
        assert (rank["steps"], rank["more"]) == (4, 7)


@pytest.mark.parametrize("how", ["prefetch", "cold"])
def test_a_rank_with_more_batches_is_told_and_does_not_hang(apart, how: str):
    for rank in apart[how]:
        assert rank["apart"] and rank["last"] == 4
        assert "rank 0 has no batch left" in rank["said"] and "rank 1 asks for rows of table 'items'" in rank["said"]
        assert "same number of batches" in rank["said"]


def test_a_rank_that_compiles_anew_alone_goes_on(apart):
    for rank in apart["compiling"]:
        assert rank["prefetch"] == rank["sync"]


def test_a_batch_that_one_rank_cannot_pack(apart):
    assert apart["refusing"][1]["fell"] == 2 and apart["refusing"][0]["fell"] == 0
    for rank in apart["refusing"]:
        assert rank["prefetch"] == pytest.approx(rank["eager"], rel=1e-5)
