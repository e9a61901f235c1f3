"""However turbogr is brought along (wheel, sdist, editable install, a checkout as it is), it is one import package that
finds its own files and announces itself to torch.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from turbogr_compile.registry import BESIDE

ROOT = Path(__file__).parent.parent
PROGRAM = """
import importlib.util, sys
import torch, turbogr_compile
assert turbogr_compile.__file__.startswith(sys.argv[1]), turbogr_compile.__file__
for leaked in ("passes", "lowering", "kernels", "training"):
    assert importlib.util.find_spec(leaked) is None, leaked
from turbogr_compile.pipeline import catalogue
from turbogr_compile.lowering.target import target_names  # the address that targets of others use
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
def source(tmp_path_factory) -> Path:
    """A clone, so that building leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source") / "turbogr"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    subprocess.run(command, check=True)
    (built,) = out.glob("turbogr-*.whl")
    return built


def packaged(names: list[str]) -> set[str]:
    return {n.removeprefix("turbogr_compile/") for n in names if n.startswith("turbogr_compile/")}


def tracked() -> set[str]:
    """What the commit has in the rooms of the house, by its place inside of the import package."""
    listed = ["git", "-C", str(ROOT), "ls-tree", "-r", "--name-only", "HEAD", "turbogr_compile", *BESIDE]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
    return {n.removeprefix("turbogr_compile/") for n in names}


def test_wheel_holds_everything_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"turbogr_compile"}
    assert packaged(names) == tracked()
    entry = next(n for n in names if n.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry).decode()
    assert "turbogr = turbogr_compile.commands:main" in text and "turbogr = turbogr_compile.backend:turbogr" in text
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("METADATA"))).decode()
    assert "Requires-Dist: torch==2.13.*" in metadata and "License-Expression: Apache-2.0" in metadata


def test_sdist_makes_the_same_wheel(source, wheel, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)], cwd=source, check=True
    )
    (archive,) = tmp_path.glob("turbogr-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (unpacked,) = (p for p in tmp_path.iterdir() if p.is_dir())
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=unpacked, check=True
    )
    (built,) = tmp_path.glob("*.whl")
    assert sorted(zipfile.ZipFile(built).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """The wheel, installed away from the checkout."""
    target = tmp_path_factory.mktemp("installed") / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True)
    return target


def run(program: str, site: Path, folder: Path, *arguments: str, **environment: str) -> None:
    command = [sys.executable, "-S", "-c", program, str(site), *arguments]
    subprocess.run(command, check=True, cwd=folder, env={**apart(site), **environment})


def apart(*first: Path) -> dict[str, str]:
    """An environment without the editable install of this one: -S reads no .pth files, and libraries come by path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*first, sysconfig.get_paths()["purelib"])))}


def test_installed_wheel_works_away_from_the_checkout(site, tmp_path):
    run(PROGRAM, site, tmp_path, str(tmp_path / "dump"))
    assert (tmp_path / "dump" / "index.html").exists()


@pytest.mark.skipif(shutil.which("g++") is None, reason="the twin is compiled with g++")
def test_installed_wheel_builds_the_twin(site, tmp_path):
    run(TWIN_PROGRAM, site, tmp_path, TURBOGR_CACHE_DIR=str(tmp_path / "cache"))


MODEL = """
import torch

table = torch.nn.Embedding(20, 8, padding_idx=0)


def step(ids):
    return (table(ids) * 1.0 * (ids != 0)[..., None]).square().sum()


def step_inputs():
    return torch.tensor([[1, 2, 0], [3, 0, 0]])
"""
EXPLAIN = ["-m", "turbogr_compile", "explain", "model.py:step", "--codegen", "aten"]


def explained(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    (folder / "model.py").write_text(MODEL)
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def test_a_clone_that_nobody_installed_explains_a_model(source):
    """From the root of the checkout, and with the checkout on the path from anywhere else."""
    told = explained([sys.executable, "-S", *EXPLAIN], source, apart())
    assert "pack-rows" in told and "packed" in told
    where = "import turbogr_compile.passes as p; print(p.__file__)"
    command = [sys.executable, "-S", "-c", where]
    found = subprocess.run(command, cwd=source, env=apart(), check=True, capture_output=True, text=True).stdout
    assert found.strip() == str(source / "passes" / "__init__.py")


def test_an_editable_install_explains_a_model(source, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--editable", str(source)], check=True)
    told = explained([str(tmp_path / "venv" / "bin" / "turbogr"), *EXPLAIN[2:]], tmp_path, apart())
    assert "pack-rows" in told and "packed" in told
    where = "import turbogr_compile.registry as r; print(r.HOME)"
    found = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True, cwd=tmp_path).stdout
    assert found.strip() == str(source / "turbogr_compile")


def test_whoever_walks_the_package_arrives(tmp_path):
    """TORCH_LOGS=+turbogr_compile does; the package must not contain itself."""
    program = (
        "import turbogr_compile, pkgutil; print(*(m.name for m in pkgutil.walk_packages(turbogr_compile.__path__)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "pipeline" in done.stdout.split() and "turbogr_compile" not in done.stdout.split()


# --- supply --------------------------------------------------------------------------------------------


def built(source: Path, out: Path) -> dict[str, bytes]:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"})
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_built_twice_it_is_the_same(source, tmp_path):
    """Elsewhere, by somebody with another umask, from files of another age."""
    once, again = built(source, tmp_path / "once"), tmp_path / "again"
    shutil.copytree(source, again)
    for path in again.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            path.chmod(0o600 | (path.stat().st_mode & 0o100))
            os.utime(path, (1_000_000_000, 1_000_000_000))
    mask = os.umask(0o077)
    try:
        assert built(again, tmp_path / "twice") == once and len(once) == 2
    finally:
        os.umask(mask)


def test_sdist_can_be_tested(source, tmp_path):
    """It brings the tests, what they read, and what its build needs."""
    (archive,) = (tmp_path / name for name in built(source, tmp_path) if name.endswith(".tar.gz"))
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    listed = ["git", "-C", str(source), "ls-files", "tests", "docs"]
    assert set(subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()) <= names
    assert {"pyproject.toml", "hatch_build.py", "Makefile", "LICENSE", "SECURITY.md", "requirements-dev.lock"} <= names


def test_wheel_says_what_is_in_it_and_what_it_asks_for(wheel):
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (n for n in opened.namelist() if n.endswith(".dist-info/sboms/turbogr.cdx.json"))
        bom = json.loads(opened.read(name))
        files = {c["name"]: c["hashes"][0]["content"] for c in bom["components"] if c["type"] == "file"}
        packed = {n for n in opened.namelist() if ".dist-info/" not in n}
        assert files == {n: hashlib.sha256(opened.read(n)).hexdigest() for n in packed}
        metadata = opened.read(next(n for n in opened.namelist() if n.endswith("METADATA"))).decode()
    asked = {c["name"]: c["scope"] for c in bom["components"] if c["type"] == "library"}
    declared = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*(;.*)?$", metadata, re.MULTILINE)
    assert set(asked) == {name.lower().replace("_", "-") for name, _ in declared} - {"turbogr"}
    assert {n for n, scope in asked.items() if scope == "required"} == {n for n, extra in declared if not extra}
    assert bom["bomFormat"] == "CycloneDX" and bom["dependencies"][0]["dependsOn"] == sorted(asked)


# Names of packages by what is imported of them, where these differ.
PACKAGES = {"yaml": "pyyaml", "google": "protobuf", "functorch": "torch"}
# Asked for only where somebody has brought them, and said so when they are missing.
BROUGHT = {"triton", "torchair", "ge"}


def test_what_is_imported_is_declared():
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(t for some in project["optional-dependencies"].values() for t in some)]
    declared = {re.split(r"[^\w.-]", text)[0].lower().replace("_", "-") for text in texts} | {"turbogr-compile"}
    imported: dict[str, Path] = {}
    for room in ("turbogr_compile", *BESIDE):
        for path in (p for p in (ROOT / room).rglob("*.py") if p.name != "setup.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module or ""]
                imported |= {name.partition(".")[0]: path for name in names}
    others = {name for name in imported if name not in sys.stdlib_module_names and name not in BROUGHT}
    absent = {n: imported[n] for n in others if PACKAGES.get(n, n).lower().replace("_", "-") not in declared}
    here = {path.stem for room in ("benchmarks", "examples") for path in (ROOT / room).rglob("*")}  # programs
    assert not {name: path for name, path in absent.items() if name not in here}


def test_the_lock_covers_what_development_needs():
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/house/lock.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    text = (ROOT / "requirements-dev.lock").read_text()
    entries = [entry for entry in re.split(r"\n(?=\w)", text.partition("\n\n")[2]) if entry.strip()]
    assert len(entries) > 30 and "://" not in text
    for entry in entries:
        assert re.fullmatch(r"[\w.-]+==[\w.]+( \\\n    --hash=sha256:[0-9a-f]{64})+\n?", entry), entry[:80]
