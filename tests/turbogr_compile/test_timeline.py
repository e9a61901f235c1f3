"""Timelines of schedules: data, text, picture, and their place in dumps and viewer."""

from __future__ import annotations

import xml.etree.ElementTree as xml

import pytest

from turbogr_compile.show.timeline import arm, block, duration, timeline_svg, timeline_text, wait
from turbogr_compile.show.view import page_model


def timeline(name: str = "all_reduce") -> dict:
    compute = [block("mm", "aten.mm", "compute", 0.0, 0.01), block("add", "aten.add", "compute", 0.02, 0.021)]
    beside = [block(name, "all_reduce", "communication", 0.0, 0.02), block("draw", "unique", "host", 0.0, 0.004)]
    return {"estimated": True, "arms": [arm("as it was", 0.021, 0.01, compute + beside, [wait(name, 0.01, 0.02)])]}


def texts(picture: str) -> list[str]:
    return [e.text or "" for e in xml.fromstring(picture).iter() if e.tag.endswith("text")]


def test_a_lane_for_each_stream_that_is_used_and_a_mark_for_what_is_exposed():
    shown = texts(timeline_svg(timeline()))
    assert {"compute", "communication", "host", "waits 10 ms", "estimated, not measured"} <= {*shown}
    assert "as it was: 21 ms (estimated), of which compute waits 10 ms" in shown


@pytest.mark.parametrize("name", ["<script>", 'a"b&c', "\x00"], ids=["tag", "quotes", "control"])
def test_names_are_text(name):
    xml.fromstring(timeline_svg(timeline(name)))


def test_the_text_says_the_same():
    lines = timeline_text(timeline()).splitlines()
    assert lines[0] == "Estimated, not measured." and any("waits for all_reduce" in line for line in lines)


def test_short_neighbours_are_one_block():
    many = [block(f"op{i}", "aten.add", "compute", i * 1e-4, (i + 1) * 1e-4) for i in range(1000)]
    (made,) = {"arms": [arm("x", 0.1, 0.0, many, [])]}["arms"]
    assert len(made["blocks"]) <= 300 and made["blocks"][-1]["end"] == many[-1]["end"]


@pytest.mark.parametrize("seconds, text", [(0, "0"), (2.5, "2.5 s"), (0.0198, "19.8 ms"), (3e-6, "3 µs")])
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_the_viewer_gets_a_picture_and_rows():
    step = {"number": 1, "name": "overlap", "status": "changed", "snapshot": 0, "rewrites": [], "near_misses": [],
            "timeline": timeline()}  # fmt: skip
    record = {"graph": "0.0-forward", "role": "forward", "nodes": [], "lines": [], "snapshots": [[]], "steps": [step],
              "remarks": [], "order": {"passes": [], "edges": []}}  # fmt: skip
    model = page_model([record], {})
    (shown,) = model["graphs"][0]["timelines"]
    assert "waits 10 ms" in model["pictures"][shown["picture"]]
    assert [(b["name"], round(b["exposed"], 6)) for b in shown["beside"]] == [("all_reduce", 0.01), ("draw", 0)]
    assert "timeline" not in model["graphs"][0]["steps"][0], "stored once"
