"""Some damaged files of every kind; `python -m tests.damage` tries 2,000 of each."""

from __future__ import annotations

import json

import pytest

from .__main__ import tried
from .kinds import KINDS, Kind
from .ways import version

HOW_MANY = {"checkpoint": 70, "cache": 50}
# A cache is never refused; every other kind is at times.
ENDS = {kind: "made anew" if kind == "cache" else "error" for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_an_error_or_made_anew(tmp_path, kind):
    seen = set()
    for number, name, outcome in tried(kind, tmp_path, range(HOW_MANY.get(kind, 60))):
        assert outcome in ("read", "error", "made anew"), (number, name, outcome)
        seen.add(outcome)
    assert ENDS[kind] in seen


def test_what_is_raised_is_a_fault(tmp_path, monkeypatch):
    class Trusting(Kind):
        files = ("file.json",)

        def make(self, folder):
            (folder / "file.json").write_text(json.dumps({"a": [1, 2, 3], "b": {"c": 4}}))

        def read(self, folder):
            assert json.loads((folder / "file.json").read_text())["b"]["c"] == 4
            return "read"

    monkeypatch.setitem(KINDS, "trusting", Trusting)
    outcomes = [outcome for _, _, outcome in tried("trusting", tmp_path, range(20))]
    assert any("Traceback" in outcome for outcome in outcomes)


def test_most_versions_differ_from_the_whole():
    whole = json.dumps({"a": [1, 2, 3], "b": {"c": 4}}).encode()
    assert sum(version(whole, number) != whole for number in range(200)) > 180
