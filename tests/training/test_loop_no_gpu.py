"""The package index's default build of torch knows a GPU; the machine may have none. A run there must not lose itself.

The stand-in says what that build says: CUDA was compiled in, `torch.cuda` refuses to begin.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import turbogr_compile as turbogr
from turbogr_compile.registry import HOME, ROOMS
from turbogr_compile.training import loop
from turbogr_compile.training.config import Config

SMALLEST = {
    "dim": 16, "layers": 1, "max_len": 24, "batch": 8, "negatives": 16, "users": 60, "items": 50, "mean_length": 8,
    "evaluate_users": 20, "threads": 1, "warmup": 2, "save_every": 2, "deterministic": True,
}  # fmt: skip
STAND_IN = """
import torch
def refuses(*_, **__):
    raise RuntimeError("Found no NVIDIA driver on your system")
torch._C._accelerator_getAccelerator = lambda: torch.device("cuda")
torch._C._get_accelerator = lambda: torch.device("cuda")
torch.cuda._lazy_init = refuses
"""


@pytest.fixture
def cuda_build(monkeypatch):
    before = {name: getattr(torch._C, name) for name in ("_accelerator_getAccelerator", "_get_accelerator")}
    lazy = torch.cuda._lazy_init
    exec(STAND_IN, {})
    assert torch.accelerator.current_accelerator() == torch.device("cuda") and not torch.accelerator.is_available()
    yield
    for name, function in before.items():
        setattr(torch._C, name, function)
    torch.cuda._lazy_init = lazy


@pytest.mark.parametrize("backend", ["turbogr", "eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_run_is_saved_and_goes_on(cuda_build, backend, tmp_path):
    def run(out: str, steps: int, resume: bool = False):
        config = Config.read(SMALLEST | {"steps": steps, "backend": backend})
        return loop.train(config, tmp_path / out, quiet=True, resume=resume)

    whole, again = run("whole", 4), (run("run", 2), run("run", 4, resume=True))[1]
    assert whole.summary["hr@10"] == again.summary["hr@10"]
    mine, theirs = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(x, theirs[name]) for name, x in mine.items())


def test_random_numbers_are_saved(cuda_build):
    state = turbogr.random_state()
    kept, drawn = state.state_dict(), torch.rand(3)
    state.load_state_dict(kept)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.slow
def test_collectives_are_tried_without_a_gpu(tmp_path):
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN + "import sys\nfrom turbogr_compile.runtime.selftest import main\nsys.exit(main())\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "."})
    assert done.returncode == 0, done.stderr
    assert "return what they should" in done.stdout


def _asked(path: Path) -> list[str]:
    """Calls that say which accelerator the build knows, whether there is one or not."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            checked = any(k.arg == "check_available" for k in node.keywords)
            if node.func.attr in ("current_accelerator", "_get_accelerator") and not checked:
                found.append(f"{path}:{node.lineno}")
    return found


def test_nobody_asks_for_an_accelerator_that_may_not_be_there():
    files = {p for room in (HOME, *ROOMS.values()) for p in Path(room).rglob("*.py")}
    assert len(files) > 300
    assert not [place for path in sorted(files) for place in _asked(path)]
