"""Whole runs: what they leave behind, that backends agree, and that they go on where they stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import turbogr_compile as turbogr
from turbogr_compile import OptionError
from turbogr_compile.commands import main
from turbogr_compile.training import build, loop
from turbogr_compile.training.config import Config
from turbogr_compile.training.data import Batches
from turbogr_compile.training.memory import eager_estimate, kept_by_autograd, state_bytes

SMALLEST = {
    "dim": 16, "layers": 1, "max_len": 24, "batch": 8, "negatives": 16, "users": 60, "items": 50, "mean_length": 8,
    "evaluate_users": 20, "threads": 1, "steps": 6, "save_every": 2, "warmup": 2,
}  # fmt: skip


def config(**more) -> Config:
    return Config.read(SMALLEST | more)


def run(out: Path, **more) -> loop.Result:
    keywords = {k: more.pop(k) for k in ("resume", "after_step") if k in more}
    return loop.train(config(**more), out, quiet=True, **keywords)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in lines(out, "steps.jsonl")]


def lines(out: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in mine.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> loop.Result:
    """A run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return run(out, deterministic=True, evaluate_every=3)


def test_the_folder_holds_what_reports_read(whole):
    out = whole.folder
    about, summary = (json.loads((out / name).read_text()) for name in ("run.json", "summary.json"))
    assert about["format"] == 1 and about["name"] == "turbogr" and about["config"]["dim"] == 16
    assert Config.read(about["config"]) == config(deterministic=True, evaluate_every=3)
    assert about["parameters"]["tables"] == 16 * (build.histories(config(), out / "data").catalogue + 1)
    assert any("pack-rows" in p["text"] for p in about["passes"])
    assert {"kind", "id", "pass", "text", "line"} <= set(about["remarks"][0])
    steps = lines(out, "steps.jsonl")
    assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6]
    assert all(s["padded"] == 8 * 24 and 16 <= s["tokens"] <= s["padded"] and s["flops"] > 0 for s in steps)
    assert [e["step"] for e in lines(out, "evals.jsonl")] == [3, 6]
    assert summary["finished"] and summary["reason"] == "done" and summary["steps"] == 6
    assert 0 < summary["mfu"] < 1 and 0 < summary["padding_saved"] < 1 and summary["last_loss"] == steps[-1]["loss"]
    assert summary["hr@10"] == lines(out, "evals.jsonl")[-1]["hr@10"]


@pytest.mark.parametrize("model", ["hstu", "sasrec", pytest.param("fuxi", marks=pytest.mark.slow)])
def test_the_curve_is_eagers(model, tmp_path):
    run(tmp_path / "compiled", model=model, save_every=0)
    run(tmp_path / "eager", model=model, save_every=0, backend="eager")
    torch.testing.assert_close(losses(tmp_path / "compiled"), losses(tmp_path / "eager"), rtol=1e-4, atol=1e-5)


def test_it_learns(tmp_path):
    result = run(tmp_path / "run", steps=60, save_every=0, lr=5e-3, table_lr=5e-2)
    curve = losses(tmp_path / "run")
    assert sum(curve[-10:]) < 0.9 * sum(curve[:10]) and result.summary["hr@10"] > 0.2


def test_accumulated_gradients_are_the_mean_over_batches(tmp_path):
    result = run(tmp_path / "run", accumulate=2, steps=1, backend="eager", save_every=0, warmup=0)
    settings = config(accumulate=2)
    histories = build.histories(settings, tmp_path / "run" / "data")
    torch.manual_seed(settings.seed)
    model = build.recommender(settings, histories.catalogue, table="meta")
    build.place_tables(model, settings, 1)
    batches = Batches(histories, settings.batch, settings.max_len, settings.seed)
    torch.manual_seed(settings.seed * 1_000_003)
    found = [model.loss(batch["ids"], batch["times"]) for batch in (batches.at(0, 0), batches.at(0, 1))]
    assert losses(tmp_path / "run") == pytest.approx([sum(found).item() / 2])
    (sum(found) / 2).backward()
    weight = model.norm.weight
    torch.optim.AdamW([weight], lr=settings.lr, weight_decay=settings.weight_decay).step()
    torch.testing.assert_close(result.model.norm.weight, weight)


def test_features_are_named_and_train(tmp_path):
    result = run(tmp_path / "run", features="all", storage="bf16", save_every=0)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [o.split(":")[0] for o in about["options"]] == ["offload", "half", "share", "window", "bf16 storage"]
    applied = {r["id"] for r in about["remarks"] if r["kind"] == "applied"}
    assert {"packed", "sampling-fused", "logits-shared", "negatives-half", "offloaded"} <= applied
    assert result.summary["finished"] and all(loss > 0 for loss in losses(tmp_path / "run"))
    dtypes = {n: p.dtype for n, p in result.model.named_parameters()}
    assert dtypes.pop("items.weight") == torch.float32 and set(dtypes.values()) == {torch.bfloat16}


def test_bf16_storage_computes_in_fp32(tmp_path):
    """Its first loss is that of fp32 with rounded parameters, to fp32's precision."""
    run(tmp_path / "compiled", storage="bf16", save_every=0, steps=4)
    run(tmp_path / "eager", storage="bf16", save_every=0, steps=4, backend="eager")
    first, second = losses(tmp_path / "compiled"), losses(tmp_path / "eager")
    assert first[0] == pytest.approx(second[0], rel=1e-5)
    assert first == pytest.approx(second, rel=1e-2)


# --- going on --------------------------------------------------------------------------------------------


KILLED = """
import json, os, signal, sys
from turbogr_compile.training.config import Config
from turbogr_compile.training.loop import train
settings, out, at = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
die = lambda: os.kill(os.getpid(), signal.SIGKILL)
train(Config.read(settings), out, quiet=True, after_step=lambda step: step == at and die())
"""


def killed(out: Path, at: int, settings: Config) -> None:
    command = [sys.executable, "-c", KILLED, json.dumps(settings.as_dict()), str(out), str(at)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("at", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_and_resumed_is_the_same_to_the_bit(whole, at, tmp_path):
    """Before the first checkpoint, and between two."""
    settings = {"deterministic": True, "evaluate_every": 3}
    killed(tmp_path / "run", at, config(**settings))
    assert len(losses(tmp_path / "run")) == at and not (tmp_path / "run" / "summary.json").exists()
    resumed = run(tmp_path / "run", resume=True, **settings)
    assert same(resumed.model, whole.model)
    assert losses(tmp_path / "run") == losses(whole.folder)
    assert [e["step"] for e in lines(tmp_path / "run", "evals.jsonl")] == [3, 6]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["sasrec", "fuxi"])
@pytest.mark.parametrize("storage", ["fp32", "bf16"])
def test_all_that_can_be_resumed(model, storage, tmp_path):
    settings = {"deterministic": True, "features": "all", "storage": storage, "model": model, "accumulate": 2}
    whole = run(tmp_path / "whole", **settings, dropout=0.1)
    killed(tmp_path / "run", 3, config(**settings, dropout=0.1))
    assert same(run(tmp_path / "run", resume=True, **settings, dropout=0.1).model, whole.model)


def test_interrupted_saves_and_says_how_to_go_on(whole, tmp_path, monkeypatch, capsys):
    plain, before = loop.train, signal.getsignal(signal.SIGINT)

    def interrupted(*args, **keywords):
        return plain(*args, **keywords, after_step=lambda step: step == 2 and signal.raise_signal(signal.SIGINT))

    monkeypatch.setattr(loop, "train", interrupted)
    out = tmp_path / "run"
    flags = [f"--{k.replace('_', '-')}={v}" for k, v in SMALLEST.items()]
    command = ["train", "--out", str(out), *flags, "--deterministic", "--evaluate-every", "3", "--quiet"]
    assert main(command) == 130
    said = capsys.readouterr().out
    assert f"interrupted after step 3; go on with: turbogr train --out {out} --resume" in said
    assert json.loads((out / "summary.json").read_text())["reason"] == "interrupted"
    assert signal.getsignal(signal.SIGINT) is before
    monkeypatch.setattr(loop, "train", plain)
    assert main(["train", "--out", str(out), "--resume", "--quiet"]) == 0
    assert losses(out) == losses(whole.folder)


def test_a_second_interrupt_aborts(tmp_path):
    def twice(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", after_step=twice)
    assert len(losses(tmp_path / "run")) == 1


def test_half_a_line_is_forgotten(whole, tmp_path):
    killed(tmp_path / "run", 3, config(deterministic=True))
    with open(tmp_path / "run" / "steps.jsonl", "a") as file:
        file.write('{"step": 4, "lo')
    run(tmp_path / "run", resume=True, deterministic=True)
    assert losses(tmp_path / "run") == losses(whole.folder)


def test_a_run_goes_on_as_it_began(whole):
    with pytest.raises(OptionError, match="has dim 16, and 32 is asked for"):
        run(whole.folder, deterministic=True, evaluate_every=3, dim=32, resume=True)
    with pytest.raises(OptionError, match="holds a run already: go on with --resume"):
        run(whole.folder, deterministic=True)


def test_nothing_to_go_on_with(tmp_path):
    with pytest.raises(OptionError, match="no run to go on with"):
        run(tmp_path / "none", resume=True)


# --- memory ----------------------------------------------------------------------------------------------


def test_what_autograd_keeps_is_counted_without_allocating():
    settings = config(layers=2)
    torch.manual_seed(0)
    model = build.recommender(settings, 50)
    ids = torch.randint(1, 51, (8, 24))
    kept = kept_by_autograd(model, ids, ids.clone())
    count = build.parameters_of(model)
    assert eager_estimate(settings, 50) == kept + state_bytes(settings, count["dense"], count["tables"])
    rows = 8 * 23 * 16 * 16 * 4  # negatives that are looked up
    assert kept > rows


def test_large_needs_three_times_the_memory_padded():
    """By the count; benchmarks and `turbogr train --compare-memory` measure it."""
    large = Config.read({"size": "large"})
    assert eager_estimate(large, large.items) > 24 * 2**30


def test_statistics_show_no_fallback(tmp_path):
    torch.compiler.reset()
    before = turbogr.statistics()  # of graphs that other tests keep alive
    run(tmp_path / "run", save_every=0)
    mine = [s for s in turbogr.statistics() if s not in before]
    assert mine
    assert not [s.fallbacks for s in mine if s.fallbacks]
