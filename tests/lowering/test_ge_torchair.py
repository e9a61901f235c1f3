"""Finding and loading torchair: what is looked at, what is refused with which words, and what stays as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._decomp import decomposition_table

from turbogr_compile.errors import TargetError
from turbogr_compile.lowering.torchair import load as torchair

from .simulator import Simulated, needs_torchair

aten = torch.ops.aten


def unpacked(folder: Path, version: str = "") -> Path:
    """What a wheel of torch_npu leaves, as far as it matters here."""
    inner = folder / "torch_npu" / "dynamo" / "torchair"
    inner.mkdir(parents=True)
    (inner / "npu_fx_compiler.py").touch()
    (folder / "torch_npu" / "__init__.py").touch()
    if version:
        (folder / "torch_npu" / "version.py").write_text(f"__version__ = '{version}'\n")
    return inner


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No torchair in the environment, in the cache, or installed."""
    monkeypatch.delenv("TURBOGR_TORCHAIR", raising=False)
    monkeypatch.setenv("TURBOGR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torchair, "_folder_of_torch_npu", lambda: None)
    (tmp_path / "cache").mkdir(mode=0o700)
    return tmp_path


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has not loaded torchair."""
    monkeypatch.setattr(torchair, "_simulating", lambda: None)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("torchair", "torch_npu")]:
        monkeypatch.delitem(sys.modules, name)
    without = [finder for finder in sys.meta_path if not isinstance(finder, torchair._NoTorchNpu)]
    monkeypatch.setattr(sys, "meta_path", without)


def test_nothing_is_found(nowhere):
    assert torchair.find() is None


def test_the_cache_is_looked_at_unless_others_may_write_it(nowhere):
    inner = unpacked(nowhere / "cache" / "torchair")
    (nowhere / "cache" / "torchair").chmod(0o700)
    assert torchair.find() == inner
    (nowhere / "cache" / "torchair").chmod(0o777)
    assert torchair.find() is None


def test_an_installed_torch_npu_is_found_without_an_import(nowhere, fresh, monkeypatch):
    inner = unpacked(nowhere / "site")
    monkeypatch.undo()
    monkeypatch.delenv("TURBOGR_TORCHAIR", raising=False)
    monkeypatch.setenv("TURBOGR_CACHE_DIR", str(nowhere / "cache"))
    monkeypatch.syspath_prepend(nowhere / "site")
    assert torchair.find() == inner and "torch_npu" not in sys.modules


@pytest.mark.parametrize("part", [".", "torch_npu", "torch_npu/dynamo", "torch_npu/dynamo/torchair"])
def test_the_variable_may_name_any_of_the_folders(nowhere, monkeypatch, part):
    inner = unpacked(nowhere / "wheel")
    monkeypatch.setenv("TURBOGR_TORCHAIR", str(nowhere / "wheel" / part))
    assert torchair.find().resolve() == inner


def test_the_variable_is_the_only_place_looked_at(nowhere, monkeypatch):
    unpacked(nowhere / "cache" / "torchair")
    monkeypatch.setenv("TURBOGR_TORCHAIR", str(nowhere / "elsewhere"))
    assert torchair.find() is None


def test_versions(tmp_path):
    assert torchair.version_of(unpacked(tmp_path / "a", "2.13.0")) == "2.13.0"
    inner = unpacked(tmp_path / "b")
    assert torchair.version_of(inner) == ""
    (tmp_path / "b" / "torch_npu-2.12.0.post1.dist-info").mkdir()
    assert torchair.version_of(inner) == "2.12.0.post1"


def test_simulating_without_torchair(nowhere, fresh):
    with pytest.raises(TargetError, match=r"torchair was not found\n  try: turbogr doctor --fetch-torchair"):
        torchair.simulated()


def test_simulating_with_a_wrong_folder(nowhere, fresh, monkeypatch):
    monkeypatch.setenv("TURBOGR_TORCHAIR", str(nowhere))
    with pytest.raises(TargetError, match=f"TURBOGR_TORCHAIR={nowhere} holds no torchair"):
        torchair.simulated()


@pytest.mark.parametrize(("version", "says"), [("2.12.0", "is of torch_npu 2.12.0"), ("", "does not say")])
def test_simulating_with_another_version(nowhere, fresh, monkeypatch, version, says):
    unpacked(nowhere / "wheel", version)
    monkeypatch.setenv("TURBOGR_TORCHAIR", str(nowhere / "wheel"))
    with pytest.raises(TargetError, match=f"{says}.*needs {torchair.release()}"):
        torchair.simulated()


def test_simulating_without_protobuf(nowhere, fresh, monkeypatch):
    unpacked(nowhere / "wheel", f"{torchair.release()}.0")
    monkeypatch.setenv("TURBOGR_TORCHAIR", str(nowhere / "wheel"))
    monkeypatch.setattr(torchair, "_importable", lambda module: module != "google.protobuf")
    with pytest.raises(TargetError, match=r"torchair needs protobuf\n  try: pip install protobuf"):
        torchair.simulated()


def test_simulating_beside_the_real_thing(fresh, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", object())
    with pytest.raises(TargetError, match="TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        torchair.simulated()


def fake_torch_npu(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (folder / "torch_npu").mkdir(parents=True)
    (folder / "torch_npu" / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(folder)


class Npu:
    def __init__(self, count):
        self.count = count

    def is_available(self):
        return self.count > 0

    def device_count(self):
        return self.count


@pytest.mark.parametrize(
    ("code", "devices", "says"),
    [
        (None, 0, "torch_npu is not installed\n  try: pip install 'torch_npu=="),
        ("raise ImportError('libascendcl.so: cannot open')", 0, "CANN is missing.*libascendcl.so.*\n.*set_env.sh"),
        ("__version__ = '2.12.0'", 1, "the installed torch_npu is of torch_npu 2.12.0"),
        ("__version__ = '2.13.0'", 0, "finds no NPU\n  try: npu-smi info"),
        ("__version__ = '2.13.0'", 1, "without a working torchair"),
    ],
)
def test_what_an_npu_machine_may_lack(tmp_path, fresh, monkeypatch, code, devices, says):
    monkeypatch.setattr(torch, "npu", Npu(devices), raising=False)
    if code is not None:
        fake_torch_npu(tmp_path / "site", monkeypatch, code)
    with pytest.raises(TargetError, match=says) as caught:
        torchair.installed()
    assert "target='cpu'" in str(caught.value)
    if "raise" in (code or ""):
        assert "torch_npu" not in sys.modules
    sys.modules.pop("torch_npu", None)


def test_installed_torchair_is_given_out(tmp_path, fresh, monkeypatch):
    monkeypatch.setattr(torch, "npu", Npu(1), raising=False)
    fake_torch_npu(tmp_path / "site", monkeypatch, f"__version__ = '{torchair.release()}.0'")
    (tmp_path / "site" / "torchair.py").write_text("real = True")
    assert torchair.installed().real
    for name in ("torch_npu", "torchair"):
        del sys.modules[name]


def dropout_metadata() -> list[torch.Size]:
    with torch._subclasses.fake_tensor.FakeTensorMode():
        return [t.shape for t in aten.native_dropout(torch.ones(4, 6), 0.5, True)]


@needs_torchair
def test_patches_hold_inside_the_block_only():
    torchair.simulated()
    plain = torch.Size([4, 6])
    ours = decomposition_table[aten.native_dropout.default]
    assert dropout_metadata() == [plain, plain]
    with torchair.patched():
        assert dropout_metadata() == [plain, torch.Size([16])], "a packed mask"
        with torchair.patched():
            assert dropout_metadata()[1] == torch.Size([16])
        assert dropout_metadata()[1] == torch.Size([16]), "the outer block is still open"
    assert dropout_metadata() == [plain, plain]
    assert decomposition_table[aten.native_dropout.default] is ours
    with pytest.raises(ZeroDivisionError), torchair.patched():
        raise ZeroDivisionError
    assert dropout_metadata() == [plain, plain]


@needs_torchair
def test_the_real_target_is_refused_where_the_npu_is_simulated():
    torchair.simulated()
    with pytest.raises(TargetError, match="this process simulates the NPU"):
        torchair.installed()


@needs_torchair
def test_a_compilation_that_fails_leaves_nothing_behind():
    x = torch.randn(4, 4, requires_grad=True)
    with pytest.raises(Exception, match="cummax"):
        Simulated(lambda x: F.dropout(x, 0.5, True).cummax(0).values)(x)
    assert dropout_metadata() == [torch.Size([4, 6])] * 2


# In a process of its own, because it looks at what is there before torchair is loaded for the first time.
BEFORE_AND_AFTER = """
import importlib.util, logging, signal, sys, warnings
import torch, torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch.distributed._functional_collectives import traceable_collective_remaps
from turbogr_compile.lowering.torchair import load as torchair

def step(x):
    return F.dropout(x, 0.25, True).matmul(x.t()).sum()

def graphs(decompositions, dynamic):
    seen = []
    def keep(module, inputs):
        seen.append(module.print_readable(print_output=False))
        return make_boxed_func(module.forward)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, decompositions=decompositions)
    torch.compile(step, backend=backend, dynamic=dynamic)(torch.randn(4, 6, requires_grad=True)).backward()
    return seen

def world():
    seen = [graphs(d, dynamic) for d in ({}, select_decomp_table()) for dynamic in (False, True)]
    return seen, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), logging.getLoggerClass(), \\
        dict(traceable_collective_remaps), list(warnings.filters)

before = world()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    module = torchair.simulated()
assert not caught, caught
assert torchair.simulated() is module and "torch_npu" not in sys.modules
assert traceable_collective_remaps == before[4], "also before the first compilation"
config = module.CompilerConfig()
for dynamic in (False, True):
    def compile_graph(graph, inputs):
        with torchair.patched():
            return make_boxed_func(module.get_compiler(config)(graph, inputs))
    def backend(graph, inputs):
        with torchair.patched():
            return aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph)(graph, inputs)
    torch._dynamo.reset()
    x = torch.randn(4, 6, requires_grad=True)
    torch.compile(step, backend=backend, dynamic=dynamic)(x).backward()
    assert x.grad.isfinite().all()
after = world()
for one, other in zip(before, after, strict=True):
    assert one == other, (one, other)
assert (importlib.util.find_spec("torch_npu") is not None) == (sys.argv[1] == "beside"), "others may ask for it"
try:
    import torch_npu
except ModuleNotFoundError:
    print("as before")
"""


@needs_torchair
def test_the_process_is_as_before_after_loading_and_compiling(tmp_path):
    """With a torch_npu beside that must not be imported."""
    site = tmp_path / "site" / "torch_npu"
    site.mkdir(parents=True)
    (site / "__init__.py").write_text("raise RuntimeError('torch_npu was imported')")
    environment = {**os.environ, "PYTHONPATH": str(site.parent), "TURBOGR_TORCHAIR": str(torchair.find())}
    command = [sys.executable, "-c", BEFORE_AND_AFTER, "beside"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "as before" in done.stdout, done.stderr[-3000:]
