"""overlap on two ranks: right results, the same order everywhere, and ranks that would not match are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .overlap_ranks import disagree, inductor_order, recompile_alone, train
from .ranks import run_ranks

SAID = {
    "op": "number 2 of the graph is all_reduce max f32[4]",
    "settings": "all_reduce sum f32[4]",
    "dtype": "all_reduce max f64[4]",
    "fewer": "missing on rank 1",
    "sizes": "all_reduce max f32[2]",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    return run_ranks(train, 2, compiles=True, folder=str(folder)), folder


def test_loss_and_gradients_are_those_of_eager(trained):
    assert all(rank["worst"] < 1e-5 for rank in trained[0])


def collectives(folder: Path, rank: int, role: str) -> list[str]:
    record = json.loads((folder / f"rank{rank}" / f"0.0-{role}" / "record.json").read_text())
    nodes = [record["nodes"][i] for i in record["snapshots"][-1]]
    return [n["op"].removeprefix("_c10d_functional.") for n in nodes if "c10d" in n["op"]]


@pytest.mark.parametrize("role", ["forward", "backward"])
def test_every_rank_has_the_same_order(trained, role):
    first, second = (collectives(trained[1], rank, role) for rank in range(2))
    assert first == second and "wait_tensor" in first


def test_the_dump_has_a_drawing_and_its_data(trained):
    folder = trained[1] / "rank0" / "0.0-forward"
    (picture,) = folder.glob("*-overlap.timeline.svg")
    assert "estimated, not measured" in picture.read_text()
    (facts,) = folder.glob("*-overlap.json")
    assert json.loads(facts.read_text())["timeline"]["estimated"] is True
    assert (folder / picture.name.replace(".svg", ".txt")).read_text().startswith("Estimated")


def test_two_small_sums_travel_together(trained):
    assert collectives(trained[1], 0, "forward").count("all_reduce") == 1


@pytest.fixture(scope="module")
def told():
    return run_ranks(disagree, 2, compiles=True, cases=list(SAID))


@pytest.mark.parametrize("case", SAID)
def test_ranks_that_would_start_different_collectives_are_told(told, case):
    for said in (rank[case] for rank in told):
        assert SAID[case] in said and "on rank 0" in said and "on rank 1" in said, said
        assert "every rank must start the same ones in the same order" in said


def test_a_rank_that_compiles_anew_alone_goes_on():
    assert run_ranks(recompile_alone, 2, compiles=True, timeout=60) == [2 * (6 + 7 + 8)] * 2


@pytest.mark.slow
def test_inductor_keeps_the_order():
    for order in run_ranks(inductor_order, 2, timeout=280):
        assert order == ["start", "product", "product", "product", "wait"]
