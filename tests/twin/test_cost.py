"""Projections: from counters to time, and the command that prints them."""

from __future__ import annotations

import json
import re

import pytest
import torch

from turbogr_compile.commands import main
from turbogr_compile.kernels.twin.cost import SOCS, imbalance, project
from turbogr_compile.kernels.twin.launch import Report
from turbogr_compile.kernels.twin.workloads import WORKLOADS, Batch


def core(vector: float, finish: float, memory: float = 0.0) -> dict[str, dict[str, float]]:
    return {
        "busy": {"S": 0.0, "V": vector, "MTE2": 10.0, "MTE3": 5.0, "cube": 0.0},
        "bytes": {"memory to UB": memory},
        "totals": {"macs": 4096.0, "finish": finish},
    }


def test_the_last_core_says_when_a_launch_ends():
    found = project(Report("op", 2, 0, [core(1800, 1800), core(900, 900)]), SOCS["910B3"])
    assert found.microseconds == pytest.approx(1.0)
    assert found.bound == "vector"
    assert found.imbalance == pytest.approx(1800 / 1350 - 1)


def test_memory_bounds_what_cores_alone_do_not():
    soc, count = SOCS["910B3"], 40
    found = project(Report("op", count, 0, [core(1, 10, memory=soc.bandwidth * 1e-3 / count)] * count), soc)
    assert found.microseconds == pytest.approx(1000.0)
    assert found.bound == "memory"


def test_one_core_gets_its_own_share_of_memory():
    found = project(Report("op", 1, 0, [core(1, 10, memory=32 * 1800)]), SOCS["910B3"])
    assert found.microseconds == pytest.approx(1.0)


def test_a_kernel_that_mostly_waits_is_said_to():
    assert project(Report("op", 1, 0, [core(100, 1000)]), SOCS["910B1"]).bound == "waiting"


def test_peaks_are_those_of_the_platform_files():
    assert [round(SOCS[name].peak / 1e12, 1) for name in SOCS] == [363.7, 353.9, 294.9, 245.8]


def test_mfu_counts_flops_that_are_asked_for():
    soc = SOCS["910B3"]
    found = project(Report("op", 1, 0, [core(1800, 1800)]), soc, flops=soc.peak * 0.5e-6)
    assert found.mfu == pytest.approx(0.5)


def test_more_cores_than_the_device_has():
    with pytest.raises(ValueError, match="41 vector cores, and 910B3 has 40"):
        project(Report("op", 41, 0, [core(1, 1)] * 41), SOCS["910B3"])


def test_no_work_is_no_imbalance():
    idle = {**core(0, 0), "busy": {"S": 0.0, "V": 0.0, "MTE2": 0.0, "MTE3": 0.0, "cube": 0.0}}
    assert imbalance(Report("op", 1, 0, [idle])) == 0.0


@pytest.mark.parametrize("fill", [0.1, 0.3, 0.9])
def test_batches_have_the_fill_that_is_asked_for(fill: float):
    batch = Batch(sequences=64, longest=512, fill=fill)
    assert batch.rows / (64 * 512) == pytest.approx(fill, rel=0.05)
    assert batch.lengths.max() <= 512 and batch.lengths.min() >= 1
    assert len(batch.columns) == batch.rows == batch.offsets[-1]


# --- the command -----------------------------------------------------------------------------------------

SMALL = ["--sequences", "4", "--longest", "40", "--heads", "2", "--head-dim", "16"]


def test_every_workload_is_projected(capsys: pytest.CaptureFixture[str]):
    assert main(["cost", *SMALL, "--soc", "910B3", "--soc", "910B4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["projections"]
    assert {f["workload"] for f in found} == set(WORKLOADS)
    assert all(f["microseconds"] > 0 and f["cycles"] > 0 for f in found)
    by_soc = {soc: sum(f["cycles"] for f in found if f["soc"] == soc) for soc in ("910B3", "910B4")}
    assert by_soc["910B3"] == by_soc["910B4"]  # as many cores: one run, another clock


def test_the_text_says_that_nothing_was_measured(capsys: pytest.CaptureFixture[str]):
    assert main(["cost", "norm-gate", *SMALL, "--soc", "910B1"]) == 0
    text = capsys.readouterr().out
    assert "Projected, not measured" in text and "functionally emulated" in text
    assert "norm_gate_backward  910B1" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["norm-gat"], "'norm-gat' is no workload: .*did you mean 'norm-gate'"),
        (["--soc", "910B5"], "'910B5' is no device: 910B1"),
        (["--dtype", "float8"], "'float8' is no dtype"),
        (["--fill", "0"], "--fill is a share"),
        (["--heads", "0"], "--heads must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["cost", *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_dtypes_of_the_batch():
    assert Batch(dtype=torch.bfloat16).normal(2, 3).dtype == torch.bfloat16
