"""Constructs that faults planted in the rules survived until they were written: each gives what eager gives."""

from __future__ import annotations

import pytest

from .aimed import LOSSES, ROWS, program
from .judge import judge


@pytest.mark.parametrize("word", [*(f"rows:{n}" for n in ROWS), *(f"loss:{n}" for n in LOSSES)])
def test_a_construct_between_masks(word):
    verdicts = [judge(program(seed, word)) for seed in (0, 1)]
    assert all(v.status == "same" for v in verdicts), [v.program.script(str(v.notes[:2])) for v in verdicts if v.wrong]


def test_a_zero_has_a_sign():
    """x * 0 is minus zero where x is negative, and some ops tell: rows that were left out would be plus zero."""
    for word in ("rows:sign-of-zero", "rows:reciprocal", "rows:zero-by-zero"):
        verdict = judge(program(0, word))
        assert verdict.status == "same" and verdict.calls, verdict.notes
