"""What a machine or a model may lack for an NPU: one clear message each with the next step, or a remark."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import turbogr_compile
from turbogr_compile.errors import TargetError
from turbogr_compile.lowering import ascend_sim
from turbogr_compile.lowering.ascend import CANN
from turbogr_compile.lowering.torchair import load as torchair
from turbogr_compile.lowering.torchair import native
from turbogr_compile.pipeline.target import find_target

from .simulator import needs_torchair


def double(x: Tensor) -> Tensor:
    return x * 2


def refusal(target: str, function=double, *arguments: Tensor) -> str:
    """What the user reads."""
    torch._dynamo.reset()
    with pytest.raises(Exception) as caught:
        turbogr_compile.compile(function, target=target)(*(arguments or (torch.ones(2),)))
    error = caught.value
    while error is not None and not isinstance(error, TargetError):
        error = error.__cause__ or getattr(error, "inner_exception", None)
    assert error is not None, f"no TargetError, but {caught.value!r}"
    assert str(error) in str(caught.value), "torch shows it whole"
    return str(error)


# --- the machine -------------------------------------------------------------------------------------


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A process without torch_npu and torchair; the function installs a torch_npu made of some code."""
    monkeypatch.setattr(torchair, "_simulating", lambda: None)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("torchair", "torch_npu")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, torchair._NoTorchNpu)])
    for name in CANN:
        monkeypatch.delenv(name, raising=False)

    def install(code: str) -> None:
        (tmp_path / "torch_npu").mkdir()
        (tmp_path / "torch_npu" / "__init__.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("torch_npu", None)


def test_torch_npu_is_missing(site):
    said = refusal("ascend")
    assert (
        "target 'ascend' with codegen 'ge' cannot run here\n  torch_npu: install it and CANN (docs/ascend.md)" in said
    )
    assert "instead: target='cpu' needs none of it" in said


def test_cann_is_missing(site):
    """Known before torch_npu is imported, which would change torch half-way."""
    site("raise SystemExit('imported')")
    said = refusal("ascend")
    assert "CANN: source set_env.sh" in said and "target='cpu'" in said


def test_cann_is_there_and_does_not_work(site, monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    site("raise ImportError('libascendcl.so: cannot open shared object file')")
    said = refusal("ascend")
    assert "CANN is missing: ImportError: libascendcl.so" in said and "set_env.sh" in said and "target='cpu'" in said
    assert "torch_npu" not in sys.modules


def test_another_torch_npu(site, monkeypatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    site("__version__ = '2.7.1'")
    said = refusal("ascend")
    assert "is of torch_npu 2.7.1" in said and f"needs {torchair.release()}" in said and "target='cpu'" in said


def test_the_package_of_ops_is_missing(site, monkeypatch):
    """torch_npu, its NPU and torchair are there; turbogr's kernels are not built."""
    monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    monkeypatch.setattr(torchair, "installed", lambda: torch)
    site("")
    said = refusal("ascend")
    assert "the package of ops is not installed" in said and "build.sh --install" in said and "target='cpu'" in said


def test_torchair_is_missing(site, monkeypatch, tmp_path):
    monkeypatch.setenv("TURBOGR_TORCHAIR", str(tmp_path))
    said = refusal("ascend-sim")
    assert "torchair: turbogr doctor --fetch-torchair" in said and "target='cpu'" in said


def test_another_torchair(site, monkeypatch, tmp_path):
    inner = tmp_path / "torch_npu" / "dynamo" / "torchair"
    inner.mkdir(parents=True)
    (inner / "npu_fx_compiler.py").touch()
    (tmp_path / "torch_npu" / "version.py").write_text("__version__ = '2.7.1'\n")
    monkeypatch.setenv("TURBOGR_TORCHAIR", str(tmp_path))
    monkeypatch.setattr(ascend_sim, "_simulator", ascend_sim._simulator.__wrapped__)  # as if it were the first use
    said = refusal("ascend-sim")
    assert f"is of torch_npu 2.7.1, and torch {torch.__version__} needs {torchair.release()}" in said
    assert "--fetch-torchair" in said and "target='cpu'" in said


def test_the_doctor_says_the_same(site):
    (missing,) = find_target("ascend").missing("ge")
    assert missing.what == "torch_npu"
    site("raise SystemExit('imported')")
    (missing,) = find_target("ascend").missing("ge")
    assert missing.what == "CANN"


# --- the model ---------------------------------------------------------------------------------------


def simulated(function, *arguments: Tensor) -> tuple[Tensor, ...]:
    torch._dynamo.reset()
    return turbogr_compile.compile(function, target="ascend-sim")(*arguments)


@needs_torchair
def test_an_op_without_a_converter_runs_between_ge_graphs(caplog: pytest.LogCaptureFixture):
    def f(x):
        return torch.cummax(x * 2, 0).values + 1

    x = torch.randn(5)
    with native.watching() as graphs:
        torch.testing.assert_close(simulated(f, x), f(x))
    assert len(graphs) == 2
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any(
        "[outside-ge] aten.cummax.default runs op by op" in text and "test_ascend_bad_input.py:" in text
        for text in said
    )


@needs_torchair
def test_a_result_that_ge_cannot_alias(caplog: pytest.LogCaptureFixture):
    """Views of inputs are copied; complex numbers GE does not copy."""

    def f(x):
        return torch.view_as_complex(x), x.sum()

    x = torch.randn(3, 2)
    for found, wanted in zip(simulated(f, x), f(x), strict=True):
        torch.testing.assert_close(found, wanted)
    assert any(
        "shares memory with an input, and GE copies no torch.complex64" in r.getMessage() for r in caplog.records
    )


@needs_torchair
def test_a_graph_that_torchair_does_not_take(caplog, monkeypatch):
    """Each op converts, the whole does not: it runs op by op, forward and backward."""
    module = torchair.simulated()

    def refuse(config):
        def compile_graph(graph, inputs):
            raise AssertionError("output 0 cannot alias input 1")

        return compile_graph

    monkeypatch.setattr(module, "get_compiler", refuse)
    x = torch.randn(3, requires_grad=True)
    simulated(lambda x: (x * x).sin().sum(), x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() * (x.detach() ** 2).cos())
    said = [r.getMessage() for r in caplog.records if "[not-converted]" in r.getMessage()]
    assert len(said) == 2 and all("output 0 cannot alias input 1" in s and "target='cpu'" in s for s in said)
    assert all("test_ascend_bad_input.py:" in s for s in said)


@needs_torchair
def test_a_process_group_that_is_not_there():
    def f(x):
        shared = torch.ops._c10d_functional.all_reduce(x * 2, "sum", "0")
        return torch.ops._c10d_functional.wait_tensor(shared)

    assert not torch.distributed.is_initialized()
    said = refusal("ascend-sim", f)
    assert "_c10d_functional.all_reduce.default talks to other processes, and no process group is initialised" in said
    assert 'shared = torch.ops._c10d_functional.all_reduce(x * 2, "sum", "0")' in said
    assert "init_process_group()" in said and "target='cpu'" in said


@needs_torchair
def test_a_group_is_asked_for_in_the_backward_too():
    class Shared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(grad, "sum", "0"))

    x = torch.ones(2, requires_grad=True)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="no process group is initialised"):
        simulated(lambda x: Shared.apply(x).sum(), x).backward()


@needs_torchair
def test_errors_of_torchair_in_a_model_with_parameters_leave_the_model_usable(monkeypatch):
    """After a refusal the same model compiles for the cpu."""
    model = nn.Linear(4, 4)

    def f(x):
        return torch.ops._c10d_functional.all_reduce(model(x), "sum", "0")

    refusal("ascend-sim", f, torch.ones(2, 4))
    torch._dynamo.reset()
    turbogr_compile.compile(model, target="cpu")(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
