"""What GE receives is shown: remarks, GE graphs beside the dump and in the viewer, the first node that differs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import turbogr_compile
from turbogr_compile import commands as cli
from turbogr_compile.errors import VerifyError
from turbogr_compile.lowering.ge.check import Problem
from turbogr_compile.lowering.ge.graph import Node
from turbogr_compile.lowering.ge.kernels import KERNELS
from turbogr_compile.lowering.torchair import simulation, tell
from turbogr_compile.pipeline.instrument import GraphRun, Instrument
from turbogr_compile.pipeline.remarks import Remark, RemarkKind
from turbogr_compile.pipeline.target import BaseTarget, find_target

from ..turbogr_compile.test_view import BROWSER, look
from .simulator import needs_torchair


class Model(nn.Module):
    """A running maximum, which torchair has no converter for, between ops that it has some for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.inner(x), approximate="tanh")
        best = torch.cummax(hidden, 1).values
        return self.outer(best).square().mean()


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, turbogr_compile.Report]:
    """One step of the model, dumped and explained."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("out") / "dump"
    report = turbogr_compile.explain(Model(), torch.randn(4, 8), target="ascend-sim", dump=folder)
    return folder, report


def graph(folder: Path, role: str) -> Path:
    (found,) = folder.glob(f"rank0/*-{role}-lowering")
    return found


# --- remarks -----------------------------------------------------------------------------------------


@needs_torchair
def test_what_stays_outside_is_a_remark_with_the_line(dumped):
    _, report = dumped
    found = [(r, record) for record in report.records for r in record["remarks"] if r["id"] == "outside-ge"]
    assert [record["role"] for _, record in found] == ["forward"]
    remark, record = found[0]
    assert remark["kind"] == "missed" and remark["node"] == "cummax"
    assert "aten.cummax.default runs op by op, outside of GE graphs: torchair has no converter" in remark["text"]
    assert record["lines"][remark["line"]]["code"] == "best = torch.cummax(hidden, 1).values"
    assert "[outside-ge] torchair: aten.cummax.default" in str(report)


@needs_torchair
def test_what_rests_on_belief_is_a_remark_with_the_line(dumped):
    folder, report = dumped
    found = {r["text"].split()[1]: (r, record) for record in report.records for r in record["remarks"]
             if r["id"] == "ge-belief"}  # fmt: skip
    assert {"Gelu", "GeluGrad"} <= set(found)
    remark, record = found["GeluGrad"]
    assert record["role"] == "backward" and "gelu" in record["lines"][remark["line"]]["code"]
    assert "[ge-belief]" in (graph(folder, "backward") / "summary.txt").read_text()


def test_a_belief_that_is_another_ones_says_it():
    node = Node("g", "GatherV2", (), (), (), {}, {}, ())
    (remark,) = simulation.beliefs([(FakeGraph([node]), fx.Graph())])
    assert "an index out of range is an error here" in remark.text


class FakeGraph:
    def __init__(self, nodes):
        self.nodes = nodes


def test_doubts_become_remarks_once_for_each_kind():
    source = fx.Graph()
    source.call_function(torch.ops.aten.mm.default, ()).meta["stack_trace"] = '  File "my.py", line 3, in f\n    y'
    nodes = [Node(f"m{k}", "MatMul", (), (), (), {}, {}, (), origin="mm_default") for k in range(2)]
    problems = [Problem(n, "x1 is bf16, and MatMul takes f16, f32", certain=False) for n in nodes]
    (remark,) = simulation.doubts(problems, source)
    assert remark.id == "ge-belief" and remark.node == "mm_default" and remark.line.line == 3
    assert "x1 is bf16" in remark.text and "newer CANN" in remark.text


@needs_torchair
def test_doubts_that_arise_at_run_time_reach_the_record():
    """torchair's lists of dtypes know no bf16 for some operators, which shows when the graph runs."""
    torch._dynamo.reset()
    report = turbogr_compile.explain(
        lambda x: x.sort().values * 2, torch.ones(3, dtype=torch.bfloat16), target="ascend-sim", backward=False
    )
    texts = [r["text"] for record in report.records for r in record["remarks"] if r["id"] == "ge-belief"]
    assert any("%Sort (Sort, FX node %sort): x is bf16, and Sort takes f16" in text for text in texts), texts


# --- texts beside the dump ---------------------------------------------------------------------------


@needs_torchair
def test_ge_graphs_lie_beside_the_dump(dumped):
    folder, _ = dumped
    forward, backward = graph(folder, "forward"), graph(folder, "backward")
    parts = sorted(p.name for p in forward.glob("*ge-graph*"))
    assert parts == ["002-ge-graph-1.txt", "002-ge-graph-2.txt"], "cut in two by the op that stays outside"
    first = (forward / parts[0]).read_text()
    assert first.startswith("# GE graph 1 of 2\ngraph(")
    line = next(text for text in first.splitlines() if "Gelu(" in text)
    assert line.endswith("# gelu"), "the FX node"
    above = first[: first.index(line)].splitlines()
    assert "hidden = F.gelu(self.inner(x)" in next(text for text in reversed(above) if text.startswith("  # "))
    assert "GeluGrad(" in (backward / "002-ge-graph.txt").read_text()
    coverage = (forward / "002-ge-coverage.txt").read_text()
    assert "best = torch.cummax(hidden, 1).values\n  aten.cummax.default: torchair has no converter" in coverage
    assert (backward / "002-ge-coverage.txt").read_text().endswith("nothing stays outside\n")


@needs_torchair
def test_texts_are_in_the_record_and_listed_as_ours(dumped):
    folder, _ = dumped
    record = json.loads((graph(folder, "forward") / "record.json").read_text())
    assert list(record["texts"]) == ["ge-coverage", "ge-graph-1", "ge-graph-2"]
    listed = json.loads((folder / "rank0" / "files.json").read_text())
    assert any(name.endswith("002-ge-graph-2.txt") for name in listed), "so that the next dump removes it"
    page = (folder / "index.html").read_text()
    assert "GE graph 1 of 2" in page and "outside-ge" in page


def test_coverage_counts_by_line():
    made = fx.Graph()
    x = made.placeholder("x")
    sort = made.call_function(torch.ops.aten.sort.default, (x,))
    sort.meta["stack_trace"] = '  File "my.py", line 3, in f\n    y'
    twice = [made.call_function(torch.ops.aten.cummax.default, (x, 0)) for _ in range(2)]
    made.output(x)
    text = tell.coverage_text(made, {sort: "why", **dict.fromkeys(twice, "not")})
    assert text.startswith("0 of 3 ops go to GE\n") and "my.py:3\n  aten.sort.default: why" in text
    assert "aten.cummax.default ×2: not" in text


# --- what any target may tell ------------------------------------------------------------------------


class Talker(BaseTarget):
    """Runs the module as it is, and has something to say."""

    def lower(self, module, inputs, codegen, hooks):
        from turbogr_compile import _torch
        from turbogr_compile.lowering.common.aot import aot

        def compile_graph(graph, values, role):
            hooks.tell(role, [Remark(RemarkKind.MISSED, "said", "me", "a word")], {"listing": "one\ntwo\n"})
            return _torch.run_plainly(graph)

        return aot(module, inputs, hooks, compile_graph, _torch.default_partition)


def test_a_target_may_tell_without_anybody_watching(monkeypatch, tmp_path, caplog):
    class Seen(Instrument):
        def __init__(self) -> None:
            self.seen: list[tuple[str, list[Remark]]] = []

        def lowered(self, run: GraphRun, remarks, texts) -> None:
            self.seen.append((run.name, [*remarks]))

    talker = Talker("cpu", "", ("aten",), "")
    monkeypatch.setattr("turbogr_compile.backend.find_target", lambda name: talker)
    torch._dynamo.reset()
    seen = Seen()
    turbogr_compile.compile(lambda x: x.sin(), pipeline="", instruments=[seen], dump=tmp_path / "out")(torch.ones(2))
    ((name, (remark,)),) = seen.seen
    assert name.endswith("-inference") and remark.id == "said"
    assert next(tmp_path.glob("out/rank0/*/*-listing.txt")).read_text() == "one\ntwo\n"
    assert any("[said] a word" in record.getMessage() for record in caplog.records)
    torch._dynamo.reset()
    turbogr_compile.compile(lambda x: x.cos(), pipeline="", verify="off")(torch.ones(2))


# --- the first node that differs ---------------------------------------------------------------------


def wrong(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = KERNELS[op]
    monkeypatch.setitem(KERNELS, op, lambda node, *inputs: right(node, *inputs) * 1.01)


@needs_torchair
@pytest.mark.parametrize(
    ("op", "fx_node", "role"), [("Gelu", "gelu", "forward"), ("GeluGrad", "gelu_backward", "backward")]
)
def test_a_wrong_kernel_is_named(op: str, fx_node: str, role: str, monkeypatch: pytest.MonkeyPatch):
    wrong(op, monkeypatch)
    torch._dynamo.reset()
    torch.manual_seed(0)
    run = turbogr_compile.compile(Model(), target="ascend-sim", verify="shadow:1", on_error="raise")
    with pytest.raises(VerifyError) as caught:
        run(torch.randn(4, 8))
    said = str(caught.value)
    assert "differs from the captured graph" in said
    assert f"%{fx_node} and %{op} ({op}, FX node %{fx_node}) differ: by up to" in said
    assert "hidden = F.gelu(self.inner(x), approximate" in said and "test_ascend_dumps.py" in said


@needs_torchair
def test_right_kernels_pass(monkeypatch: pytest.MonkeyPatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    turbogr_compile.compile(Model(), target="ascend-sim", verify="shadow:1", on_error="raise")(torch.randn(4, 8))


@needs_torchair
def test_what_is_no_fault_of_the_conversion_is_said_too():
    assert "older than these graphs" in find_target("ascend-sim").locate(lambda: None)
    assert find_target("cpu").locate(lambda: None) == ""


@needs_torchair
def test_the_command_line_names_it(monkeypatch, tmp_path, capsys):
    wrong("Relu", monkeypatch)
    torch._dynamo.reset()
    (tmp_path / "f.py").write_text("def f(x):\n    y = x * 2\n    return y.relu()\n")
    command = ["run", f"{tmp_path}/f.py:f", "--inputs", "f32[64]", "--target", "ascend-sim", "--verify", "shadow"]
    assert cli.main(command) == cli.FAILED
    said = capsys.readouterr().err
    assert "%Relu (Relu, FX node %relu)" in said and "return y.relu()" in said


# --- the viewer --------------------------------------------------------------------------------------


CLICK = """<script>
const chosen = [...document.querySelectorAll("#lowered button")].find(b => b.textContent === "gelu");
document.body.lang = chosen.closest("pre").textContent;
chosen.click();
document.body.title = location.hash;
</script></body>"""


@needs_torchair
@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no browser on PATH")
def test_the_viewer_shows_ge_graphs_and_leads_from_them_to_the_program(dumped, tmp_path: Path):
    folder, _ = dumped
    name = graph(folder, "forward").name
    text = re.sub(r"<meta http-equiv[^>]*>", "", (folder / "index.html").read_text(encoding="utf-8"))
    (tmp_path / "page.html").write_text(text.replace("</body>", CLICK), encoding="utf-8")
    dom = look(tmp_path / "page.html", f"graph={name}&tab=lowered", tmp_path / "profile")
    (body,) = re.findall(r"<body[^>]*>", dom)
    assert "# GE graph 1 of 2" in body and "%Gelu : f32[4, 8] = Gelu(" in body
    assert f"#graph={name}&amp;step=1&amp;node=gelu&amp;tab=program" in body
    assert "hidden = F.gelu(self.inner(x)" in dom[dom.index('id="origin"') :]
