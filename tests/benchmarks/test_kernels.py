"""The benchmark command: ways agree, figures are computed right, bad options are named. Speed is never asserted."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import attention
import by_hand
import chart
import measure
import plan
import pytest
import report
import row_ops
import steps
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jagged import Batch
from measure import Effort, take_turns
from plan import Settings

BENCHMARKS = Path(measure.__file__).parent
TINY = Settings("tiny")


def load_command() -> ModuleType:
    """By its file: a folder of this repository has the same name."""
    spec = importlib.util.spec_from_file_location("benchmark_command", BENCHMARKS / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels = load_command()


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., argparse.Namespace]:
    """Options as the command reads them."""

    def parse(*options: str) -> argparse.Namespace:
        monkeypatch.setattr(sys, "argv", ["kernels.py", *options])
        return kernels.parse()

    monkeypatch.delenv("META_GR", raising=False)
    return parse


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's ways run eagerly, and turbogr generates no code: what they compute is the same."""
    compile = torch.compile

    def cheap(fn: Any, backend: str | None = None, **rest: Any) -> Any:
        return compile(fn, backend=backend, options={"codegen": "aten"}) if backend == "turbogr" else fn

    monkeypatch.setattr(torch, "compile", cheap)


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other take minutes on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- batches -----------------------------------------------------------------------------------------


@given(sequences=st.integers(1, 40), longest=st.integers(4, 300), seed=st.integers(0, 5))
@settings(max_examples=40, deadline=None)
def test_batches_are_as_long_and_as_full_as_asked(sequences: int, longest: int, seed: int) -> None:
    batch = Batch.heavy_tailed(sequences, longest, seed=seed)
    assert batch.longest == longest and int(batch.lengths.min()) >= 1
    assert batch.rows == int(batch.valid.sum()) == int(batch.offsets[-1]) == len(batch.columns)
    x = torch.randn(batch.rows, 2)
    assert torch.equal(batch.packed(batch.padded(x)), x)
    causal = torch.ones(longest, longest).tril().bool()
    pairs = causal & batch.valid[:, None, :] & batch.valid[:, :, None]
    assert batch.causal_pairs == int(pairs.sum())
    if sequences > 20 and longest > 50:
        assert abs(batch.fill - 0.3) < 0.05


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=50))
@settings(max_examples=50, deadline=None)
def test_time_bounds_are_those_of_the_buckets(apart: list[int]) -> None:
    gaps = torch.tensor([*apart, *(-x for x in apart)])
    counted = torch.bucketize(gaps.abs(), attention.time_bounds(), right=True)
    assert torch.equal(counted, attention.bucket(gaps))


def test_toeplitz_is_a_table_by_distance() -> None:
    table, place = torch.randn(11), torch.arange(6)
    assert torch.equal(attention.toeplitz(table, 6), table[place[:, None] - place[None, :] + 5])


# --- ways agree --------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", ["HSTU", "SASRec"])
@pytest.mark.parametrize("ops", [by_hand.plain, by_hand.kernels])
def test_a_model_packed_by_hand_has_the_loss_and_gradients_of_the_padded_one(layer: str, ops: Any) -> None:
    model = next(m for m in steps.TINY if m.name == layer)
    net = model.padded.double()
    try:
        expected = torch.autograd.grad(net.loss(*model.inputs), list(net.parameters()))
        loss = by_hand.PackedLoss(net, ops(model.batch))(*model.packed_inputs)
        torch.testing.assert_close(loss, net.loss(*model.inputs))
        torch.testing.assert_close(torch.autograd.grad(loss, list(net.parameters())), expected)
    finally:
        net.float()


GROUPS = {
    "attention": attention.silu_groups,
    "biases": attention.biased_groups,
    "softmax": attention.softmax_groups,
    "scaling": attention.scaling_groups,
    "block": row_ops.block_groups,
    "rows": row_ops.row_groups,
    "step": steps.step_groups,
}


# These are run by `turbogr bench --size tiny` too.
OFTEN = ("attention", "biases", "softmax", "step")


@pytest.mark.parametrize("table", [pytest.param(t, marks=pytest.mark.slow if t in OFTEN else ()) for t in GROUPS])
def test_every_way_of_a_table_runs(table: str, uncompiled: None) -> None:
    for group in GROUPS[table](TINY):
        found = take_turns(group.ways, TINY.effort, peak=group.flops is not None)
        failed = {way for way, samples in found.items() if "failed" in samples}
        assert failed <= {"nested tensors", "FlexAttention"}
        assert not group.notes


def test_ways_that_disagree_are_not_measured() -> None:
    x = torch.randn(3, requires_grad=True)
    ways = {"wrong": plan.Way(lambda x: x * 1.01, (x,), x), "turbogr": plan.Way(lambda x: x * 1, (x,), x)}
    with pytest.raises(plan.Disagreement, match="wrong and turbogr"):
        next(plan.both_parts("", ways, None, {}))
    ways["wrong"] = plan.Way(lambda x: x * torch.nan, (x,), x)
    with pytest.raises(plan.Disagreement):
        next(plan.both_parts("", ways, None, {}))


# --- taking turns ------------------------------------------------------------------------------------


def test_order_rotates_and_failures_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SHORTEST", 0.0)
    called: list[str] = []

    def broken() -> None:
        raise RuntimeError("\nno such thing\nand more")

    ways = {name: (lambda name=name: called.append(name)) for name in "abc"} | {"broken": broken}
    found = take_turns(ways, Effort(3, 3), peak=False)
    assert found["broken"] == {"failed": "no such thing"}
    assert "".join(called) == "aabbccbcacab"  # one call to warm up, then rounds
    assert all(len(found[name]["wall"]) == 3 for name in "abc")


def test_short_calls_are_repeated() -> None:
    found = take_turns({"short": lambda: None}, Effort(1, 1), peak=False)
    assert found["short"]["calls"] > 100
    assert found["short"]["wall"][0] < 1e-3


def test_processor_time_counts_children_that_still_run() -> None:
    before = measure.processor_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "done\n"
        assert measure.processor_seconds() - before >= 0.25
    finally:
        child.communicate("\n")


# --- figures -----------------------------------------------------------------------------------------


def samples(*milliseconds: float, system: float = 0.0) -> dict[str, Any]:
    took = [t / 1e3 for t in milliseconds]
    return {"calls": 1, "wall": took, "user": [t * (1 - system) for t in took], "system": [t * system for t in took]}


def run_of(malloc: str = "tuned", threads: int = 1, padded: float = 100.0) -> dict[str, Any]:
    gemm = 2 * measure.PEAK_SIZE**3 / 1e11 * 1e3  # milliseconds at 100 GFLOP/s
    ways = {
        "GEMM": samples(gemm, 3 * gemm, gemm),
        "padded Inductor": samples(padded, padded - 5, 10 * padded, system=0.25),
        "turbogr": samples(8.0, 10.0, 12.0),
        "nested <tensors>": {"failed": "they do not & never did"},
        "optimizer": samples(2.0, 2.0, 2.0),
    }
    group = {"name": "B1", "part": plan.STEP, "flops": 5e8, "facts": {}, "notes": ["a note"], "ways": ways}
    table = {"table": "step", "title": "Steps", "ours": "turbogr", "against": ["padded Inductor"], "unit": "ms"}
    return {**table, "malloc": malloc, "threads": threads, "neighbours": 0.5, "about": "About.", "groups": [group]}


def test_a_table_shows_medians_ratios_utilisation_and_floor() -> None:
    shown = report.sheet(run_of())
    figures = dict(zip(shown.head[2:], shown.rows[0][2:], strict=True))
    assert figures == {
        "padded Inductor": "100", "turbogr": "10.0", "nested <tensors>": "–", "optimizer": "2.00",
        "over padded Inductor": "10.0x", "MFU": "50%", "floor": "7.00", "limit over padded Inductor": "14.3x",
    }  # fmt: skip
    text = report.text(shown)
    for said in ("tuned malloc", "1 thread, processor time in ms", "3 rounds", "never did", "a note", "50% of the"):
        assert said in text
    rows = report.markdown(shown).splitlines()[2:5]
    assert {row.count("|") for row in rows} == {len(shown.head) + 1}


def test_the_allocator_is_shown_where_both_were_measured() -> None:
    (shown,) = report.allocator([run_of("tuned"), run_of("default", padded=200.0)])
    assert shown.rows[0] == ["step, B1", "padded Inductor", "200", "25%", "100", "25%", "2.00x"]
    assert not list(report.allocator([run_of("tuned"), run_of("default", threads=2)]))


def test_pictures_are_valid_offline_and_inside_of_their_frames() -> None:
    results = {"machine": {"cpu": "x <y>"}, "size": "tiny", "runs": [run_of(), run_of(threads=2)]}
    page = chart.html(results)
    assert "x &lt;y&gt;" in page and "<y>" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "2 threads" in chart.overview(results)
    for svg in [chart.overview(results), chart.panel(run_of(), run_of()["groups"][0])]:
        root = ElementTree.fromstring(svg)
        left, _, width, _ = map(float, root.get("viewBox", "").split())
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            x, long = float(text.get("x", 0)), 7.5 * len(text.text or "")
            end = text.get("text-anchor") == "end"
            assert (x - long >= left) if end else (x + long <= left + width), text.text


# --- the command -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, said",
    [
        (["--only", "atention"], "unknown table 'atention'; did you mean 'attention'?; known: attention, biases"),
        (["--malloc", "jemalloc"], "unknown malloc 'jemalloc'; known: tuned, default"),
        (["--threads", "0"], "--threads takes numbers from 1 to"),
        (["--threads", "1,many"], "got 'many'"),
        (["--meta", "nowhere"], "--meta is no checkout of generative-recommenders: no nowhere/"),
        (["--json", "nowhere/results.json"], "cannot write nowhere/results.json: there is no directory nowhere"),
    ],
)
def test_bad_options_are_named_in_a_sentence(options: list[str], said: str, command: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        command(*options)
    assert said in str(stopped.value) and "\n" not in str(stopped.value)


def test_meta_may_come_from_the_environment(command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("META_GR", str(tmp_path))
    with pytest.raises(SystemExit, match="META_GR is no checkout"):
        command()
    file = tmp_path / attention.META_FILE
    file.parent.mkdir(parents=True)
    file.touch()
    assert command().meta == tmp_path


def test_results_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"cannot read results from .*missing\.json"):
        report.read(tmp_path / "missing.json")


def test_each_condition_gets_a_process_of_its_own(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "machine", lambda: {"cores": 4})
    options = command("--only", "softmax,scaling,compile", "--threads", "4,1")
    planned = [(table.name, malloc, threads) for table, malloc, threads in kernels.conditions(options)]
    assert planned == [
        ("softmax", "tuned", 1), ("softmax", "tuned", 4), ("softmax", "default", 1), ("softmax", "default", 4),
        ("scaling", "tuned", 4), ("compile", "default", 4),
    ]  # fmt: skip

    started: list[dict[str, str]] = []

    def refuse(command: list[str], env: dict[str, str]) -> Any:
        started.append(env)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(kernels.subprocess, "run", refuse)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    monkeypatch.delenv("TURBOGR_KERNELS", raising=False)
    for malloc in measure.MALLOC:
        assert kernels.in_own_process(kernels.TABLES["softmax"], malloc, 1, options) is None
    assert [env.get("MALLOC_TRIM_THRESHOLD_") for env in started] == [str(2**34), None]
    assert {env["OMP_NUM_THREADS"] for env in started} == {"1"}
    assert {env["TURBOGR_KERNELS"] for env in started} == {"required"}


def test_one_command_writes_tables_samples_and_a_page(tmp_path: Path) -> None:
    written, page = tmp_path / "results.json", tmp_path / "results.html"
    options = ["--size", "tiny", "--only", "block", "--threads", "1", "--malloc", "default"]
    cheap = {"TORCHDYNAMO_DISABLE": "1", "TURBOGR_KERNELS": "auto"}  # Inductor's ways run eagerly
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "kernels.py", *options, "--json", written, "--html", page],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **cheap},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads(written.read_text())
    assert [(run["table"], run["malloc"], run["threads"]) for run in results["runs"]] == [("block", "default", 1)]
    assert "default malloc · 1 thread" in done.stdout
    assert page.read_text().startswith("<!doctype html>")
