"""The front door is light: what a program does not use, it does not import."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
{code}
print(" ".join(m for m in ("torch", "torch._dynamo", "torch._inductor", "networkx", "jinja2") if m in sys.modules))
"""


def loaded(code: str, tmp_path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(code=code)], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import turbogr_compile",
        "import turbogr_compile.errors, turbogr_compile.registry",
        "from turbogr_compile import TurbogrError, Phase, Role",
        "import turbogr_compile; dir(turbogr_compile)",
        "from turbogr_compile.commands import main, parser; parser([]).format_help()",
        "from turbogr_compile.commands import parser; parser(['explain']).parse_args(['explain', 'f.py:g'])",
        "from turbogr_compile.commands import parser; parser(['passes']).parse_args(['passes', '--phase', 'joint'])",
        "from turbogr_compile.commands import parser; parser(['train']).parse_args(['train', '--size', 'tiny'])",
    ],
)
def test_without_torch(code, tmp_path):
    assert loaded(code, tmp_path) == set()


@pytest.mark.parametrize("code", ["import turbogr_compile.kernels", "import turbogr_compile; turbogr_compile.kernels"])
def test_kernels_need_torch_only(code, tmp_path):
    assert loaded(code, tmp_path) == {"torch"}


def test_ops_are_there_when_they_are_asked_for(tmp_path):
    """After torch, importing the package is enough; it still imports nothing before an op is called."""
    before = "import torch, turbogr_compile; assert 'turbogr_compile.kernels' not in sys.modules"
    call = "torch.ops.turbogr.gather_rows(torch.ones(3, 2), torch.tensor([1]))"
    assert loaded(f"{before}; {call}; {call}", tmp_path) == {"torch"}
    assert loaded("import torch, turbogr_compile; assert not hasattr(torch.ops.turbogr, 'nothing')", tmp_path)


def test_torch_finds_the_backend_without_an_import_of_ours(tmp_path):
    code = "import torch; torch.compile(lambda x: x + 1, backend='turbogr', options={'codegen': 'aten'})(torch.ones(2))"
    assert "torch._dynamo" in loaded(code, tmp_path)


THREADS = """
import sys, threading
import torch, turbogr_compile

def ask(what):
    barrier.wait()
    try:
        eval(what)
    except Exception as error:
        failed.append(f"{what}: {error!r}")

asked = ["turbogr_compile.plan", "turbogr_compile.Checkpoints", "turbogr_compile.shard", "turbogr_compile.compile",
         "torch.ops.turbogr.silu_split", "torch.ops.turbogr.gather_rows", "turbogr_compile.runtime.sharding"]
barrier, failed = threading.Barrier(len(asked)), []
threads = [threading.Thread(target=ask, args=(what,)) for what in asked]
[t.start() for t in threads]
[t.join() for t in threads]
assert not failed, failed
"""


def test_threads_may_come_in_at_once(tmp_path):
    subprocess.run([sys.executable, "-c", THREADS], cwd=tmp_path, check=True, timeout=120)
