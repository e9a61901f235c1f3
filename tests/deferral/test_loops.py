"""Loops that people write and loops that they install: trained as eager does, packed as with the loss inside."""

from __future__ import annotations

import importlib.machinery
import json
import os
import subprocess
import sys

import pytest
import torch

from turbogr_compile import _torch

from . import loops
from .loops import LOOPS, Checkpointed, judged

NEEDED = {"trainer": ("transformers", "accelerate"), "lightning": ("lightning",), "accelerate": ("accelerate",)}
# `make test` installs them there, beside the packages: they would bring another torch.
PACKAGES = os.environ.get("TURBOGR_LOOPS", "")
PATH = os.pathsep.join(p for p in (os.environ.get("PYTHONPATH", ""), PACKAGES) if p)


def assert_trained_and_packed(found, tolerance=1e-12):
    assert found["worst"] <= tolerance < found["moved"], found
    assert found["saved"] > 2 and found["of the whole step"] <= 1.02, found


def installed(name: str) -> bool:
    known = importlib.machinery.PathFinder
    return all(known.find_spec(p, [*sys.path, *PATH.split(os.pathsep)]) is not None for p in NEEDED[name])


@pytest.mark.parametrize("name", LOOPS)
def test_of_libraries(name):
    if not installed(name):
        pytest.skip(f"{' and '.join(NEEDED[name])} not installed")
    command = [sys.executable, "-m", "tests.deferral.loops", name]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PATH})
    assert run.returncode == 0, run.stderr[-3000:]
    assert_trained_and_packed(json.loads(run.stdout.splitlines()[-1]))


@pytest.fixture(autouse=True)
def layers_are_traced():
    _torch.trace_transformer_layers()


@pytest.mark.parametrize("loop", [loops.accumulated, loops.by_autograd_grad])
def test_plain(loop):
    assert_trained_and_packed(judged(loop))


def test_two_backwards():
    assert_trained_and_packed(judged(loops.two_backwards, losses=loops.two_losses))


def test_activation_checkpointing():
    assert_trained_and_packed(judged(loops.accumulated, kind=Checkpointed))


def test_mixed_precision_with_a_scaler():
    torch.set_default_dtype(torch.float32)
    assert_trained_and_packed(judged(loops.scaled), tolerance=1e-2)
