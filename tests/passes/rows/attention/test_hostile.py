"""Hostile programs: what is accepted is right on every batch that its checks let through.

TURBOGR_PROGRAMS=5000 pytest tests/passes/rows/attention/test_hostile.py      more of them
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

from .hostile import Program, constructs, tried

PROGRAMS = int(os.environ.get("TURBOGR_PROGRAMS", "0"))
FIRST = int(os.environ.get("TURBOGR_SEED", "0"))


@pytest.fixture(autouse=True)
def wide_numbers():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run(programs: list[Program], symbolic: bool = False, dtype: torch.dtype = torch.float64) -> Counter[str]:
    seen: Counter[str] = Counter()
    for program in programs:
        outcome = tried(program, symbolic, dtype)
        assert not outcome.complaints, f"{outcome.complaints}\n{program}\n{outcome.text}"
        seen[outcome.status] += 1
        for found in outcome.found:
            seen[found.split(":")[0]] += 1
    return seen


@pytest.mark.parametrize("construct", constructs())
def test_every_construct(construct):
    """A few programs that contain it; some of them run."""
    seen = run([Program(seed, construct) for seed in range(2)])
    assert seen["invalid"] < 2


def test_symbolic_sizes():
    seen = run([Program(seed) for seed in range(20)], symbolic=True)
    assert seen["accepted"] >= 4 and seen["invalid"] < 5


def test_single_precision():
    torch.set_default_dtype(torch.float32)
    seen = run([Program(seed) for seed in range(30)], dtype=torch.float32)
    assert seen["accepted"] >= 6


@pytest.mark.slow
def test_more_of_every_construct():
    seen = run([Program(seed, construct) for construct in constructs() for seed in range(100, 110)])
    assert seen["accepted"] > 0.3 * sum(seen[s] for s in ("accepted", "refused"))


@pytest.mark.skipif(not PROGRAMS, reason="by command")
def test_as_many_as_asked_for(capsys):
    symbolic = os.environ.get("TURBOGR_SYMBOLIC", "") == "1"
    seen = run([Program(seed) for seed in range(FIRST, FIRST + PROGRAMS)], symbolic)
    with capsys.disabled():
        print(f"\nseeds {FIRST}..{FIRST + PROGRAMS - 1}: {dict(seen)}")
