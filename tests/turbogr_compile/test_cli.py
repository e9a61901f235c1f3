"""The command line: every command, its JSON twin, wrong use."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from turbogr_compile import commands as cli

MODEL = '''
from dataclasses import dataclass

import torch

from turbogr_compile import Pass, Phase, register


def step(x, w):
    h = (x * 1.0) @ w
    y = h.relu() + h.abs().relu()
    return y.sum()


def step_inputs():
    torch.manual_seed(0)
    return [torch.randn(4, 3), torch.randn(3, 2, requires_grad=True)]


class NeedsArguments(torch.nn.Module):
    def __init__(self, size):
        super().__init__()


def bad(x):
    return x


def bad_inputs():
    raise ValueError("no data")


def named(x, scale):
    return x * scale


def named_inputs():
    return {"x": torch.ones(2), "scale": torch.ones(2)}


@register
@dataclass(frozen=True)
class Soften(Pass):
    """Wrong on purpose: its second rewrite changes the numbers."""

    name = "soften"
    phase = Phase.PRE_GRAD

    def run(self, graph, ctx):
        for i, node in enumerate(graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)):
            target = torch.ops.aten.silu.default if i == 1 else torch.ops.aten.relu.default
            with ctx.rewrite(f"soften {i}", node):
                with graph.inserting_before(node):
                    new = graph.call_function(target, node.args)
                node.replace_all_uses_with(new)
                graph.erase_node(node)
'''


@pytest.fixture
def model(tmp_path, monkeypatch):
    torch._dynamo.reset()
    (tmp_path / "model_of_cli.py").write_text(MODEL)
    (tmp_path / "broken_of_cli.py").write_text("1 / 0\n")
    (tmp_path / "x" / "odd").mkdir(parents=True)
    (tmp_path / "x" / "odd" / "record.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("model_of_cli", None)
    return "model_of_cli.py:step"


def run(*arguments: str, capsys, status: int = 0) -> str:
    try:
        code = cli.main(arguments)
    except SystemExit as stop:  # argparse
        code = stop.code
    shown = capsys.readouterr()
    assert code == status, shown
    return shown.out if status != cli.WRONG_USE else shown.err


def test_explain(model, capsys):
    text = run("explain", model, "--codegen", "aten", capsys=capsys)
    assert "001  remove-noops" in text and "changed" in text and "ms" in text
    (record, *_) = json.loads(run("explain", model, "--codegen", "aten", "--json", capsys=capsys))
    assert record["steps"][1]["name"] == "remove-noops" and record["steps"][1]["rewrites"][0]["rule"] == "mul"


def test_explain_one_rule_and_a_page(model, capsys, tmp_path):
    text = run("explain", model, "--codegen", "aten", "--rule", "remove-noops", "--html", "page", capsys=capsys)
    assert "remove-noops" in text and "fold-views  " not in text.split("\n\n", 1)[1]
    assert (tmp_path / "page" / "index.html").exists()
    wrong = run("explain", model, "--codegen", "aten", "--rule", "remove-nops", capsys=capsys, status=2)
    assert "did you mean 'remove-noops'" in wrong


def test_inputs_from_text_and_from_a_mapping(model, capsys):
    run("explain", model, "--codegen", "aten", "--inputs", "f32[b=4, 3] f32[3, 2]", capsys=capsys)
    run("run", "model_of_cli.py:named", "--codegen", "aten", capsys=capsys)


def test_run_with_a_pipeline_dump_and_diff(model, capsys):
    for directory, pipeline in (("a", "remove-noops"), ("b", "eliminate-dead-code")):
        text = run("run", model, "--codegen", "aten", "--pipeline", pipeline, "--dump", directory, capsys=capsys)
        assert pipeline in text and str(Path(directory) / "index.html") in text
        torch._dynamo.reset()
    assert "aten.mul.Tensor" in run("diff", "a", "b", capsys=capsys, status=1)
    assert "no difference" in run("diff", "a", "a", capsys=capsys)
    changed = run("diff", "a:input", ":remove-noops", capsys=capsys, status=1)
    assert "-  %mul : f32[4, 3] = aten.mul.Tensor" in changed
    data = json.loads(run("diff", "a:000", "a:001", "--json", capsys=capsys, status=1))
    assert any(data.values())
    assert str(Path("a") / "index.html") in run("view", "a", capsys=capsys)
    assert "not a dump directory" in run("view", ".", capsys=capsys, status=2)
    assert "not a dump directory" in run("diff", ".", "a", capsys=capsys, status=2)


def test_bisect_finds_pass_and_rewrite(model, capsys):
    options = ("--codegen", "aten", "--pipeline", "remove-noops, soften", "--load", "model_of_cli.py")
    text = run("bisect", model, *options, capsys=capsys, status=1)
    assert "002 soften" in text and "rewrite 2 of 2, rule 'soften 1'" in text
    assert "y = h.relu() + h.abs().relu()" in text and "--load model_of_cli.py --stop-after soften:1" in text
    torch._dynamo.reset()
    (found,) = json.loads(run("bisect", model, *options, "--fast", "--json", capsys=capsys, status=1))
    assert (found["pass"], found["rewrite"]) == ("soften", 2) and found["after"] > 1e-3
    torch._dynamo.reset()
    assert "numbers are the same" in run("bisect", model, "--codegen", "aten", capsys=capsys)


ORACLE = """
import sys, torch
sys.path.insert(0, ".")
import model_of_cli as m
torch.set_num_threads(1)
x, w = m.step_inputs()
options = {"codegen": "aten", "on_error": "raise", "pipeline": "remove-noops, soften"}
actual = torch.compile(m.step, backend="turbogr", options=options)(x, w)
sys.exit(not torch.allclose(actual, m.step(x, w)))
"""


@pytest.mark.slow
def test_bisect_by_a_command_of_the_users(model, capsys, tmp_path):
    (tmp_path / "oracle.py").write_text(ORACLE)
    text = run("bisect", "--oracle", f"{sys.executable} oracle.py", "--json", capsys=capsys, status=1)
    assert json.loads(text)["pass"] == "soften" and json.loads(text)["rewrite"] == 2


def test_passes(model, capsys, tmp_path):
    assert "fold-masks" in run("passes", capsys=capsys)
    assert "option max_elements" in run("passes", "fold-masks", capsys=capsys)
    assert "did you mean 'fold-masks'" in run("passes", "fold-mask", capsys=capsys, status=2)
    assert "soften" in run("passes", "--load", "model_of_cli.py", capsys=capsys)
    parts = json.loads(run("passes", "--key", capsys=capsys))
    assert len(parts["key"]) == 64 and "turbogr_compile.passes.fold_masks" in parts["sources"]
    run("passes", "--graph", "order.svg", capsys=capsys)
    assert (tmp_path / "order.svg").read_text().startswith("<svg")


def test_doctor(capsys):
    text = run("doctor", capsys=capsys)
    assert "target cpu, codegen aten" in text and "known to torch.compile" in text
    found = json.loads(run("doctor", "--json", capsys=capsys))
    assert found["packages"]["torch"].startswith("2.13")


def test_doctor_says_what_is_missing(capsys, monkeypatch):
    from turbogr_compile import _torch

    monkeypatch.setattr(_torch, "cpp_compiler", lambda: "")
    text = run("doctor", capsys=capsys)
    assert "missing  target cpu, codegen inductor" in text and "install g++" in text


def test_what_the_model_or_a_pass_raises_is_one_line(model, capsys):
    text = _failure("explain", model, "--codegen", "aten", "--inputs", "f32[4, 3] f32[5, 2]", capsys=capsys)
    assert text.startswith("turbogr: model_of_cli.py:step raised") and "--inputs" in text
    assert "h = (x * 1.0) @ w" in text and "Traceback" not in text
    torch._dynamo.reset()
    options = ("--pipeline", "soften", "--load", "model_of_cli.py", "--verify", "numeric")
    text = _failure("run", model, "--codegen", "aten", *options, capsys=capsys)
    assert "soften changed the numbers" in text and "Traceback" not in text


def _failure(*arguments: str, capsys) -> str:
    assert cli.main(arguments) == cli.FAILED
    return capsys.readouterr().err


def test_dump_that_cannot_be_written_is_a_wrong_command(model, capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    text = run("run", model, "--codegen", "aten", "--dump", "mine", capsys=capsys, status=2)
    assert "cannot dump there" in text and "did not write" in text


def test_empty_pipeline_is_empty(model, capsys):
    assert "no pass ran" in run("run", model, "--codegen", "aten", "--pipeline", "", capsys=capsys)


def test_pipeline_can_be_edited(model, capsys):
    edit = ("--add", "soften", "--without", "fold-masks", "--load", "model_of_cli.py", "--dynamic")
    text = run("run", model, "--codegen", "aten", *edit, capsys=capsys)
    assert "soften" in text and "fold-masks" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explian", "x"), "did you mean 'explain'"),
        (("explain", "model_of_cli.py"), "file.py:function"),
        (("explain", "model_of_cli.py:stp"), "did you mean 'step'"),
        (("explain", "nowhere.py:step"), "no file 'nowhere.py'"),
        (("explain", "no.such.module:step"), "cannot import"),
        (("explain", "broken_of_cli.py:step"), "broken_of_cli.py:1  1 / 0"),
        (("explain", "model_of_cli.py:NeedsArguments"), "cannot be made without arguments"),
        (("explain", "model_of_cli.py:bad"), "bad_inputs() failed: ValueError: no data"),
        (("bisect", "--oracle", "no-such-command x"), "no command 'no-such-command'"),
        (("bisect",), "file.py:function"),
        (("diff", "x/odd", "x/odd"), "record.json is damaged"),
        (("explain", "model_of_cli.py:step", "--inputs", "g32[3]"), "g32"),
        (("explain", "model_of_cli.py:Soften"), "no inputs for 'Soften'"),
        (("run", "model_of_cli.py:step", "--target", "gpu"), "no target is named 'gpu'"),
        (("run", "model_of_cli.py:step", "--verify", "strickt"), "did you mean 'strict'"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_wrong_use_is_answered(model, capsys, arguments, message):
    assert message in run(*arguments, capsys=capsys, status=2)
