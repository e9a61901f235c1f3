"""Ranks with sharded tables train as one process does. Ranks are started once per number of them, for all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # ranks import these modules by their bare names

import edges
import sharded_models
from ranks import RanksFailed, run_ranks, run_several

EXACT = 1e-12  # everything is in fp64: what is left is the order of sums


def worst(found) -> dict[str, float]:
    """By case, over ranks."""
    return {" ".join(key): max(rank[key]["worst"] for rank in found) for key in found[0]}


def eager(placements: list[str], optimizers: list[str], **rest) -> tuple:
    """20 steps with each."""
    return sharded_models.train, {"placements": placements, "ways": ["eager"], "optimizers": optimizers, **rest}


@pytest.fixture(scope="module")
def two():
    places = ["rows", "hash", "columns", "table", "replicated"]
    return run_several(2, {
        "train": eager(places, ["sgd", "adagrad", "adam"]),
        "by rows": eager(["rows", "hash", "table"], ["rowwise"]),
        "fp32": eager(["rows"], ["adagrad"], dtype=torch.float32),
        "padding": (edges.padding, {}),
        "wire": (edges.half_wire, {}),
        "gradients": (edges.gradients, {}),
        "names": (edges.round_trip, {}),
        "mistakes": (edges.mistakes, {}),
        "plan": (edges.planned, {}),
        "drawn": (edges.drawn, {"order": "block"}),
        "drawn by hash": (edges.drawn, {"order": "hash"}),
    })  # fmt: skip


@pytest.fixture(scope="module")
def three():
    return run_several(3, {
        "train": eager(["rows", "columns"], ["adagrad"]),
        "lookups": (edges.lookups, {"compiles": False}),
        "drawn": (edges.drawn, {"order": "block"}),
        "drawn by hash": (edges.drawn, {"order": "hash"}),
    })  # fmt: skip


@pytest.fixture(scope="module")
def four():
    return run_several(4, {
        "train": eager(["rows", "table", "columns"], ["adagrad"]),
        "nodes": eager(["hierarchical"], ["adagrad", "adam"]),
        "memory": (edges.largest_allocation, {"rows": 100_000, "width": 16, "how": "eager"}),
    })  # fmt: skip


def test_every_placement_and_optimizer_trains_as_one_process(two):
    apart = worst(two["train"])
    assert len(apart) == 15 and max(apart.values()) < EXACT, apart
    assert len({rank["rows", "eager", "adam"]["loss"] for rank in two["train"]}) == 2  # each has batches of its own


def test_row_wise_adagrad_is_the_dense_one_by_rows(two):
    assert max(worst(two["by rows"]).values()) < EXACT


def test_fp32_is_within_its_rounding(two):
    assert 0 < max(worst(two["fp32"]).values()) < 1e-6


def test_more_ranks(three, four):
    """61 rows of 10 numbers: nothing divides evenly."""
    apart = [*worst(three["train"]).values(), *worst(four["train"]).values()]
    assert len(apart) == 5 and max(apart) < EXACT, apart


def test_nodes_with_replicas(four):
    """2 nodes of 2 ranks: equal to one process, and replicas equal each other to the last bit."""
    assert max(worst(four["nodes"]).values()) < EXACT
    for key in four["nodes"][0]:
        shards = [rank[key]["shard"] for rank in four["nodes"]]
        assert shards[0].equal(shards[2]) and shards[1].equal(shards[3]) and not shards[0].equal(shards[1])


# --- single properties -------------------------------------------------------------------------------


def test_ids_that_are_hard_to_exchange(three):
    apart = {case: max(rank[case] for rank in three["lookups"]) for case in three["lookups"][0]}
    assert len(apart) == 24 and max(apart.values()) < EXACT, apart


def test_the_padding_row_stays_and_what_counts_as_a_gradient(two):
    assert two["padding"] == two["gradients"] == [None, None]  # they assert on the ranks


def test_half_precision_on_the_wire(two):
    """fp16 has 11 bits; what did not travel in it would be exact."""
    for rows, step in two["wire"]:
        assert 0 < rows < 2e-3 and 0 < step < 4e-3


def test_no_tensor_of_the_size_of_a_shard_is_made(four):
    for rank in four["memory"]:
        assert 0 < rank["made"] < rank["shard"] / 50, rank


def test_the_watch_sees_allocations_inside_of_ops():
    """The same watch on a dense table."""
    table = torch.nn.Embedding(10_000, 16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        table(torch.tensor([1])).sum().backward()
    assert max(e.self_cpu_memory_usage for e in seen.events()) >= table.weight.nbytes


@pytest.mark.slow
def test_a_table_of_32_million_rows():
    """32 M x 64 over 4 ranks, 8 GB in fp32; optimizer state is one number per row."""
    given = {"rows": 32_000_000, "width": 64, "how": "eager", "optimizer": "rowwise"}
    for rank in run_ranks(edges.largest_allocation, 4, timeout=900, **given):
        assert rank["shard"] == 32_000_000 * 64 and rank["made"] < 10**6  # a quarter of the rows, 4 bytes each


@pytest.mark.parametrize("case", ["drawn", "drawn by hash"])
def test_a_table_drawn_on_meta_is_the_same_on_any_number_of_ranks(two, three, case: str):
    first, second = two[case][0], three[case][0]
    assert first.equal(second) and first[3].abs().max() == 0
    if case == "drawn":
        assert first.equal(edges.drawn_alone())
    assert abs(first.mean()) < 0.05 and abs(first.std() - 1) < 0.05 and first.unique().numel() > 30_000


# --- checkpoints -------------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_on_another_number_of_ranks(tmp_path):
    """Tables and optimizer state of two ranks on four, through torch.distributed.checkpoint."""
    given = {"folder": str(tmp_path), "placements": ["rows", "hash", "columns", "table", "hierarchical"]}
    wanted = run_ranks(edges.save_all, 2, **given)[0]
    for found in run_ranks(edges.resume_all, 4, **given):
        for placement in wanted:
            torch.testing.assert_close(found[placement], wanted[placement], rtol=0, atol=1e-6)


def test_state_dict_keeps_names_and_values(two):
    assert two["names"] == [None, None]


# --- refusals ----------------------------------------------------------------------------------------


def test_what_cannot_be_is_said(two):
    parts = {
        "tied": "its weight is also 1.weight", "max_norm": "max_norm", "frequency": "scale_grad_by_freq",
        "bag": "EmbeddingBag", "name": "did you mean 'items'", "mesh": "two-dim mesh", "wire": "not 'fp8'",
        "rank": "names no rank of 2", "memory": "use more ranks", "nothing sharded": "shard(model, plan) first",
        "weight": "no rank has its whole weight", "copy": "torch.distributed.checkpoint",
        "id": "has rows 0 to 7, and 8 was looked up", "negative": "-1 was looked up",
        "row sums": "use RowAdagrad for it", "plans": "ranks have different plans",
    }  # fmt: skip
    said = two["mistakes"][0]
    for what, text in parts.items():
        assert text in said[what], (what, said[what])


def test_a_plan_explains_itself(two):
    text = two["plan"][0]
    assert "large: 40000 x 64, 9.8 MiB -> RowWise(): large: rows over all ranks" in text
    assert "small: 10 x 4, 0.0 MiB -> Replicated(): at most 4 MiB" in text


def test_the_helper_reports_a_rank_that_fails():
    with pytest.raises(RanksFailed, match="no such placement"):
        run_ranks(sharded_models.train, 2, placements=["no such placement"], ways=["eager"], optimizers=["sgd"])
