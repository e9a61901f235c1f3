"""Run folders as data: killed runs, half lines, resumed runs, missing files; and what runs say about each other."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest

from turbogr_compile.errors import OptionError, TurbogrError
from turbogr_compile.training.report import compare, read_run
from turbogr_compile.training.report.comparison import baseline_of, speedup
from turbogr_compile.training.report.words import byte_text, count, factor, percent, scientific, seconds_text

_spec = importlib.util.spec_from_file_location("report_runs", Path(__file__).with_name("report_runs.py"))
assert _spec and _spec.loader
report_runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(report_runs)
write_run = report_runs.write_run


def test_figures_of_a_finished_run(tmp_path):
    run = read_run(write_run(tmp_path / "a", "turbogr", seconds=0.1))
    assert run.finished and not run.reason and not run.problems
    assert run.seconds() == pytest.approx(0.11)  # the first step, of 5 s, compiles
    assert run.tokens_per_second() == pytest.approx(1000 / 0.11)
    assert run.padding() == 0.75 and run.peak_memory() == 4e8
    assert run.mfu() == pytest.approx(2e9 / 0.11 / 1e11)
    assert run.quality("hr@10") == pytest.approx(0.14)


def test_a_killed_run_is_told_by_its_steps(tmp_path):
    folder = write_run(tmp_path / "a", "turbogr", finished=None)
    with open(folder / "steps.jsonl", "a") as file:
        file.write('{"step": 41, "loss": 2.')
    (folder / "evals.jsonl").unlink()
    run = read_run(folder)
    assert not run.finished and "ended" in run.reason and len(run.steps) == 40
    assert run.problems == ["no evals.jsonl", "steps.jsonl: 1 unreadable lines, the first is line 41"][::-1]
    assert run.peak_memory() == 4e8 and run.mfu() is None and run.quality("hr@10") is None


def test_a_resumed_run_counts_the_last_word(tmp_path):
    folder = write_run(tmp_path / "a", "turbogr", steps=3)
    with open(folder / "steps.jsonl", "a") as file:
        file.write(json.dumps(report_runs.step(2, 0.1, 9.0)) + "\n")
    assert [(s, v) for s, v in read_run(folder).values("loss") if s == 2] == [(2, 9.0)]


def test_files_that_are_no_run_are_refused_and_broken_ones_named(tmp_path):
    with pytest.raises(TurbogrError, match="is no run folder"):
        read_run(tmp_path)
    folder = write_run(tmp_path / "a", "x")
    (folder / "run.json").write_text("{")
    (folder / "summary.json").write_text("[1]")
    run = read_run(folder)
    assert run.name == "a" and len(run.problems) == 2 and "holds no object" in run.problems[1]
    (folder / "run.json").write_text('{"format": 7}')
    with pytest.raises(TurbogrError, match="format 7"):
        read_run(folder)


def test_a_run_without_steps_has_no_figures(tmp_path):
    folder = write_run(tmp_path / "a", "x", steps=0, finished=None)
    run = read_run(folder)
    assert (run.seconds(), run.tokens_per_second(), run.padding(), run.mfu(), run.peak_memory()) == (None,) * 5
    assert compare(run, run).speedup is None


def test_comparison_is_step_by_step(tmp_path):
    base = read_run(write_run(tmp_path / "e", "eager", seconds=0.4, memory=8e8))
    ours = read_run(write_run(tmp_path / "t", "turbogr", seconds=0.1, apart=1e-6, memory=2e8, steps=30))
    found = compare(ours, base)
    assert found.speedup == pytest.approx(4.0) and found.memory_saved == pytest.approx(0.75)
    assert found.same_steps == 30 and found.largest_at == 30
    assert found.largest_difference == pytest.approx(3e-5, rel=1e-3)
    # A disturbance that hits the same steps of both does not change single ratios.
    for run in (base, ours):
        for step in run.steps[10:]:
            step["seconds"] *= 7
    assert speedup(ours, base) == pytest.approx(4.0)


def test_losses_that_are_not_numbers_do_not_count(tmp_path):
    base = read_run(write_run(tmp_path / "e", "eager"))
    ours = read_run(write_run(tmp_path / "t", "turbogr"))
    ours.steps[5]["loss"], ours.steps[6]["loss"] = math.nan, "high"
    found = compare(ours, base)
    assert found.largest_difference == 0 and found.same_steps == 39


def test_whole_numbers_beyond_all_floats_are_no_figures(tmp_path):
    folder = write_run(tmp_path / "t", "turbogr")
    with (folder / "steps.jsonl").open("a") as file:
        for wrong in ({"step": 10**400, "loss": 1.0}, {"step": True, "loss": 1.0}, {"step": 41, "loss": 10**400}):
            file.write(json.dumps(wrong) + "\n")
    run = read_run(folder)
    assert [step for step, _ in run.values("loss")] == list(range(1, 41))
    assert "steps.jsonl" in " ".join(run.problems)


def test_baseline_is_eager_or_named(tmp_path):
    runs = [read_run(write_run(tmp_path / n, n)) for n in ("turbogr", "padded eager", "other")]
    assert baseline_of(runs).name == "padded eager" and baseline_of(runs, "other").name == "other"
    assert baseline_of(runs[:1]).name == "turbogr"
    with pytest.raises(OptionError, match="did you mean 'other'"):
        baseline_of(runs, "othr")


def test_words():
    assert [factor(v) for v in (None, 2.34, 12.34)] == ["–", "2.34x", "12.3x"]
    assert percent(0.1234) == "12.3 %" and scientific(0.0) == "0" and scientific(3.2e-7) == "3.2e-07"
    assert count(999) == "999" and count(12_345) == "12.3 k" and count(2e8) == "200 M"
    assert byte_text(512) == "512 B" and byte_text(3 * 2**30) == "3 GiB"
    assert seconds_text(0.0123) == "12.3 ms" and seconds_text(2.5) == "2.50 s"
