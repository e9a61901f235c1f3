"""The viewer: its data model without a browser, and the page itself in one where there is one."""

from __future__ import annotations

import base64
import copy
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from turbogr_compile.errors import TurbogrError
from turbogr_compile.graph.phases import Phase, Role
from turbogr_compile.graph.provenance import Origin, inherit, line_of
from turbogr_compile.pipeline.remarks import Remark, RemarkKind
from turbogr_compile.show import view
from turbogr_compile.show.record import Recorder

HOSTILE = 'x = "</script><img src=x onerror=alert(1)>"  # <!--<script>'
MODEL = f"""\
import torch

def norm(x, w, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w

def model(x, w, proj):
    total = x.sum(-1)
    h = norm(x, w, 1e-6)
    h = h.transpose(0, 1).transpose(0, 1)
    y = torch.relu(h @ proj)
    z = norm(y, w, 1e-6) + h
    q = norm(z, w, 1e-5)
    return q.sum(-1) + total, y

{HOSTILE}
"""
# Line of the model for each run of nodes, by the first node of the run.
LINES = {"sum_1": 7, "pow_1": 8, "transpose": 9, "mm": 10, "pow_2": 11, "pow_3": 12, "sum_2": 13, "add_4": 15}
RUN = {
    "writer": "turbogr", "format": 1, "torch": "2.13.0", "turbogr": "0.1.0", "key": "5e1f",
    "pipeline": "fold-views, fuse-rms-norm, pack-jagged{multiple=16}, reorder, offload, quantize",
    "options": {"target": "cpu", "dump": "turbogr_dump"}, "legend": "0.0: frame 0, first compilation",
}  # fmt: skip


def site(name: str) -> str:
    return f"passes/{name.replace('-', '_')}.py:12"


class Story:
    """Runs hand-made passes over a traced model and records them as the compiler would."""

    def __init__(self, source: Path, role: Role = Role.CAPTURED) -> None:
        spec = importlib.util.spec_from_file_location("model_under_view", source)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sizes = torch.randn(8, 64), torch.randn(64), torch.randn(64, 64)
        self.graph = make_fx(module.model, tracing_mode="symbolic")(*sizes).graph
        line = 7
        for node in self.graph.nodes:
            line = LINES.get(node.name, line)
            if node.op == "call_function":
                node.meta["stack_trace"] = f'  File "{source}", line {line}, in model'
        self.recorder = Recorder("0.0", role.value)
        self.step("input", "input")

    @property
    def record(self) -> dict:
        return self.recorder.data

    def node(self, name: str) -> fx.Node:
        return next(n for n in self.graph.nodes if n.name == name)

    def step(self, name: str, status: str, reason: str = "", rewrites=(), misses=(), stats=None, summary: str = ""):
        self.record["steps"].append({
            "number": len(self.record["steps"]), "name": name, "spec": name, "summary": summary, "reason": reason,
            "phase": "" if status == "input" else Phase.PRE_GRAD.value, "site": site(name),
            "status": status, "snapshot": self.recorder.snapshot(self.graph), "rewrites": list(rewrites),
            "near_misses": list(misses), "seconds": 0.00123, "stats": stats or {},
        })  # fmt: skip

    def rewrite(self, name: str, sources: list[str], edit) -> dict:
        """One edit; `edit` returns the new nodes."""
        old = [self.node(s) for s in sources]
        names = {n.name for n in self.graph.nodes}
        line = line_of(old[-1])
        added = edit(*old)
        for node in added:
            inherit(node, old, Origin(name, name, tuple(sources)))
        removed = sorted(names - {n.name for n in self.graph.nodes})
        return {
            "rule": name, "site": site(name), "removed": removed,
            "added": [n.name for n in added], "snapshot": self.recorder.snapshot(self.graph),
            "line": self.recorder.line(line),
        }  # fmt: skip

    def replace(self, target, args, *old: fx.Node) -> list[fx.Node]:
        with self.graph.inserting_before(old[-1]):
            new = self.graph.call_function(target, args)
        new.meta["val"] = old[-1].meta["val"]
        old[-1].replace_all_uses_with(new)
        for node in reversed(old):
            self.graph.erase_node(node)
        return [new]


def tell(source: Path) -> dict:
    """A record with every kind of step: fires, moves, stays, is skipped, fails; near misses and remarks."""
    story = Story(source)
    rms = torch.ops.aten.rms_norm.default

    def fold(first: fx.Node, second: fx.Node) -> list[fx.Node]:
        second.replace_all_uses_with(first.args[0])
        story.graph.erase_node(second)
        story.graph.erase_node(first)
        return []

    def fuse(*old: fx.Node) -> list[fx.Node]:
        return story.replace(rms, (old[0].args[0], [64], story.node("w_1"), 1e-6), *old)

    done = story.rewrite("fold-views", ["transpose", "transpose_1"], fold)
    story.step("fold-views", "changed", rewrites=[done], summary="Remove views that undo each other.", stats={
        "nodes": [30, 28], "flops": ["2*s75*s96**2 + 12*s75*s96"] * 2, "flops_value": [71680, 71680],
        "bytes": ["64*s75*s96", "48*s75*s96"], "bytes_value": [32768, 24576], "ops": {"aten.transpose.int": -2},
    })  # fmt: skip
    norms = ("pow_1 mean add rsqrt mul mul_1", "pow_2 mean_1 add_1 rsqrt_1 mul_2 mul_3")
    rewrites = [story.rewrite("fuse-rms-norm", names.split(), fuse) for names in norms]
    near = {
        "rule": "fuse-rms-norm", "site": "passes/fuse_rms_norm.py:12", "node": "mul_5",
        "line": story.recorder.line(line_of(story.node("mul_5"))), "matched": 6, "total": 6,
        "obstacles": [{"kind": "literal", "text": "wants 1e-06, found 1e-05", "node": "add_3",
                       "hint": "declare `*, eps` to accept any value"}],
    }  # fmt: skip
    story.step("fuse-rms-norm", "changed", rewrites=rewrites, misses=[near], summary="One kernel for RMS norm.", stats={
        "nodes": [28, 18], "flops": ["2*s75*s96**2 + 12*s75*s96", "2*s75*s96**2 + 8*s75*s96"],
        "flops_value": [71680, 69632], "bytes": ["48*s75*s96", "24*s75*s96"], "bytes_value": [24576, 12288],
        "ops": {"aten.pow.Tensor_Scalar": -2, "aten.mean.dim": -2, "aten.rms_norm": 2},
        "unknown": ["turbogr.scan"], "saved": {"padding": "s96*(s75 - 1)"},
    })  # fmt: skip
    far = {**near, "rule": "pack-jagged", "matched": 2, "total": 5, "obstacles": [
        {"kind": "op", "text": "wants aten.where, found aten.relu", "node": "relu", "hint": ""},
        {"kind": "shape", "text": "x.d1 == w.d0 not provable: s75 vs s96", "node": "mm", "hint": "use known()"},
    ]}  # fmt: skip
    unchanged = {"nodes": [18, 18], "flops": ["2*s75*s96**2 + 8*s75*s96"] * 2, "flops_value": [69632, 69632]}
    story.step("pack-jagged", "unchanged", "no mask reaches the loss", misses=[far], stats=unchanged)
    story.node("sum_2").append(story.node("sum_1"))
    story.step("reorder", "changed", summary="Compute late what is read late.", stats=unchanged)
    story.step("offload-negatives", "skipped", "not for captured graphs")
    story.step("quantize-linear", "failed", "left %mm without a shape\n  rule quantize-linear, rewrite 1")
    remark = story.recorder.remark
    line = line_of(story.node("relu"))
    remark(Remark(RemarkKind.APPLIED, "rms-fused", "fuse-rms-norm", "two norms became one kernel each", line, "relu"))
    remark(Remark(RemarkKind.MISSED, "still-padded", "pack-jagged", HOSTILE, line, "relu", "pass lengths"))
    story.record["order"] = {
        "passes": [
            {"name": n, "phase": phase, "present": n != "dedupe", "summary": f"{n} does its work."}
            for phase, names in (("pre-grad", "fold-views fuse-rms-norm pack-jagged dedupe"),
                                 ("post-grad", "offload-negatives overlap"))
            for n in names.split()
        ],
        "edges": [
            {"from": "fold-views", "to": "fuse-rms-norm", "kind": "after", "site": "passes/fuse_rms_norm.py:14"},
            {"from": "fold-views", "to": "pack-jagged", "kind": "needs", "site": "passes/pack_jagged.py:14"},
            {"from": "fuse-rms-norm", "to": "pack-jagged", "kind": "before", "site": "passes/fuse_rms_norm.py:15"},
            {"from": "dedupe", "to": "pack-jagged", "kind": "after", "site": "passes/pack_jagged.py:15"},
            {"from": "offload-negatives", "to": "overlap", "kind": "after", "site": "passes/overlap.py:9"},
            {"from": "pack-jagged", "to": "overlap", "kind": "needs", "site": "passes/overlap.py:10"},
        ],
    }  # fmt: skip
    return story.record


@pytest.fixture
def record(tmp_path: Path) -> dict:
    source = tmp_path / "tower.py"
    source.write_text(MODEL)
    return tell(source)


@pytest.fixture
def dump(tmp_path: Path, record: dict) -> Path:
    directory = tmp_path / "dump"
    for name in ("0/0.0-captured", "0/0.0-backward", "0/0.0-forward", "8/10.0-captured", "8/2.0-captured"):
        folder = directory / f"rank{name}"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(json.dumps({**record, "graph": name[2:], "role": name.split("-")[1]}))
    (directory / "run.json").write_text(json.dumps(RUN))
    return directory


class Page(HTMLParser):
    """Elements, attributes and scripts of a page; fails where tags do not nest."""

    VOID = frozenset({"meta", "input", "br", "hr", "img", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


def rebuilt(snapshots: list) -> list[list[int]]:
    """What the page's script does to get snapshots back."""
    result, ids = [], []
    for edits in snapshots:
        ids = list(ids)
        for at, drop, put in reversed(edits):
            ids[at : at + drop] = put
        result.append(ids)
    return result


def test_page_is_well_formed_and_self_contained(record):
    text = view.render([record], RUN)
    page = Page(text)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 2 and "link" not in tags and "img" not in tags and "iframe" not in tags
    assert not [v for _, attributes in page.elements for k, v in attributes.items() if k in ("src", "href")]
    # The one address on the page is the name of the SVG vocabulary, which nobody fetches.
    assert set(re.findall(r"\w+://[^\s\"'\\<]+", text)) == {"http://www.w3.org/2000/svg"}
    for way_out in ("url(", "@import", "fetch(", "XMLHttpRequest", "import(", "WebSocket"):
        assert way_out not in text


def test_script_is_the_only_one_allowed_and_makes_no_markup(record):
    page = Page(view.render([record], RUN))
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy is not None and "default-src 'none'" in policy and f"script-src 'sha256-{digest}';" in policy
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert sink not in page.scripts[1]


def test_hostile_text_stays_text(record):
    assert any(line["code"] == HOSTILE for line in record["lines"])
    run = {**RUN, "legend": HOSTILE, "pipeline": HOSTILE}
    page = Page(view.render([{**record, "graph": HOSTILE}], run))
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert "</" not in page.scripts[0] and "<!--" not in page.scripts[0]
    assert page.data["run"]["legend"] == HOSTILE
    assert page.data["graphs"][0]["remarks"][1]["text"] == HOSTILE


def test_totals_count_a_pass_once_and_everything_else_each_time(record):
    assert view.totals([record, record]) == {
        "graphs": 2, "ran": 4, "fired": 3, "skipped": 1, "failed": 1, "rewrites": 6, "near_misses": 4, "remarks": 4,
    }  # fmt: skip


def test_near_misses_are_ranked_nearest_first(record):
    near = copy.deepcopy(record)
    worse = {**near["steps"][2]["near_misses"][0], "obstacles": near["steps"][3]["near_misses"][0]["obstacles"]}
    near["steps"][1]["near_misses"] = [worse]
    ranked = view.ranked_misses(near)
    assert [(m["step"], m["matched"], m["total"], len(m["obstacles"])) for m in ranked] == [
        (2, 6, 6, 1), (1, 6, 6, 2), (3, 2, 5, 2),
    ]  # fmt: skip


def test_snapshots_survive_the_packing(record):
    graph = view.page_model([record], RUN)["graphs"][0]
    assert rebuilt(graph["snapshots"]) == record["snapshots"]
    assert len(record["snapshots"]) == 5  # input, fold, two norms, reorder


def test_deep_links_find_their_data(record):
    model = view.page_model([record], RUN)
    graph = model["graphs"][0]
    assert (graph["key"], graph["name"]) == ("rank0/0.0-captured", "0.0-captured")
    assert [s["number"] for s in graph["steps"]] == list(range(7))
    assert [(s["before"], s["after"]) for s in graph["steps"]] == [
        (0, 0), (0, 1), (1, 3), (3, 3), (3, 4), (4, 4), (4, 4),
    ]  # fmt: skip
    fuse = graph["steps"][2]
    assert [r["snapshot"] for r in fuse["rewrites"]] == [2, 3]
    pictures = [model["pictures"][r["picture"]] for r in fuse["rewrites"]]
    assert ["rms_norm_default_1" in p for p in pictures] == [False, True]
    assert [s["picture"] is None for s in graph["steps"]] == [True, False, False, True, False, True, True]


def test_pictures_are_stored_once_and_rewrites_go_without_when_the_page_grows(record, monkeypatch):
    one, two = (len(view.page_model([record] * n, RUN)["pictures"]) for n in (1, 2))
    assert one == two
    monkeypatch.setattr(view, "PICTURES", 0)
    fuse = view.page_model([record], RUN)["graphs"][0]["steps"][2]
    assert fuse["picture"] is not None and [r["picture"] for r in fuse["rewrites"]] == [None, None]


def test_rendering_leaves_the_record_alone_and_repeats_itself(record):
    before = copy.deepcopy(record)
    assert view.render([record], RUN) == view.render([copy.deepcopy(record)], RUN)
    assert record == before


def large_record(size: int = 2000, rewrites: int = 100) -> dict:
    """A long chain; one pass replaces every twentieth node on its own."""
    graph = fx.Graph()
    value = torch.empty(8, 64)
    last = graph.placeholder("x")
    last.meta["val"] = value
    for i in range(size):
        last = graph.call_function(torch.ops.aten.add.Tensor, (last, i))
        last.meta["val"] = value
        last.meta["stack_trace"] = f'  File "model.py", line {i // 4 + 1}, in forward'
    graph.output(last)
    recorder = Recorder("0.0", "captured")
    recorder.snapshot(graph)
    done = []
    for old in [n for n in graph.nodes if n.op == "call_function"][:: size // rewrites]:
        with graph.inserting_before(old):
            new = graph.call_function(torch.ops.aten.sub.Tensor, old.args)
        new.meta["val"] = value
        inherit(new, [old], Origin("flip", "flip", (old.name,)))
        old.replace_all_uses_with(new)
        graph.erase_node(old)
        done.append({"rule": "flip", "site": "", "removed": [old.name], "added": [new.name], "line": 0,
                     "snapshot": recorder.snapshot(graph)})  # fmt: skip
    step = {"spec": "", "phase": "pre-grad", "summary": "", "site": "", "reason": "", "near_misses": [], "stats": {},
            "seconds": 0.5}  # fmt: skip
    recorder.data["steps"] = [
        {**step, "number": 0, "name": "input", "status": "input", "snapshot": 0, "rewrites": []},
        {**step, "number": 1, "name": "flip", "status": "changed", "snapshot": len(done), "rewrites": done},
    ]
    return recorder.data


def test_large_graph_makes_a_light_page():
    record = large_record()
    text = view.render([record], RUN)
    assert len(text.encode()) < 3_000_000
    assert rebuilt(Page(text).data["graphs"][0]["snapshots"])[-1] == record["snapshots"][-1]


def test_write_view_reads_every_record_in_order(dump):
    path = view.write_view(dump)
    assert path == dump / "index.html"
    assert [g["key"] for g in Page(path.read_text(encoding="utf-8")).data["graphs"]] == [
        "rank0/0.0-captured", "rank0/0.0-forward", "rank0/0.0-backward", "rank8/2.0-captured", "rank8/10.0-captured",
    ]  # fmt: skip
    assert sorted(p.name for p in dump.iterdir()) == ["index.html", "rank0", "rank8", "run.json"]


def test_page_is_replaced_whole_or_not_at_all(dump, monkeypatch):
    (dump / "index.html").write_text("old page")
    seen = []

    def refuse(source, target):
        seen.append((Path(source).read_text(encoding="utf-8"), Path(target).read_text()))
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        view.write_view(dump)
    new, old = seen[0]
    assert new.rstrip().endswith("</html>") and old == "old page"
    assert (dump / "index.html").read_text() == "old page"
    assert not [p for p in dump.iterdir() if p.name.startswith(".")]


def test_empty_run_says_so(tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"writer": "turbogr", "format": 1}))
    page = Page(view.write_view(tmp_path).read_text(encoding="utf-8"))
    assert page.data["totals"]["graphs"] == 0 and page.data["graphs"] == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("run.json", None, "not a dump directory"),
        ("run.json", "{", "cannot read .*run.json"),
        ("rank0/0.0-captured/record.json", "[", "cannot read .*record.json"),
        ("rank0/0.0-captured/record.json", '{"format": 99}', "format 99.*compile again"),
    ],
)
def test_unreadable_dump_names_the_file_and_the_next_step(dump, file, text, message):
    (dump / file).unlink() if text is None else (dump / file).write_text(text)
    with pytest.raises(TurbogrError, match=message):
        view.write_view(dump)


# --- in a browser --------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")


def look(page: Path, link: str, profile: Path) -> str:
    """The page's DOM once its script has run, whitespace folded; fails when the script did not run or broke."""
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}", "--window-size=1280,900",
        "--virtual-time-budget=5000", "--dump-dom", f"{page.as_uri()}#{link}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    body = re.search(r"<body[^>]*>", done.stdout)
    assert body and "data-error" not in body[0] and 'data-ready="yes"' in body[0], body
    shown = done.stdout[: done.stdout.index('<script type="application/json"')]
    return re.sub(r"\s+", " ", shown)


def texts(dom: str, kind: str) -> list[str]:
    """Plain text of the program's rows of one kind."""
    code = dom[dom.index('id="code"') : dom.index('id="detail"')]
    rows = re.findall(rf'<div class="row {kind}[^>]*>(.*?)</div>', code)
    return [re.sub(r"<[^>]+>", "", row) for row in rows]


@pytest.mark.browser
@in_browser
def test_browser_shows_one_rewrite_of_a_deep_link(dump, tmp_path):
    page = view.write_view(dump)
    dom = look(page, "graph=0.0-captured&step=2&rewrite=2&tab=program&node=rms_norm_default_1", tmp_path / "profile")
    assert "rewrite 2 of 2" in dom
    (added,) = texts(dom, "added")
    assert added.startswith("+%rms_norm_default_1 : f32[s75, s96] = aten.rms_norm(%relu")
    removed = [row.split(" ")[0] for row in texts(dom, "removed")]
    assert removed == [f"−%{n}" for n in ("pow_2", "mean_1", "add_1", "rsqrt_1", "mul_2", "mul_3")]
    (changed,) = texts(dom, "changed")
    assert "%mul_3%rms_norm_default_1" in changed  # old argument beside the new one
    assert "z = norm(y, w, 1e-6) + h" in dom[dom.index('id="code"') :]
    origin = re.sub(r"<[^>]+>", " ", dom[dom.index('id="origin"') :])
    assert "002 fuse-rms-norm, rewrite 2" in origin and "%pow_2" in origin and "tower.py:11" in origin
    assert '<svg xmlns="http://www.w3.org/2000/svg" class="tg"' in dom


@pytest.mark.browser
@in_browser
def test_browser_shows_moves_misses_remarks_and_the_first_screen(dump, tmp_path):
    page, profile = view.write_view(dump), tmp_path / "profile"
    rewired = look(page, "step=2&node=add_2", profile)
    assert "in the graph as it arrived" in rewired[rewired.index('id="origin"') :]
    moved = look(page, "step=4", profile)
    assert len(texts(moved, "left")) == len(texts(moved, "moved")) == 1 and "Same nodes, in another order." in moved
    misses = look(page, "tab=misses", profile)
    assert misses.index("wants 1e-06, found 1e-05") < misses.index("wants aten.where, found aten.relu")
    assert "declare `*, eps` to accept any value" in misses
    remarks = look(page, "tab=remarks&graph=rank8/2.0-captured", profile)
    assert "&lt;/script&gt;&lt;img src=x onerror=alert(1)&gt;" in remarks and "<img" not in remarks
    first = look(page, "", profile)
    assert "4 passes looked at 5 graphs; 3 of them changed something, in 15 rewrites." in first
    statistics = look(page, "tab=statistics", profile)
    assert "2·s75·s96² + 12·s75·s96" in statistics and "−2 aten.mean.dim" in statistics
    assert "saves padding: s96·(s75 - 1)" in statistics and "not counted: turbogr.scan" in statistics
    order = look(page, "tab=order", profile)
    assert "not in this pipeline" in order and "passes/pack_jagged.py:14" in order


@pytest.mark.browser
@in_browser
@pytest.mark.parametrize(
    ("keys", "where"),
    [
        ("ArrowRight", "step=2&amp;rewrite=1"),
        ("ArrowRight ArrowRight ArrowRight", "step=4"),  # past the last rewrite: on to the next pass that changed
        ("ArrowLeft ArrowDown", "step=2"),
        ("ArrowUp", "step=1"),
    ],
)
def test_browser_walks_with_the_keyboard_and_chooses_with_a_click(record, tmp_path, keys, where):
    visitor = f"""<script>
    for (const key of "{keys}".split(" ")) document.dispatchEvent(new KeyboardEvent("keydown", {{ key }}));
    document.body.title = location.hash;
    const name = document.querySelector("#code button.name");
    name.click();
    document.body.lang = name.textContent;
    </script></body>"""
    text = re.sub(r"<meta http-equiv[^>]*>", "", view.render([record], RUN)).replace("</body>", visitor)
    page = tmp_path / "page.html"
    page.write_text(text, encoding="utf-8")
    dom = look(page, "step=2", tmp_path / "profile")
    body = re.search(r"<body[^>]*>", dom)
    assert body and f'title="#graph=0.0-captured&amp;{where}&amp;tab=program"' in body[0]
    chosen = re.search(r'lang="(%\w+)"', body[0])
    assert chosen and f"<b>{chosen[1]}</b>" in dom[dom.index('id="origin"') :]


@pytest.mark.browser
@in_browser
def test_browser_shows_an_empty_run_and_folds_a_large_one(tmp_path):
    page, profile = tmp_path / "page.html", tmp_path / "profile"
    page.write_text(view.render([], {}), encoding="utf-8")
    assert "No graphs were compiled in this run" in look(page, "tab=program", profile)
    page.write_text(view.render([large_record()], RUN), encoding="utf-8")
    whole = look(page, "step=1", profile)
    assert whole.count('class="row ') <= 400 and "more row" in whole
    one = look(page, "step=1&rewrite=50", profile)
    assert len(texts(one, "added")) == len(texts(one, "removed")) == 1 and "unchanged nodes" in one
