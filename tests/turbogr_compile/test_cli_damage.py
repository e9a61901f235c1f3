"""The command line, given damaged files and wrong arguments: one line and the right exit status, never a traceback."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from turbogr_compile.commands import main

from .test_files import damaged

TINY = Path(__file__).parent.parent / "training" / "bench_tiny.json"


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """A dump of a small graph."""
    root = tmp_path_factory.mktemp("dump") / "dump"
    torch._dynamo.reset()
    step = torch.compile(lambda x: (x * 2).relu().sum(), backend="turbogr", options={"dump": str(root)})
    step(torch.ones(3, 4))
    torch._dynamo.reset()
    return root


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


def twisted(data, number):
    """JSON that is well-formed, and in which one value is another."""
    chance = random.Random(number)
    data = json.loads(json.dumps(data))
    at = data
    for _ in range(chance.randrange(1, 6)):
        inner = list(at.items()) if isinstance(at, dict) else list(enumerate(at))
        if not inner:
            break
        key, value = chance.choice(inner)
        if not isinstance(value, (dict, list)) or chance.random() < 0.3:
            others = [None, -1, 2**70, float("nan"), "x", [], {}, [None], {"a": 1}, True]
            if chance.random() < 0.2 and isinstance(at, dict):
                del at[key]
            else:
                at[key] = chance.choice(others)
            break
        at = value
    return data


def versions(path: Path, count: int):
    """The file damaged in many ways: its bytes, and its values."""
    text = path.read_bytes()
    for number in range(count):
        yield damaged(text, number) if number % 2 else json.dumps(twisted(json.loads(text), number)).encode()


@pytest.mark.parametrize("name", ["run.json", "rank0/*/record.json"])
def test_damaged_dumps(dumped, tmp_path, capfd, name):
    root = tmp_path / "dump"
    shutil.copytree(dumped, root)
    (path, *_) = root.glob(name)
    seen = set()
    for content in versions(path, 80):
        path.write_bytes(content)
        seen.add(outcome(capfd, "view", root))
        seen.add(outcome(capfd, "diff", root, dumped))
    assert 2 in seen


def test_damaged_results_of_a_benchmark(tmp_path, capfd):
    path = tmp_path / "bench.json"
    shutil.copy(TINY, path)
    assert outcome(capfd, "bench", "--from", path) in (0, 1)
    seen = set()
    for content in versions(TINY, 160):
        path.write_bytes(content)
        seen.add(outcome(capfd, "bench", "--from", path))
    assert 2 in seen


def test_damaged_calibrations(tmp_path, capfd):
    from turbogr_compile.simulator.calibration import SHIPPED

    path = tmp_path / "costs.json"
    for content in versions(SHIPPED, 60):
        path.write_bytes(content)
        outcome(capfd, "simulate", "--costs", path, "--devices=8", "--steps=1", "--layers=1", "--variant=naive")


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
