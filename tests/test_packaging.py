"""The wheel installs as one import package, finds its own files, and announces itself to torch."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAM = """
import importlib.util, sys
import torch, turbogr_compile
assert turbogr_compile.__file__.startswith(sys.argv[1]), turbogr_compile.__file__
for leaked in ("passes", "lowering", "kernels"):
    assert importlib.util.find_spec(leaked) is None, leaked
from turbogr_compile import catalogue
from turbogr_compile.lowering.target import target_names
assert "fold-masks" in catalogue.names() and target_names() == ["cpu", "eager"]
assert "turbogr" in torch._dynamo.list_backends(exclude_tags=())
f = torch.compile(lambda x: x * 1.0 + 1, backend="turbogr", options={"codegen": "aten", "dump": sys.argv[2]})
assert f(torch.ones(2)).tolist() == [2.0, 2.0]
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source") / "turbogr"
    # A copy, so that building leaves nothing in the checkout.
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True)
    (built,) = out.glob("turbogr-*.whl")
    return built


def test_wheel_holds_everything_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"turbogr_compile"}
    for wanted in ("py.typed", "view.html.j2", "view.js.j2", "passes/fold_masks.py", "lowering/cpu.py"):
        assert f"turbogr_compile/{wanted}" in names
    entry = next(n for n in names if n.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry).decode()
    assert "turbogr = turbogr_compile.cli:main" in text and "turbogr = turbogr_compile.backend:turbogr" in text
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert "Requires-Dist: torch==2.13.*" in metadata and "License-Expression: Apache-2.0" in metadata


def test_installed_wheel_works_away_from_the_checkout(wheel, tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)
    environment = {**os.environ, "PYTHONPATH": str(target)}
    subprocess.run(
        [sys.executable, "-c", PROGRAM, str(target), str(tmp_path / "dump")], check=True, cwd=tmp_path, env=environment
    )
    assert (tmp_path / "dump" / "index.html").exists()
