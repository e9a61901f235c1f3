"""What users write down in programs, settings and scripts stays as it is, or changes here on purpose.

`public.json` beside this file is the list: names of the package, passes and their options, options of a compilation,
kinds of remarks, targets, commands, files of a dump and fields of its record. A dump comes from a process of its own
that imports nothing of turbogr but the package.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import turbogr_compile
from turbogr_compile import Options, Phase, RemarkKind, Role
from turbogr_compile.commands import COMMANDS
from turbogr_compile.pipeline import catalogue
from turbogr_compile.pipeline.target import target_names

LISTED = json.loads(Path(__file__).with_name("public.json").read_text(encoding="utf-8"))
API = Path(__file__).resolve().parents[2] / "docs" / "api.md"
PROGRAM = """
import sys
import torch

table = torch.nn.Embedding(20, 8, padding_idx=0)


def step(ids):
    x, valid = table(ids), ids != 0
    weights = (x @ x.transpose(1, 2)).masked_fill(~valid[:, None], -1e9).softmax(-1)
    return ((weights @ x) * 1.0 * valid[..., None]).sum()


run = torch.compile(step, backend="turbogr", options={"dump": sys.argv[1], "codegen": "aten"})
run(torch.tensor([[1, 2, 0], [3, 0, 0]])).backward()
"""


def test_names():
    assert sorted(turbogr_compile.__all__) == LISTED["names"]
    for name in turbogr_compile.__all__:
        assert getattr(turbogr_compile, name) is not None
    assert set(turbogr_compile.__all__) <= set(dir(turbogr_compile))


def test_every_name_is_on_the_page_about_the_api():
    told = set(re.findall(r"\b[A-Za-z_]+\b", API.read_text(encoding="utf-8")))
    assert sorted(set(turbogr_compile.__all__) - told) == []


def test_a_name_that_is_not_there_is_an_ordinary_mistake():
    with pytest.raises(AttributeError, match="has no attribute 'compil'"):
        turbogr_compile.compil  # noqa: B018


def test_passes_and_their_options():
    ours = [c for c in catalogue.all_passes() if c.__module__.startswith("turbogr_compile.")]
    assert {c.name: {f.name: str(f.default) for f in dataclasses.fields(c)} for c in ours} == LISTED["pass options"]


def test_options():
    unset = dataclasses.MISSING
    assert {f.name: "" if f.default is unset else str(f.default) for f in dataclasses.fields(Options)} == (
        LISTED["options"]
    )
    assert set(LISTED["options"]) <= {*inspect.signature(turbogr_compile.compile).parameters, *LISTED["options"]}


def test_kinds_phases_roles_targets_commands():
    assert [k.value for k in RemarkKind] == LISTED["remark kinds"]
    assert [p.value for p in Phase] == LISTED["phases"]
    assert [r.value for r in Role] == LISTED["roles"]
    assert target_names() == LISTED["targets"]
    assert COMMANDS.names() == LISTED["commands"]


@pytest.fixture(scope="module")
def dump(tmp_path_factory) -> Path:
    """Of a process that imports torch alone: what a pass needs, it must bring along."""
    folder = tmp_path_factory.mktemp("public")
    (folder / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, "program.py", "dump"], cwd=folder, check=True)
    return folder / "dump"


def test_files_of_a_dump(dump):
    assert sorted(p.relative_to(dump).as_posix() for p in dump.rglob("*") if p.is_file()) == LISTED["dump files"]


def test_fields_of_a_record(dump):
    record = json.loads((dump / "rank0" / "0.0-captured" / "record.json").read_text(encoding="utf-8"))
    fields = {key: sorted(v[0]) if isinstance(v, list) and v and isinstance(v[0], dict) else None
              for key, v in record.items()}  # fmt: skip
    assert fields | {"order": sorted(record["order"])} == LISTED["record"]
    assert sorted(json.loads((dump / "run.json").read_text(encoding="utf-8"))) == LISTED["run"]


def test_user_lines_of_a_record_are_the_users(dump):
    record = json.loads((dump / "rank0" / "0.0-captured" / "record.json").read_text(encoding="utf-8"))
    assert {Path(line["file"]).name for line in record["lines"]} == {"program.py"}


@pytest.mark.parametrize("graph", ["0.0-captured", "0.0-forward", "0.0-backward", "0.0-joint"])
def test_a_reproduction_runs_and_imports_nothing_else(dump, graph, tmp_path):
    program = dump / "rank0" / graph / "repro.py"
    imported = re.findall(r"^(?:import|from) (\w+)", program.read_text(encoding="utf-8"), re.M)
    assert set(imported) == {"torch", "turbogr_compile"}
    subprocess.run([sys.executable, str(program)], cwd=tmp_path, check=True, capture_output=True)
