"""Long histories in the job: which clicks are trained on, and who takes them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from turbogr_compile.commands import main
from turbogr_compile.training import build, progress
from turbogr_compile.training.config import Config
from turbogr_compile.training.data import Batches, Histories, generate, open_histories, reader
from turbogr_compile.training.flops import forward_flops, step_cost, step_flops

SMALLEST = {
    "dim": 8, "heads": 1, "layers": 1, "max_len": 12, "batch": 4, "negatives": 4, "users": 40, "items": 50,
    "mean_length": 20, "evaluate_users": 0, "threads": 1, "save_every": 0, "backend": "eager",
}  # fmt: skip


def predicted(out: Path, *flags: str, steps: int) -> int:
    """Clicks that the command trained on as positives."""
    settings = [text for name, value in SMALLEST.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["train", *settings, "--steps", str(steps), "--out", str(out), "--quiet", *flags]) == 0
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    return sum(line["tokens"] - SMALLEST["batch"] for line in lines)


def test_an_epoch_of_chunks_visits_every_click_once(tmp_path, capsys):
    config = Config.read(SMALLEST | {"long": "chunks"})
    histories = build.histories(config, tmp_path / "data")
    every = int((histories.lengths - 2).sum())  # the held-out one, and the first one, which nothing predicts
    chunks = Batches(histories, 4, 12, long="chunks")
    recent = Batches(histories, 4, 12)
    assert predicted(tmp_path / "chunks", "--long", "chunks", steps=len(chunks)) == every
    assert predicted(tmp_path / "last", steps=len(recent)) < 0.7 * every
    assert len(chunks) > len(recent)


def test_what_the_command_takes(tmp_path, capsys):
    assert main(["train", "--long", "chunk", "--out", str(tmp_path)]) == 2
    assert "did you mean 'chunks'?" in capsys.readouterr().err
    fewer = build.histories(Config.read(SMALLEST | {"min_length": 15}), tmp_path / "data")
    every = build.histories(Config.read(SMALLEST | {"keep": "all"}), tmp_path / "data")
    assert fewer.lengths.min() >= 15 and len(every.items) > len(fewer.items)


def test_the_cost_of_a_history_is_that_of_its_flops():
    config = Config.read({"model": "fuxi", "dim": 64, "layers": 3, "heads": 2})
    lengths = np.array([1, 2, 100, 8192])
    wanted = [3 * forward_flops(config, n, n * (n + 1) / 2) for n in lengths]
    np.testing.assert_allclose(step_cost(config)(lengths), wanted)
    assert step_cost(Config.read({"cost": "tokens"}))(lengths).tolist() == lengths.tolist()


def imbalance(config: Config, histories: Histories, world: int = 4) -> float:
    """How much longer steps take than were all ranks alike, by FLOPs."""
    ranks = [Batches(histories, config.batch, config.max_len, order="balanced", rank=rank, world=world,
                     cost=step_cost(config)) for rank in range(world)]  # fmt: skip
    lengths = np.minimum(histories.lengths - 1, config.max_len)
    work = np.array([[step_flops(config, lengths[of.users(0, step)]) for of in ranks] for step in range(len(ranks[0]))])
    return float(work.max(1).sum() / work.mean(1).sum() - 1)


@pytest.mark.parametrize("model", ["hstu", "sasrec"])
def test_balancing_evens_out_flops(model):
    """Histories with a heavy tail up to 8192, where attention is most of the work."""
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(8, 1.2, 600).astype(np.int64) + 3, 20_000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = np.ones(offsets[-1], dtype=np.int32)
    histories = Histories(items, np.zeros(len(items), dtype=np.int64), offsets, np.arange(600), np.arange(1))
    shape = {"model": model, "dim": 256, "layers": 8, "heads": 4, "max_len": 8192, "batch": 8}
    by_tokens, by_flops = (imbalance(Config.read(shape | {"cost": c}), histories) for c in ("tokens", "flops"))
    assert by_flops < 0.5 * by_tokens and by_flops < 0.03, (by_tokens, by_flops)


def test_data_are_read_once_for_all_runs(tmp_path, capsys, monkeypatch):
    """Into a folder that runs share, with a word about how far it is; files that changed are read again."""
    files = generate(tmp_path / "files", users=60, items=50, mean_length=10)
    monkeypatch.setenv("TURBOGR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    flags = [t for n, v in SMALLEST.items() for t in (f"--{n.replace('_', '-')}", str(v))]
    said = []
    for out in ("one", "two"):
        assert main(["train", *flags, "--steps", "1", "--data", str(files), "--out", str(tmp_path / out)]) == 0
        said.append(capsys.readouterr().err.count("reading data: "))
        assert not (tmp_path / out / "data").exists()
    assert said[0] >= 2 and said[1] == 0
    assert len(list((tmp_path / "cache" / "data").glob("histories-*"))) == 1


def test_a_cache_tells_data_sets_apart_by_what_is_in_them(tmp_path):
    """Unpacked archives may share names, sizes and times."""
    found = []
    for seed in (1, 2):
        folder = generate(tmp_path / str(seed), users=30, items=20, mean_length=10, seed=0)
        for path in folder.glob("*.csv"):
            text = path.read_bytes()
            if seed == 2 and text.count(b"\n") > 2:
                line = text.splitlines()[1]
                text = text.replace(line, line[:-1] + (b"1" if line[-1:] == b"0" else b"0"))
                path.write_bytes(text)
            os.utime(path, ns=(10**18, 10**18))
        open_histories(folder, cache=tmp_path / "cache")
        found.append(len(list((tmp_path / "cache").glob("histories-*"))))
    assert found == [1, 2]


def test_a_file_that_was_changed_where_nobody_looks_is_read_again(tmp_path, monkeypatch):
    """In place, with its old size and time, as some tools leave it."""
    monkeypatch.setattr(reader, "BLOCK", 8)
    folder = generate(tmp_path / "files", users=30, items=20, mean_length=10)
    log = max(folder.rglob("*.csv"), key=lambda path: path.stat().st_size)
    before = open_histories(folder, cache=tmp_path / "cache")
    blocks = [max(0, log.stat().st_size - 8) * i // (reader.BLOCKS - 1) for i in range(reader.BLOCKS)]
    text, written = log.read_bytes(), log.stat().st_mtime_ns
    dropped = next(at for at in range(blocks[1] + 8, blocks[2]) if text[at : at + 1] == b"\n")
    log.write_bytes(text[:dropped] + b" " + text[dropped + 1 :])  # two rows are one that is wrong
    os.utime(log, ns=(written, written))
    after = open_histories(folder, cache=tmp_path / "cache")
    assert len(after.items) < len(before.items)


def test_what_killed_runs_leave_in_the_cache_goes_in_time(tmp_path):
    cache = tmp_path / "cache"
    for name, age in (("killed", 2 * reader.DAY), ("reading", 0), ("still_reading", 2 * reader.DAY)):
        work = cache / f".histories-{name}"
        work.mkdir(parents=True)
        (work / "part0").write_bytes(b"rows")
        for path in (*([] if name == "still_reading" else [work / "part0"]), work):
            os.utime(path, (time.time() - age, time.time() - age))
    open_histories(generate(tmp_path / "files", users=30, items=20, mean_length=10), cache=cache)
    assert sorted(path.name for path in cache.glob(".*")) == [".histories-reading", ".histories-still_reading"]
