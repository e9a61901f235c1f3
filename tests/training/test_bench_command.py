"""`turbogr bench`: figures, failures, files, wrong names. What is run here are stand-ins that take no time."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from turbogr_compile import commands as cli
from turbogr_compile.training.bench import command, readers, run, views
from turbogr_compile.training.bench.catalogue import Benchmark, Claim
from turbogr_compile.training.report import words

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
RECORDED = Path(__file__).with_name("bench_tiny.json")
GOOD = "import json, sys; open(sys.argv[sys.argv.index('--json') + 1], 'w').write(json.dumps({'x': 2.0}))"
BAD = "import sys; print('some output'); raise ValueError('the <b>reason</b>')"
SILENT = "pass"


def claim(id: str, **more) -> Claim:
    return Claim(id, f"what {id} is / turbogr", readers.at("x"), words.factor, "README.md", **more)


@pytest.fixture
def benchmarks(tmp_path, monkeypatch):
    for name, text in (("good.py", GOOD), ("bad.py", BAD), ("silent.py", SILENT)):
        (tmp_path / name).write_text(text)
    known = (
        Benchmark("broken", "one that fails", "bad.py", (), (), (claim("broken-one"),)),
        Benchmark("fine", "one that works", "good.py", (), ("--more",), (claim("fine-one", paper="2.2x"),)),
        Benchmark("mute", "one that writes nothing", "silent.py", (), (), (claim("mute-one"),)),
        Benchmark("other", "one with other figures", "good.py", (), (),
                  (Claim("other-one", "y", readers.at("y"), words.factor, "README.md"),)),
    )  # fmt: skip
    monkeypatch.setattr(run, "SCRIPTS", tmp_path)
    monkeypatch.setattr(run, "BENCHMARKS", known)
    return known


def test_a_failing_benchmark_says_why_and_the_others_run(benchmarks, tmp_path, capsys):
    into, page = tmp_path / "new" / "bench.json", tmp_path / "bench.html"
    status = cli.main(["bench", "--size", "tiny", "--json", str(into), "--html", str(page)])
    out, err = capsys.readouterr()
    assert status == 1 and "2.00x" in out and "[4/4]" in err
    found = {b["name"]: b for b in json.loads(into.read_text())["benchmarks"]}
    assert list(found) == ["broken", "fine", "mute", "other"]
    assert found["broken"]["error"] == "bad.py ended with status 1: ValueError: the <b>reason</b>"
    assert "wrote no JSON" in found["mute"]["error"]
    assert "cannot read other-one" in found["other"]["error"] and found["other"]["data"] == {"x": 2.0}
    assert found["fine"]["error"] is None and found["fine"]["claims"][0]["value"] == 2.0
    text = page.read_text()
    assert "the &lt;b&gt;reason&lt;/b&gt;" in text and "<script" not in text and "http://" not in text
    assert "mean nothing" in out and "mean nothing" in text


def test_only_by_name_or_by_claim(benchmarks, capsys):
    assert cli.main(["bench", "--size", "tiny", "--only", "fine"]) == 0
    assert cli.main(["bench", "--size", "tiny", "--only", "fine-one"]) == 0
    out = capsys.readouterr().out
    assert "broken" not in out and out.count("2.00x") == 2


def test_some_are_measured_again_and_the_others_stay(benchmarks, tmp_path, capsys):
    into = tmp_path / "bench.json"
    again = ["bench", "--size", "tiny", "--only", "fine", "--json", str(into), "--keep"]
    assert cli.main(["bench", "--size", "tiny", "--json", str(into)]) == 1
    (tmp_path / "good.py").write_text(GOOD.replace("2.0", "3.0"))
    assert cli.main(again) == 1  # of those that stay, some had failed
    found = json.loads(into.read_text())["benchmarks"]
    assert [b["name"] for b in found] == ["broken", "fine", "mute", "other"]
    assert [b["data"] for b in found] == [None, {"x": 3.0}, None, {"x": 2.0}]
    other = {**json.loads(into.read_text()), "machine": {}}
    into.write_text(json.dumps(other))
    assert cli.main(again) == 2 and "another machine" in capsys.readouterr().err
    assert cli.main(["bench", "--keep"]) == 2 and "--json FILE --keep" in capsys.readouterr().err


def test_a_wrong_name_is_answered_with_the_closest(benchmarks, capsys):
    assert cli.main(["bench", "--only", "fnie"]) == 2
    err = capsys.readouterr().err
    assert "no benchmark is named 'fnie' (did you mean 'fine'?)" in err and "there are broken, fine" in err


def test_markdown_is_a_table_with_kind_and_paper(benchmarks, capsys):
    cli.main(["bench", "--size", "tiny", "--only", "fine", "--markdown"])
    lines = capsys.readouterr().out.splitlines()
    assert "| what fine-one is / turbogr | 2.00x | measured | 2.2x |" in lines
    assert {line.count("|") for line in lines if line.startswith("|")} == {5}


def test_earlier_results_are_shown_without_measuring(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "run", lambda *_: pytest.fail("measured"))
    cli.main(["bench", "--from", str(RECORDED), "--markdown"])
    out = capsys.readouterr().out
    assert "| simulated |" in out and "| measured |" in out
    cli.main(["bench", "--from", str(RECORDED), "--only", "balance"])
    assert "overlap" not in capsys.readouterr().out
    (tmp_path / "x.json").write_text("{}")
    assert cli.main(["bench", "--from", str(tmp_path / "x.json")]) == 2
    assert cli.main(["bench", "--from", str(tmp_path / "nowhere.json")]) == 2


def test_a_benchmark_that_never_ends_is_ended(benchmarks, tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("import time; time.sleep(600)")
    monkeypatch.setitem(run.LONGEST, "tiny", 0.5)
    found = run.run_one(benchmarks[1], "tiny", run._Processes())
    assert "took longer than" in found["error"] and "was ended" in found["error"]


def test_after_an_interruption_nothing_more_is_started(benchmarks):
    processes = run._Processes()
    processes.end()
    assert processes.run([sys.executable, "-c", "raise SystemExit(7)"], Path(), 5.0, {})[0] is None


def test_last_words():
    assert run.last_words("Traceback\n  File\nValueError: x\n\n") == "ValueError: x" and run.last_words(" \n") == ""


def test_readme_table_is_the_recorded_one():
    """Where README.md has the generated table, it is what the catalogue makes of docs/measured.json."""
    root = Path(__file__).resolve().parents[2]
    found = re.search(r"<!-- turbogr bench -->\n(.*?)<!-- end -->", (root / "README.md").read_text(), re.S)
    recorded = root / "docs" / "measured.json"
    assert found is not None and found[1].strip() == views.markdown(command.read(recorded)).strip()


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_the_page_in_a_browser(tmp_path):
    page = tmp_path / "bench.html"
    page.write_text(views.page(command.read(RECORDED)), encoding="utf-8")
    command_line = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
                    f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]  # fmt: skip
    dom = subprocess.run(command_line, capture_output=True, text=True, timeout=120, check=True).stdout
    assert "<svg" in dom and "simulated" in dom and "54.71" in dom
