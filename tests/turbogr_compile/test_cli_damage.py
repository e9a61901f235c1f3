"""The command line, given wrong arguments and files that are not there: one line and the right exit status, never a
traceback. What it makes of damaged files is in tests/damage.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import pytest

from turbogr_compile.commands import COMMANDS, main


def outcome(capfd, *words) -> int:
    """The exit status. What is wrong is said in one line of its own."""
    try:
        status = main(list(map(str, words)))
    except SystemExit as ended:  # argparse
        status = ended.code
    said = capfd.readouterr().err
    assert status in (0, 1, 2), (words, status)
    assert "Traceback" not in said
    if status == 2:
        assert [line for line in said.splitlines() if line.startswith("turbogr")], (words, said)
    return status


def test_files_that_are_not_there(tmp_path, capfd):
    (tmp_path / "file").write_text("")
    for words in (
        ("view", tmp_path / "none"),
        ("view", tmp_path / "file"),
        ("diff", tmp_path, tmp_path / "none"),
        ("bench", "--from", tmp_path / "none"),
        ("bench", "--from", tmp_path),
        ("report", tmp_path / "none"),
        ("simulate", "--costs", tmp_path / "none"),
        ("simulate", "--costs", tmp_path),
    ):
        assert outcome(capfd, *words) in (1, 2), words


WRONG = ("", "x", "-1", "0", "nan", "inf", "-inf", "1e999", "99999999999999999999", "1.5", "\x00", "é" * 300)


RIGHT = {"seed": "0", "negatives": "0 1.5", "jitter": "0 1.5"}


@pytest.mark.parametrize(
    "flag", ["steps", "sequences", "longest", "layers", "width", "negatives", "seed", "devices", "jitter", "soc"]
)
def test_wrong_numbers_of_a_simulation(capfd, flag):
    for value in WRONG:
        if value not in RIGHT.get(flag, "").split():
            assert outcome(capfd, "simulate", "--devices", "8", "--steps", "1", f"--{flag}={value}") == 2, value


def test_wrong_commands(capfd):
    for words in ((), ("",), ("nothing",), ("view",), ("diff", "a"), ("--wrong",), ("run", "nowhere.py:f")):
        assert outcome(capfd, *words) == 2, words


# What each command is asked for beside the flag in question: something that is not there, so that nothing is computed.
ABSENT = {
    "bench": ("--from", "nowhere.json"), "bisect": ("nowhere.py:f",), "cost": ("nothing",),
    "diff": ("nowhere", "there"), "doctor": ("nothing",), "explain": ("nowhere.py:f",),
    "passes": ("--pipeline", "nothing"), "plan": ("--data", "nowhere"), "report": ("nowhere",),
    "run": ("nowhere.py:f",), "simulate": ("--costs", "nowhere"), "train": ("--data", "nowhere"), "view": ("nowhere",),
}  # fmt: skip


def flags(name: str) -> list[argparse.Action]:
    parser = argparse.ArgumentParser()
    COMMANDS.find(name).arguments(parser)
    return [action for action in parser._actions if action.option_strings and action.dest != "help"]


@pytest.mark.parametrize("letters", ["ascii", "utf-8"])
def test_what_a_terminal_cannot_show(tmp_path, monkeypatch, letters):
    """Letters that are none of its own, and text that is none of UTF-8."""
    results = json.loads((Path(__file__).parents[1] / "training" / "bench_tiny.json").read_text())
    results["machine"] = {name: "\ud800 é" for name in results["machine"]}
    (tmp_path / "bench.json").write_text(json.dumps(results))
    shown = io.TextIOWrapper(io.BytesIO(), letters)
    monkeypatch.setattr(sys, "stdout", shown)
    status = main(["bench", "--from", str(tmp_path / "bench.json")])
    shown.flush()
    assert status == 0 and b"\\ud800" in shown.buffer.getvalue()


@pytest.mark.parametrize("value", [60_000 * "[", 5000 * "1", "NaN", "{"])
def test_values_of_a_target_that_are_no_json_are_text(value):
    from turbogr_compile.commands.common.model import _target_options

    assert list(_target_options([f"a={value}"])) == ["a"]


def test_every_command_is_here():
    assert set(ABSENT) == set(COMMANDS.names())


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_every_flag_with_every_wrong_value(capfd, tmp_path, monkeypatch, name):
    """Whatever is wrong first: it is said in a line."""
    monkeypatch.chdir(tmp_path)
    assert outcome(capfd, name, *ABSENT[name]) in (1, 2)
    for action in flags(name):
        flag = action.option_strings[-1]
        if action.nargs == 0:
            assert outcome(capfd, name, flag, *ABSENT[name]) in (1, 2), flag
            assert outcome(capfd, name, f"{flag}=1", *ABSENT[name]) == 2, flag
            continue
        assert outcome(capfd, name, *ABSENT[name], flag) == 2, flag
        for value in WRONG:
            assert outcome(capfd, name, f"{flag}={value}", *ABSENT[name]) in (1, 2), (flag, value)


@pytest.mark.parametrize("flag", ["sequences", "longest", "heads", "head-dim", "fill", "soc", "dtype"])
def test_wrong_numbers_of_a_projection(capfd, flag):
    for value in ("", "x", "-1", "0", "nan", "inf", "1e999", "\x00", "é" * 300):
        assert outcome(capfd, "cost", f"--{flag}={value}") in (1, 2), value


@pytest.mark.parametrize("flag", ["dim", "steps", "batch", "lr", "dropout", "seed", "storage", "features", "model"])
def test_wrong_settings_of_a_run(capfd, tmp_path, flag):
    """Named before anything is made."""
    for value in ("x", "-1", "nan", "1e999", "\x00"):
        if (flag, value) != ("seed", "-1"):
            assert outcome(capfd, "train", "--out", tmp_path / "run", f"--{flag}={value}") == 2, value
    assert not (tmp_path / "run").exists()
