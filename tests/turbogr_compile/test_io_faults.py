"""A disk that is full or breaks at any call: what is being done goes on or stops with a message, and no file is half.

The calls are those to the system itself (faulty_io.c), so nothing that writes is left out, in torch or in NumPy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux") or shutil.which("gcc") is None, reason="a library to load"),
    pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="something else is loaded before"),
]
# The least number of calls that each makes: a fault that is injected nowhere shows nothing.
SITES = {"file": 6, "checkpoint": 25, "cache": 50, "dump": 80, "run": 150}


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("library") / "faulty_io.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(made), str(HERE / "faulty_io.c"), "-ldl"], check=True)
    return made


def injected(library: Path, folder: Path, subject: str, every: int) -> dict[str, int]:
    command = [sys.executable, str(HERE / "faulty_writer.py"), str(library), str(folder), subject, str(every)]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("subject, every", [("file", 1), ("checkpoint", 1), ("cache", 3), ("dump", 11), ("run", 41)])
def test_some_calls_fail(library, tmp_path, subject, every):
    found = injected(library, tmp_path, subject, every)
    assert found["sites"] >= SITES[subject] // every
    assert found["stopped"] > 0 or subject == "dump"


@pytest.mark.slow
@pytest.mark.parametrize("subject", ["cache", "dump", "run"])
def test_every_call_fails(library, tmp_path, subject):
    found = injected(library, tmp_path, subject, 1)
    assert found["sites"] >= SITES[subject]
    print(subject, found)
