"""Sharded tables in compiled steps: opaque under any backend, taken apart by `expand-lookups` under ours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks import these modules by their bare names

import edges
import sharded_models
from ranks import run_several

EXACT = 1e-12  # everything is in fp64: what is left is the order of sums


def steps(placement: str, how: str, optimizer: str = "adagrad") -> tuple:
    """20 steps of 15 different shapes."""
    return sharded_models.train, {"placements": [placement], "ways": [how], "optimizers": [optimizer]}


@pytest.fixture(scope="module")
def two():
    memory = {"rows": 100_000, "width": 16, "how": "expanded"}
    return run_several(2, {
        "opaque": steps("rows", "aot_eager"),
        "rows": steps("rows", "expanded"),
        "columns": steps("columns", "expanded"),
        "one exchange": (edges.expanded, {}),
        "late": (edges.late_ids, {}),
        "equal": (edges.equal_lookups_compiled, {"how": "expanded"}),
        "memory": (edges.largest_allocation, memory),
        "sampled": (edges.sampled, {}),
        "padded": (edges.padded, {}),
    }, timeout=240, compiles=True)  # fmt: skip


def agrees(found) -> None:
    for case in (case for rank in found for case in rank.values()):
        assert case["worst"] < EXACT and case["graphs"] == 1, case


@pytest.mark.parametrize("case", ["opaque", "rows", "columns"])
def test_one_graph_trains_as_one_process(two, case: str):
    agrees(two[case])


def test_nodes_with_replicas():
    """2 nodes of 2 ranks: equal to one process, and replicas equal each other to the last bit."""
    found = run_several(4, {"nodes": steps("hierarchical", "expanded")}, compiles=True)["nodes"]
    agrees(found)
    shards = [rank["hierarchical", "expanded", "adagrad"]["shard"] for rank in found]
    assert shards[0].equal(shards[2]) and shards[1].equal(shards[3]) and not shards[0].equal(shards[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["aot_eager", "turbogr", "expanded", "inductor"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_placement_under_every_backend(world: int, how: str):
    places = ["rows", "hash", "table", "columns"]
    calls = {place: steps(place, how, "adam") for place in places if how != "inductor" or place == "rows"}
    for found in run_several(world, calls, timeout=900).values():
        agrees(found)


@pytest.mark.slow
def test_ids_that_are_hard_to_exchange():
    (found,) = run_several(3, {"lookups": (edges.lookups, {"compiles": True})}, timeout=600).values()
    assert max(x for rank in found for x in rank.values()) < EXACT


def test_all_lookups_in_a_table_share_one_exchange(two):
    for graphs in two["one exchange"]:
        exchange = "_c10d_functional.all_to_all_single.default"
        assert graphs["forward"].count(exchange) == graphs["backward"].count(exchange) == 1
        assert graphs["forward"].count("turbogr.fetch_rows.default") == 1
        assert graphs["backward"].count("turbogr.keep_rows.default") == 1
        assert not any("sharded" in target for target in graphs["forward"] + graphs["backward"])
        assert "expanded" in graphs["remarks"]


def test_ids_that_depend_on_parameters_leave_the_op_as_it_is(two):
    for found in two["late"]:
        assert found["apart"] < 1e-6
        assert found["targets"].count("turbogr.sharded_lookup.default") == 1
        assert found["targets"].count("turbogr.fetch_rows.default") == 1
        assert "ids-known-late" in found["remarks"]


def test_negatives_drawn_in_the_step_are_drawn_before_it_where_that_is_asked_for(two):
    for rank in two["sampled"]:
        opaque, apart = rank["opaque"], rank["apart"]
        assert max(abs(a - b) for a, b in zip(opaque["losses"], apart["losses"], strict=True)) < EXACT
        assert len(set(apart["losses"])) == 4
        assert {"drawn-before", "expanded"} <= set(apart["remarks"]) and "ids-known-late" not in apart["remarks"]
        assert not any("sharded_lookup" in t for t in apart["targets"])
        assert "sampling-fused" in apart["remarks"], "hits are found by places, which stand for ids"
        assert apart["targets"].count("turbogr.sampled_loss_ahead.default") == 1


def test_what_is_asked_of_sampling_holds_for_rows_that_were_fetched(two):
    for rank in two["sampled"]:
        fetched, whole = rank["apart, opted"], rank["whole, opted"]
        assert {"sampling-fused", "logits-shared", "negatives-half"} <= set(fetched["remarks"])
        # Before the first update. Scales of FP16 rows are those of a segment here and of a block of the table there.
        assert abs(fetched["losses"][0] - whole["losses"][0]) < 1e-3
        assert abs(fetched["losses"][0] - rank["apart"]["losses"][0]) > 1e-3, "shared negatives are another loss"


def test_equal_lookups_with_equal_gradients_are_two(two):
    """A compiler may merge them."""
    assert two["equal"] == [0, 0]


def test_no_tensor_of_the_size_of_a_shard_is_made(two):
    for rank in two["memory"]:
        assert 0 < rank["made"] < rank["shard"] / 50, rank


def test_routing_runs_a_batch_ahead_and_changes_nothing():
    (found,) = run_several(2, {"ahead": (edges.ahead_of_steps, {})}, compiles=True).values()
    for rank in found:
        assert rank["losses"][False] == rank["losses"][True]
        assert (rank["ahead"], rank["calls"]) == (7, 8)


def test_pads_are_neither_looked_up_nor_exchanged(two):
    for rank in two["padded"]:
        eager, packed = rank["eager"], rank["turbogr"]
        assert max(abs(a - b) for a, b in zip(eager["losses"], packed["losses"], strict=True)) < EXACT
        assert {"packed", "expanded"} <= set(packed["remarks"]) and "mixes-rows" not in packed["remarks"]
