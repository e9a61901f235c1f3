"""What a run will need, before it runs."""

from __future__ import annotations

import json

import pytest

from turbogr_compile.commands import main
from turbogr_compile.training import needs
from turbogr_compile.training.config import Config
from turbogr_compile.training.needs import GIB, Needs

CATALOGUE = 32_000_000


def needed(**settings) -> Needs:
    return needs.needs(Config.read({"dim": 64, "heads": 2} | settings), CATALOGUE)


def test_a_large_catalogue_is_its_table():
    found = needed()
    assert found.always["item table"] == (CATALOGUE + 1) * 64 * 4
    assert found.largest == "item table" and 7.7 < found.memory / GIB < 8
    assert found.disk == pytest.approx(3 * (CATALOGUE + 1) * 65 * 4, rel=0.01)
    shared = needs.needs(Config.read({"dim": 64, "heads": 2, "evaluate_users": 0}), CATALOGUE, ranks=4)
    assert shared.always["item table"] == pytest.approx(found.always["item table"] / 4, rel=1e-6)
    few = [needs.needs(Config.read({"dim": 64, "heads": 2}), 10, ranks).disk for ranks in (1, 4)]
    assert few[0] > 10_000 and few[1] == pytest.approx(few[0], rel=0.05)  # dense parameters are stored once


def test_long_histories_are_activations():
    assert needed(evaluate_users=0, max_len=8192, batch=64, layers=8).largest == "activations and gradients of rows"
    packed, eager = needed(evaluate_users=0, max_len=1024), needed(evaluate_users=0, max_len=1024, backend="eager")
    assert eager.memory > packed.memory


def test_what_does_not_fit_says_what_to_change():
    found = needed(evaluate_users=0)
    assert not needs.problems(found, 100 * GIB, 100 * GIB)
    (memory,) = needs.problems(found, GIB, 100 * GIB)
    assert memory.startswith("this does not fit: most is item table; try a smaller --dim")
    assert needs.problems(found, None, GIB) == ["checkpoints do not fit: another --out, or --save-every 0"]
    many = needed(evaluate_users=40_000_000)
    assert "--evaluate-users 0" in needs.problems(many, GIB, 1000 * GIB)[0] and many.largest == "an evaluation"


def test_the_command_plans_and_allocates_nothing(tmp_path, capsys):
    flags = ["--users", "60", "--items", "50", "--mean-length", "8", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["plan", *flags, "--ranks", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["catalogue"] <= 50 and found["ranks"] == 2 and found["memory"] > 0
    assert main(["plan", *flags]) == 0
    assert "GiB  item table" in capsys.readouterr().out
    assert main(["plan", *flags, "--ranks", "2"]) == 0
    assert "in memory, for each of 2 processes" in capsys.readouterr().out
    for wrong in ("0", "-2"):
        assert main(["plan", *flags, "--ranks", wrong]) == 2
        assert f"--ranks must be at least 1, not {wrong}" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_files_that_a_container_has_read_can_be_given_up(tmp_path, monkeypatch):
    """Reading data fills what a container may have: that is no reason to say that nothing fits."""
    for name, text in (
        ("max", str(GIB)),
        ("current", str(GIB)),
        ("stat", f"anon {GIB // 4}\ninactive_file {GIB // 2}"),
    ):
        (tmp_path / f"memory.{name}").write_text(f"{text}\n")
    monkeypatch.setattr(needs, "CONTAINER", tmp_path)
    assert needs.available() == GIB / 2
    (tmp_path / "memory.max").write_text("max\n")
    assert needs.available() != GIB / 2


def test_a_copy_in_fp16_is_counted_where_one_is_kept():
    plain, half = needed(), needed(features="half")
    assert half.memory - plain.memory == pytest.approx((CATALOGUE + 1) * (64 * 2 + 1))
    there = needs.needs(Config.read({"features": "half"}), CATALOGUE, ranks=2).always
    assert "a copy of the table in FP16" not in there


def test_an_evaluation_needs_no_memory_for_scores():
    of = [needs.needs(Config.read({"size": "base"}), items).moments["an evaluation"] for items in (1000, CATALOGUE)]
    assert of[0] == of[1] < 2**21
