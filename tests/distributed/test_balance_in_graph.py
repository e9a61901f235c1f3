"""Rows change ranks inside of a compiled step, and gradients are those of one process with the whole batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks import these modules by their bare names

import moving
from ranks import run_several


@pytest.fixture(scope="module", params=[2, 3])
def found(request):
    return run_several(request.param, {
        "eager": (moving.compared, {"compiles": False}),
        "compiled": (moving.compared, {"compiles": True}),
    }, compiles=True)  # fmt: skip


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_gradients_come_back_through_the_exchange(found, how: str):
    for rank in found[how]:
        assert rank["moved"] > 0 and rank["scale"] > 1e-3 and rank["apart"] < 1e-12, rank


def test_another_plan_needs_no_other_graph(found):
    assert all(rank["graphs"] == 1 for rank in found["compiled"])
