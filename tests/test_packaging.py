"""The wheel installs as one import package, finds its own files, and announces itself to torch."""

from __future__ import annotations

import os
import shutil
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
for leaked in ("passes", "lowering", "kernels", "training"):
    assert importlib.util.find_spec(leaked) is None, leaked
from turbogr_compile import catalogue
from turbogr_compile.lowering.target import target_names
assert "fold-masks" in catalogue.names() and target_names() == ["ascend", "ascend-sim", "cpu", "eager"]
assert "turbogr" in torch._dynamo.list_backends(exclude_tags=())
f = torch.compile(lambda x: x * 1.0 + 1, backend="turbogr", options={"codegen": "aten", "dump": sys.argv[2]})
assert f(torch.ones(2)).tolist() == [2.0, 2.0]
"""
# The AscendC sources and the twin came along, and find each other.
TWIN_PROGRAM = """
import sys
import torch, turbogr_compile.kernels
from turbogr_compile.kernels.ascendc.load import HERE
from turbogr_compile.kernels.twin import device
assert str(HERE).startswith(sys.argv[1]) and (HERE / "build.sh").exists() and (HERE / "torch" / "setup.py").exists()
x = torch.arange(12.0).view(4, 3).requires_grad_()
with device(cores=2) as twin:
    torch.ops.turbogr.gather_rows(x, torch.tensor([3, 1, 1])).sum().backward()
assert twin.ran == ["gather_rows", "scatter_rows"] and x.grad[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]
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
    for wanted in ("py.typed", "view.html.j2", "view.js.j2", "passes/fold_masks.py", "lowering/cpu.py", "page.css.j2",
                   "benchmarks/kernels.py", "training/bench/page.html.j2", "training/report/page.html.j2"):  # fmt: skip
        assert f"turbogr_compile/{wanted}" in names
    entry = next(n for n in names if n.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry).decode()
    assert "turbogr = turbogr_compile.commands:main" in text and "turbogr = turbogr_compile.backend:turbogr" in text
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert "Requires-Dist: torch==2.13.*" in metadata and "License-Expression: Apache-2.0" in metadata


def test_wheel_holds_the_sources_that_are_built_elsewhere(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", "HEAD", "kernels"]
    sources = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    assert "kernels/ascendc/build.sh" in sources and "kernels/twin/include/kernel_operator.h" in sources
    assert not [name for name in sources if f"turbogr_compile/{name}" not in names]


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """The wheel, installed away from the checkout."""
    target = tmp_path_factory.mktemp("installed") / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)
    return target


def run(program: str, site: Path, folder: Path, *arguments: str, **environment: str) -> None:
    command = [sys.executable, "-c", program, str(site), *arguments]
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, **environment, "PYTHONPATH": str(site)})


def test_installed_wheel_works_away_from_the_checkout(site, tmp_path):
    run(PROGRAM, site, tmp_path, str(tmp_path / "dump"))
    assert (tmp_path / "dump" / "index.html").exists()


@pytest.mark.skipif(shutil.which("g++") is None, reason="the twin is compiled with g++")
def test_installed_wheel_builds_the_twin(site, tmp_path):
    run(TWIN_PROGRAM, site, tmp_path, TURBOGR_CACHE_DIR=str(tmp_path / "cache"))
