"""`turbogr simulate`: text, data, page; wrong arguments are one clear message."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from turbogr_compile import commands as cli

SMALL = ["--devices", "8,16", "--steps", "1", "--sequences", "2", "--longest", "256", "--width", "128", "--layers", "2"]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["simulate", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_text(capsys):
    status, out, _ = run(capsys, *SMALL)
    assert status == 0 and "Simulated, not measured" in out
    for wanted in ("naive", "+ prefetch", "+ overlap", "+ balanced", "+ semi-async", "paper-reported", "vendor"):
        assert wanted in out


def test_json_twin(capsys):
    status, out, _ = run(capsys, *SMALL, "--json", "--variant", "naive", "--variant", "balanced+overlap")
    data = json.loads(out)
    assert status == 0 and [v["name"] for v in data["variants"]] == ["naive", "balanced+overlap"]
    assert [o["devices"] for o in data["outcomes"]] == [8, 16, 8, 16]


def test_figures_can_be_replaced(capsys):
    _, out, _ = run(capsys, *SMALL, "--json", "--jitter", "0", "--link-efficiency", "0.9", "--lengths", "equal")
    known = {a["name"]: a for a in json.loads(out)["assumptions"]}
    assert known["jitter"]["value"] == 0 and known["jitter"]["provenance"] == "chosen"
    assert known["link efficiency"]["value"] == 0.9


def test_page(capsys, tmp_path):
    page = tmp_path / "scaling.html"
    status, out, _ = run(capsys, *SMALL, "--html", str(page))
    assert status == 0 and str(page) in out and page.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_the_page_in_a_browser(capsys, tmp_path):
    page = tmp_path / "scaling.html"
    run(capsys, *SMALL, "--html", str(page))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
               f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    assert dom.count("<svg") == 4 and "semi-async" in dom


def test_calibrating_writes_a_file_that_a_simulation_reads(capsys, tmp_path, monkeypatch):
    from turbogr_compile.simulator import calibration

    small = calibration.measure_here(sizes=(8, 24, 40), head_dim=16, seconds=0.0)
    monkeypatch.setattr(calibration, "measure_here", lambda: small)
    path = tmp_path / "here.json"
    status, out, _ = run(capsys, "--calibrate", "here", "--costs", str(path))
    assert status == 0 and "measured" in out and path.exists()
    status, out, _ = run(capsys, *SMALL, "--costs", str(path), "--variant", "naive")
    assert status == 0 and out.startswith("here,") and "timed here" in out


WRONG = {
    "devices text": (["--devices", "8;16"], "numbers with commas"),
    "devices zero": (["--devices", "0"], "not between 1 and"),
    "devices nodes": (["--devices", "12"], "do not fill nodes of 8"),
    "variant": (["--variant", "prefetch+overlp"], "did you mean 'overlap'"),
    "soc": (["--soc", "910B9"], "'910B9' is no device"),
    "lengths": (["--lengths", "normal"], "one of log-normal"),
    "width": (["--width", "0"], "--width must be at least 1 "),
    "steps": (["--steps", "0"], "--steps must be at least 1"),
    "seed": (["--seed", "-1"], "--seed must be at least 0"),
    "negatives": (["--negatives", "-1"], "--negatives must be at least 0"),
    "jitter": (["--jitter", "-0.1"], "--jitter must be at least 0"),
    "share": (["--link-efficiency", "1.5"], "--link-efficiency is a share"),
    "costs": (["--costs", "nowhere.json"], "nowhere.json is no calibration"),
    "html": (["--html", "no/such/place/page.html"], "no directory"),
    "calibrate": (["--calibrate", "here"], "name it with --costs"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_one_message(capsys, case):
    arguments, text = WRONG[case]
    status, out, err = run(capsys, *arguments)
    message = [line for line in err.splitlines() if line.startswith("turbogr: ")]
    assert status == 2 and out == "" and len(message) == 1 and text in message[0]
