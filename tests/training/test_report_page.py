"""The report page: its model without a browser, hostile text, and the page in one where there is one."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from turbogr_compile import commands as cli
from turbogr_compile.errors import OptionError
from turbogr_compile.show.charts import Axis, Bar, Series, apart, axis, bars, plot
from turbogr_compile.training.report import page_model, read_run, write_report
from turbogr_compile.training.report.page import MOST_POINTS, thinned

_spec = importlib.util.spec_from_file_location("report_runs", Path(__file__).with_name("report_runs.py"))
assert _spec and _spec.loader
report_runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(report_runs)
write_run, HOSTILE = report_runs.write_run, report_runs.HOSTILE

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ARM = {
    "name": "as written", "seconds": 0.04, "exposed": 0.02,
    "blocks": [{"name": "mm", "op": "aten.mm", "stream": "compute", "start": 0, "end": 0.02},
               {"name": "a2a", "op": "all_to_all", "stream": "communication", "start": 0.02, "end": 0.04}],
    "waits": [{"for": "a2a", "stream": "compute", "start": 0.02, "end": 0.04}],
}  # fmt: skip


@pytest.fixture
def runs(tmp_path):
    eager = write_run(tmp_path / "eager", "eager", seconds=0.4, memory=8e8)
    ours = write_run(tmp_path / "turbogr", "turbogr", seconds=0.1, apart=1e-6, memory=2e8)
    return [eager, ours]


class Page(HTMLParser):
    """Tags and texts of a page; balanced, or it would not be one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def written(runs, tmp_path, **more) -> Page:
    return Page(write_report(runs, tmp_path / "out" / "index.html", **more).read_text(encoding="utf-8"))


def test_headline_curves_and_remarks_are_there(runs, tmp_path):
    page = written(runs, tmp_path)
    for said in ("4.00x", "75.0 %", "4.0e-05", "pack-rows", "model.py:16", "120 k dense",
                 "Loss", "How far apart the curves are", "HR@10", "a processor", "Nothing has run on an NPU",
                 "paper-reported", "54.71 %"):  # fmt: skip
        assert said in page.text, said
    labels = {attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg"}
    assert {"Loss of each step", "Distance of the losses from the baseline's", "Peak memory", "HR@10"} <= labels


def test_page_is_one_file_without_scripts(runs, tmp_path):
    page = written(runs, tmp_path)
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "img", "iframe")]
    policy = next(a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert not [a for _, a in page.tags if str(a.get("href", "")).startswith("http")]


def test_hostile_text_stays_text(runs, tmp_path):
    remark = {"kind": HOSTILE, "pass": HOSTILE, "text": HOSTILE, "line": HOSTILE}
    facts = {"name": HOSTILE, "config": {HOSTILE: HOSTILE}, "options": [HOSTILE], "remarks": [remark],
             "passes": [{"graph": HOSTILE, "text": HOSTILE}], "machine": {"cpu": HOSTILE}}  # fmt: skip
    runs.append(write_run(tmp_path / "x", "x", finished=False, facts=facts))
    (runs[-1] / "compared.json").write_text(json.dumps({"text": HOSTILE}))
    page = written(runs, tmp_path, title=HOSTILE)
    assert "img" not in {tag for tag, _ in page.tags} and "script" not in {tag for tag, _ in page.tags}
    assert not [a for _, a in page.tags if "onerror" in a]
    assert page.text.count("onerror=alert(1)") >= 6


def test_one_run_has_no_comparison(runs, tmp_path):
    page = written(runs[1:], tmp_path)
    assert "Against" not in page.text and "How far apart" not in page.text and "items a second" in page.text


def test_a_run_that_failed_says_why(runs, tmp_path):
    bad = write_run(tmp_path / "big", "eager, padded", steps=0, finished=False)
    page = written([bad, runs[1]], tmp_path)
    assert "eager, padded did not finish: out of memory" in re.sub(r"\s+", " ", page.text)


def test_runs_of_one_name_are_told_apart(runs, tmp_path):
    again = write_run(tmp_path / "second", "turbogr")
    names = [r["name"] for r in page_model([read_run(r) for r in (*runs, again)], "t")["runs"]]
    assert names == ["eager", "turbogr (turbogr)", "turbogr (second)"]


def test_settings_that_agree_are_written_once(runs):
    parts = {p["title"]: p for p in page_model([read_run(r) for r in runs], "t")["settings"]}
    rows = {row["key"]: row for row in parts["configuration"]["rows"]}
    assert rows["batch"]["same"] and rows["backend"]["texts"] == ["eager", "turbogr"]


def test_schedule_and_viewer_of_a_dump(runs, tmp_path):
    dump = runs[1] / "dump" / "rank0" / "0.0-forward"
    dump.mkdir(parents=True)
    record = {"graph": "0.0-forward", "steps": [{"name": "overlap", "timeline": {"arms": [ARM]}}, {"name": "x"}]}
    (dump / "record.json").write_text(json.dumps(record))
    (runs[1] / "dump" / "index.html").write_text("viewer")
    page = written(runs, tmp_path)
    assert "turbogr: 0.0-forward, overlap" in {a.get("aria-label") for _, a in page.tags}
    assert "../turbogr/dump/index.html" in {a.get("href") for _, a in page.tags}


def test_long_runs_are_thinned_without_losing_outliers():
    points = [(i, 1.0) for i in range(10_000)]
    points[5_003] = (5_003, 50.0)
    assert len(thinned(points)) <= MOST_POINTS and max(v for _, v in thinned(points, most=True)) == 50.0
    assert thinned(points[:5]) == [(float(i), 1.0) for i in range(5)]


def test_nothing_to_report_is_a_wrong_use(tmp_path):
    with pytest.raises(OptionError, match="at least one"):
        write_report([], tmp_path / "x.html")


def test_command(runs, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert cli.main(["report", *map(str, runs), "--html", str(out)]) == 0
    assert out.exists() and str(out) in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 1
    assert "is no run folder" in capsys.readouterr().err


# --- charts --------------------------------------------------------------------------------------------


def test_axis_is_round_and_holds_all_values():
    found = axis([1.3, 6.9], lambda v: f"{v:g}")
    assert (found.low, found.high) == (0, 8) and [t for _, t in found.ticks] == ["0", "2", "4", "6", "8"]
    assert axis([3.0], str).span > 0 and axis([], str).span > 0
    assert axis([0.2, math.inf, math.nan], str, zero=True).low == 0


def test_a_line_has_gaps_where_values_are_not_finite():
    series = Series("a", [(0, 1.0), (1, math.nan), (2, 3.0), (3, 2.0)])
    drawn = plot("t", [series], Axis(0, 3, []), Axis(0, 4, []), "x")
    assert drawn.count("<polyline") == 2 and "nan" not in drawn


def test_labels_move_apart_and_stay_inside():
    placed = [top for top, _, _ in apart([(100.0, "a", ""), (101.0, "b", ""), (103.0, "c", "")], 14, 110)]
    assert placed == [82, 96, 110]


def test_bars_without_a_length_say_why():
    drawn = bars("t", [Bar("a", 2.0, "2"), Bar("b", None, "does not run")])
    assert drawn.count("<rect") == 1 and "does not run" in drawn


# --- in a browser --------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")
def test_the_page_fits_a_narrow_window(runs, tmp_path):
    """Nothing is wider than the window: tables scroll inside of their frames."""
    page = write_report(runs, tmp_path / "index.html")
    probe = "<script>document.body.dataset.wide = document.documentElement.scrollWidth - innerWidth</script></body>"
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text).replace("</body>", probe)
    (tmp_path / "probe.html").write_text(text, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
               f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,900", "--dump-dom",
               (tmp_path / "probe.html").as_uri()]  # fmt: skip
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    wide = re.search(r'data-wide="(-?\d+)"', dom)
    assert wide and int(wide[1]) <= 0 and dom.count("<svg") == 7
