"""The road to AscendC kernels on a real machine, as far as it can be walked without one: each missing part is named,
with the next step."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from turbogr_compile.kernels.ascendc import load as loading
from turbogr_compile.kernels.ascendc.load import NotReady, load

ASCENDC = Path(loading.__file__).parent
SETTINGS = (
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    "ASCEND_CUSTOM_OPP_PATH",
    "TURBOGR_NPU_LIBRARY",
)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without any of it."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(loading, "_loaded", [])
    monkeypatch.setitem(sys.modules, "torch_npu", None)


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An installed package of ops."""
    place = tmp_path / "opp" / "vendors" / "turbogr"
    (place / "op_api" / "lib").mkdir(parents=True)
    (place / "op_api" / "lib" / "libcust_opapi.so").touch()
    monkeypatch.setenv("ASCEND_OPP_PATH", str(tmp_path / "opp"))
    return place


# --- load --------------------------------------------------------------------------------------------


def test_kernels_are_not_imported_by_default() -> None:
    program = "import sys, turbogr_compile.kernels as k; sys.exit(any('ascendc' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_without_torch_npu() -> None:
    with pytest.raises(NotReady, match=r"torch_npu cannot be imported(.|\n)*set_env.sh(.|\n)*pip install"):
        load()


def test_without_the_package(torch_npu: None) -> None:
    with pytest.raises(NotReady, match=r"package of ops is not installed \(looked in nowhere(.|\n)*build.sh --install"):
        load()


def test_a_package_of_others_is_not_ours(torch_npu: None, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = package.rename(package.with_name("customize"))
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", str(other))
    with pytest.raises(NotReady, match="package of ops is not installed"):
        load()


def test_package_in_a_folder_of_its_own(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_OPP_PATH")
    # set_env.bash leaves an empty part behind.
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"/elsewhere/vendors/x:{package}:")
    assert loading.find_package() == package


def test_without_the_adapter(torch_npu: None, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "HERE", package)
    with pytest.raises(NotReady, match=r"there is no adapter at .*turbogr_npu.so(.|\n)*setup.py build_ext"):
        load()
    monkeypatch.setenv("TURBOGR_NPU_LIBRARY", "/nowhere/x.so")
    with pytest.raises(NotReady, match=r"no adapter at /nowhere/x.so(.|\n)*TURBOGR_NPU_LIBRARY"):
        load()


def test_an_adapter_that_does_not_load(torch_npu: None, package: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    with pytest.raises(NotReady, match=r"broken.so does not load(.|\n)*build it anew(.|\n)*setup.py build_ext"):
        load(broken)
    assert not loading._loaded


def test_an_adapter_is_loaded_once(
    torch_npu: None, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, calls = tmp_path / "turbogr_npu.so", []
    library.touch()
    monkeypatch.setattr(torch.ops, "load_library", calls.append)
    monkeypatch.setenv("TURBOGR_NPU_LIBRARY", str(library))
    assert load() == load() == loading.registered()
    assert calls == [library]


def test_registered_are_the_ops_with_a_kernel() -> None:
    assert "coalesce_rows" not in loading.registered()
    with torch.library._scoped_library("turbogr", "IMPL") as own:
        own.impl("coalesce_rows", lambda x, rows: (rows, x), loading.KEY)
        assert "coalesce_rows" in loading.registered()


# --- build.sh and setup.py ---------------------------------------------------------------------------


def run(*arguments: str, script: Path = ASCENDC / "build.sh", **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return subprocess.run(
        ["bash", str(script), *arguments], env={**kept, **environment}, capture_output=True, text=True
    )


def fake_cann(root: Path) -> Path:
    (root / "compiler/tikcpp/ascendc_kernel_cmake/fwk_modules").mkdir(parents=True)
    (root / "tools/opbuild").mkdir(parents=True)
    (root / "tools/opbuild/op_build").touch(mode=0o755)
    return root


def old_cann(root: Path) -> Path:
    shutil.rmtree(fake_cann(root) / "compiler/tikcpp/ascendc_kernel_cmake/fwk_modules")
    return root


def runtime_only(root: Path) -> Path:
    (fake_cann(root) / "tools/opbuild/op_build").unlink()
    return root


def test_help() -> None:
    done = run("--help")
    assert done.returncode == 0
    for option in ("--soc", "--ops", "--jobs", "--install", "--install-path", "--clean", "--help"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--soc", "ascend950"], "not 'ascend950'"),
        (["--soc"], "--soc needs a value"),
        (["--soc", "--install"], "--soc needs a value"),
        (["--jobs", "many"], "--jobs takes a number"),
        (["--ops", "no_such_op"], "no op 'no_such_op'"),
        (["--verbose"], "unknown option --verbose"),
        ([], "CANN was not found: ASCEND_HOME_PATH is not set"),
    ],
)
def test_wrong_calls_are_explained(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 1 and said in done.stderr


def test_cann_that_is_not_active_is_found(tmp_path: Path) -> None:
    script = tmp_path / "Ascend" / "cann" / "set_env.sh"
    script.parent.mkdir(parents=True)
    script.touch()
    done = run(HOME=str(tmp_path))
    assert done.returncode == 1 and f"source {script}" in done.stderr


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda root: root, "there is no such folder"),
        (old_cann, "CANN 9 or newer is needed"),
        (runtime_only, "install the toolkit package"),
    ],
    ids=["nowhere", "old", "runtime only"],
)
def test_wrong_cann_is_explained(make: Callable[[Path], Path], said: str, tmp_path: Path) -> None:
    done = run(ASCEND_HOME_PATH=str(make(tmp_path / "cann")))
    assert done.returncode == 1 and said in done.stderr


def test_clean_removes_build_folders_only(tmp_path: Path) -> None:
    precious = tmp_path / "mine"
    precious.mkdir()
    done = run("--clean", "--build-dir", str(precious))
    assert done.returncode == 1 and "--clean removes build folders" in done.stderr and precious.exists()


def test_the_adapter_asks_for_torch_npu() -> None:
    program = (
        f"import sys, runpy; sys.modules['torch_npu'] = None; runpy.run_path({str(ASCENDC / 'torch' / 'setup.py')!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1 and "torch_npu cannot be imported" in done.stderr and "set_env.sh" in done.stderr


def test_presets() -> None:
    (preset,) = json.loads((ASCENDC / "CMakePresets.json").read_text())["configurePresets"]
    variables = {name: x["value"] for name, x in preset["cacheVariables"].items()}
    assert variables["vendor_name"] == loading.VENDOR
    assert variables["ASCEND_COMPUTE_UNIT"] == "ascend910b;ascend910_93"
    assert variables["ENABLE_BINARY_PACKAGE"] == "True"
    assert variables["ASCEND_CANN_PACKAGE_PATH"] == "$env{ASCEND_HOME_PATH}"
