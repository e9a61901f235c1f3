"""The cache key moves with what can change the code, and with nothing else."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turbogr_compile.pipeline import cache_key
from turbogr_compile.pipeline.instrument import Instrument
from turbogr_compile.pipeline.options import Options
from turbogr_compile.registry import PACKAGE, sources_of


def key(**options) -> str:
    return cache_key.cache_key(Options.read(options, {}))


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": "remove-noops"},
        {"pipeline": "fold-masks{min_ops=3}"},
        {"without": ["fold-masks"]},
        {"codegen": "aten"},
        {"target": "eager"},
        {"stop_after": "fold-masks:1"},
    ],
    ids=str,
)
def test_key_depends_on(options):
    assert key(**options) != key(codegen="inductor")


@pytest.mark.parametrize(
    "options",
    [{"dump": "somewhere"}, {"verify": "strict"}, {"verify": "shadow:3"}, {"on_error": "raise"},
     {"expect": {"fold-masks": ">=0"}}, {"instruments": [Instrument()]}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_key_does_not_depend_on(options):
    assert key(codegen="inductor", **options) == key(codegen="inductor")


def test_key_covers_every_room_that_can_change_code():
    """However deep a module lies: targets and the runtime around a step are packages of packages."""
    sources = cache_key.key_parts(Options.read({}, {}))["sources"]
    for room in ("lowering", "runtime", "kernels"):
        assert {m for m in sources_of(room) if not m.startswith(f"{PACKAGE}.kernels.ascendc.torch")} <= set(sources)
    assert f"{PACKAGE}.backend" in sources and f"{PACKAGE}.passes.pack_rows" in sources
    assert "?" not in sources.values()
    assert not [m for m in sources if m.startswith((f"{PACKAGE}.training", f"{PACKAGE}.simulator"))]


PASS = """
from dataclasses import dataclass
from mylib.helper import VALUE
from turbogr_compile import Pass, Phase, register

@register
@dataclass(frozen=True)
class Mine(Pass):
    name = "mine"
    phase = Phase.PRE_GRAD
    def run(self, graph, ctx):
        pass
"""


def test_editing_a_pass_or_what_it_imports_moves_the_key(tmp_path, monkeypatch):
    package = tmp_path / "mylib"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("VALUE = 1\n")
    (package / "mine.py").write_text(PASS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("mylib.mine")
    keys = [key(passes=["mine"])]
    for file, text in (("helper.py", "VALUE = 2\n"), ("mine.py", PASS + "\n# edited\n")):
        (package / file).write_text(text)
        keys.append(key(passes=["mine"]))
    assert len(set(keys)) == 3


STEP = """
import json, sys, torch
from torch._dynamo.utils import counters

def step(x, w):
    return torch.nn.functional.silu(x @ w).sum()

options = json.loads(sys.argv[1])
w = torch.randn(16, 4, requires_grad=True)
torch.compile(step, backend="turbogr", options={"codegen": "inductor", **options})(torch.randn(8, 16), w).backward()
print(json.dumps({k: counters["inductor"][k] for k in ("fxgraph_cache_hit", "fxgraph_cache_miss")}))
"""


@pytest.mark.slow
def test_second_process_hits_inductors_cache_whatever_is_dumped_or_verified(tmp_path):
    script = tmp_path / "step.py"
    script.write_text(STEP)

    def counts(**options) -> dict[str, int]:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, str(script), json.dumps(options)]
        out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=tmp_path)
        return json.loads(out.stdout.splitlines()[-1])

    assert counts() == {"fxgraph_cache_hit": 0, "fxgraph_cache_miss": 2}
    assert counts() == {"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 0}
    assert counts(dump=str(Path("d")), verify="strict") == {"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 0}
    assert counts(without=["fold-masks"])["fxgraph_cache_miss"] == 2
