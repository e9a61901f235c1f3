"""Dumps: complete, deterministic, safe; and never a reason for training to stop."""

from __future__ import annotations

import errno
import json
import os
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import turbogr_compile
from turbogr_compile import files
from turbogr_compile.show import dump as dump_module


def step(x, w):
    h = (x.float() * 1.0) @ w
    mask = torch.tril(torch.ones(4, 4, dtype=torch.bool))
    return (h * mask).relu().sum()


def arguments():
    torch.manual_seed(0)
    return torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)


def compiled(directory: Path, **options):
    """Compile and run one step; the directory object of an earlier test must not be remembered."""
    dump_module.open_directory.cache_clear()
    torch._dynamo.reset()
    options = {"codegen": "aten", "dump": directory, **options}
    return turbogr_compile.compile(step, **options)(*arguments())


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


def graph_folder(directory: Path) -> Path:
    (found,) = (directory / "rank0").glob("*-captured")
    return found


def test_layout_is_complete(tmp_path):
    compiled(tmp_path / "d").backward()
    folder = graph_folder(tmp_path / "d")
    names = {p.name for p in folder.iterdir()}
    assert {"000-input.txt", "summary.txt", "record.json", "repro.py"} <= names
    assert {f"004-fold-masks.{kind}" for kind in ("txt", "diff", "json", "svg", "dot")} <= names
    assert not any("eliminate-dead-code" in n for n in names)  # it changed nothing
    summary = (folder / "summary.txt").read_text()
    assert "eliminate-dead-code    unchanged" in summary
    roles = {p.name.split("-")[1] for p in (tmp_path / "d" / "rank0").iterdir() if p.is_dir()}
    assert roles == {"captured", "joint", "forward", "backward"}
    run = json.loads((tmp_path / "d" / "run.json").read_text())
    assert run["writer"] == "turbogr" and "fold-masks" in run["pipeline"] and len(run["key"]) == 64
    assert (tmp_path / "d" / "index.html").stat().st_size > 1000


def test_text_has_user_lines_and_no_trace_of_the_machine(tmp_path):
    compiled(tmp_path / "d")
    folder = graph_folder(tmp_path / "d")
    text = (folder / "000-input.txt").read_text()
    assert "test_dump.py:" in text and "h = (x.float() * 1.0) @ w" in text
    for file in folder.iterdir():
        assert str(Path.home()) not in file.read_text() and "0x7" not in file.read_text(), file


def test_two_runs_write_the_same_text(tmp_path):
    for name in ("a", "b"):
        compiled(tmp_path / name)
    a, b = graph_folder(tmp_path / "a"), graph_folder(tmp_path / "b")
    assert a.name == b.name
    for file in sorted(a.iterdir()):
        if file.name != "record.json":  # holds times
            assert file.read_text() == (b / file.name).read_text(), file.name


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return (self.linear(x) * 1.0).relu().sum()


@pytest.mark.parametrize("writes", [False, True], ids=["pure", "writes a buffer"])
def test_every_repro_runs(tmp_path, capsys, writes):
    if writes:
        dump_module.open_directory.cache_clear()
        torch._dynamo.reset()
        turbogr_compile.compile(Counting(), codegen="aten", dump=tmp_path / "d")(torch.randn(3, 4)).backward()
    else:
        compiled(tmp_path / "d").backward()
    files = sorted((tmp_path / "d" / "rank0").glob("*/repro.py"))
    assert [f.parent.name.split("-")[1] for f in files] == ["backward", "captured", "forward", "joint"]
    for file in files:
        runpy.run_path(str(file), run_name="__main__")
    assert "remove-noops" in capsys.readouterr().out


def test_second_run_replaces_its_own_files_and_keeps_the_users(tmp_path):
    directory = tmp_path / "d"
    compiled(directory)
    folder = graph_folder(directory)
    (folder / "notes.txt").write_text("mine")
    stale = folder / "004-fold-masks.txt"
    assert stale.exists()
    compiled(directory, without=["fold-masks"])
    assert (folder / "notes.txt").read_text() == "mine"
    assert not stale.exists()


def test_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.warns(UserWarning, match="holds files that turbogr did not write"):
        loss = compiled(tmp_path)
    loss.backward()
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "d").write_text("")
    with pytest.warns(UserWarning, match="is a file"):
        assert compiled(tmp_path / "d").isfinite()


def test_directory_that_cannot_be_made(tmp_path, monkeypatch):
    def mkdir(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.warns(UserWarning, match="Read-only file system"):
        assert compiled(tmp_path / "d").isfinite()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_disk_that_fails_while_dumping_gives_one_warning_and_training_goes_on(tmp_path, monkeypatch, code):
    real, calls = files._write, []

    def write(file, data):
        calls.append(file)
        if len(calls) > 3:
            raise OSError(code, os.strerror(code))
        return real(file, data)

    monkeypatch.setattr(files, "_write", write)
    with pytest.warns(UserWarning) as caught:
        loss = compiled(tmp_path / "d")
        loss.backward()
    (warning,) = [w for w in caught if "turbogr" in str(w.message)]
    assert os.strerror(code) in str(warning.message) and "training goes on" in str(warning.message)
    assert str(tmp_path / "d") in str(warning.message)
    assert len(calls) == 4  # gave up at the first failure
    assert not list((tmp_path / "d").rglob(".*"))  # no half-written files


def test_fault_of_the_recorder_is_not_the_passes(tmp_path, monkeypatch):
    from turbogr_compile import _torch
    from turbogr_compile.graph import costs

    monkeypatch.setattr(costs, "cost", lambda graph: 1 / 0)
    monkeypatch.setattr(_torch, "trace_enabled", lambda: False)  # pytest's log handler counts as a trace
    with pytest.warns(UserWarning, match="no pass dumps: ZeroDivisionError") as caught:
        compiled(tmp_path / "d").backward()
    assert len([w for w in caught if "turbogr" in str(w.message)]) == 1


def test_every_rank_has_a_folder_of_its_own(tmp_path, monkeypatch):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        compiled(tmp_path / "d")
    assert {p.name for p in (tmp_path / "d").glob("rank*")} == {"rank0", "rank1"}


def test_torch_trace_gets_the_same_artifacts(tmp_path):
    program = (
        "import torch\n"
        "fn = lambda x: ((x * 1.0) @ x).sum()\n"
        "torch.compile(fn, backend='turbogr', options={'codegen': 'aten'})(torch.randn(4, 4))\n"
    )
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path), "TORCH_LOGS": "+turbogr_compile"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert "0.0-captured: 001 remove-noops changed" in done.stderr
    (log,) = tmp_path.glob("*.log")
    text = log.read_text()
    for name in ("turbogr.0.0-captured.000.input.txt", "001.remove-noops.diff", "turbogr.0.0-captured.json"):
        assert name in text
