"""The catalogue is consistent: scripts exist, readers read what benchmarks wrote, documents are where it says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from turbogr_compile import commands as cli
from turbogr_compile.training.bench.catalogue import BENCHMARKS, PROVENANCES
from turbogr_compile.training.bench.run import SCRIPTS

ROOT = Path(__file__).resolve().parents[2]
# Written by `turbogr bench --size tiny --json`; renew it when a benchmark writes something else.
RECORDED = json.loads(Path(__file__).with_name("bench_tiny.json").read_text(encoding="utf-8"))
CLAIMS = [(b, c) for b in BENCHMARKS for c in b.claims]


def test_names_are_unique():
    names = [b.name for b in BENCHMARKS]
    ids = [c.id for _, c in CLAIMS]
    assert len(set(names)) == len(names) and len(set(ids)) == len(ids) and not set(names) & set(ids)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda b: b.name)
def test_a_script_or_command_runs_it_and_takes_its_arguments(benchmark):
    if benchmark.script == "turbogr":
        for size in ("tiny", "full"):
            cli.parser(benchmark.arguments(size)).parse_args([*benchmark.arguments(size), "--json"])
        return
    source = (SCRIPTS / benchmark.script).read_text(encoding="utf-8")
    for size in ("tiny", "full"):
        for argument in (*benchmark.arguments(size), "--json"):
            assert not argument.startswith("--") or f'"{argument}"' in source, argument


@pytest.mark.parametrize("benchmark, claim", CLAIMS, ids=lambda x: getattr(x, "id", ""))
def test_every_figure_can_be_read_from_what_was_recorded(benchmark, claim):
    recorded = next(b for b in RECORDED["benchmarks"] if b["name"] == benchmark.name)
    value = claim.read(recorded["data"])
    assert math.isfinite(value) and claim.show(value)
    assert claim.provenance in PROVENANCES and (ROOT / claim.stated).is_file()


def test_what_is_simulated_says_so():
    for benchmark, claim in CLAIMS:
        assert (claim.provenance == "simulated") == (benchmark.name == "simulate"), claim.id


def test_every_figure_of_the_paper_stands_beside_one_of_ours():
    reported = " ".join(c.paper for _, c in CLAIMS)
    for figure in ("70 %", "2.2x", "47 %", "2.4 %", "75.9 %", "94 %", "54.71 %", "0.97"):
        assert figure in reported


def test_every_benchmark_with_figures_is_in_the_catalogue():
    """A script that can be run by itself and writes --json belongs to the catalogue."""
    scripts = {p.name for p in SCRIPTS.glob("*.py") if '"--json"' in p.read_text(encoding="utf-8")}
    assert scripts == {b.script for b in BENCHMARKS if b.script != "turbogr"}
