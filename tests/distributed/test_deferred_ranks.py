"""Deferral on two ranks: DDP in all orders of wrapping, tables over ranks, collectives, reads on one rank alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks import these modules by their bare names

from deferred_ranks import collective, ddp, programs, sharded
from ranks import run_ranks, run_several

ORDERS = ("ddp(compile(model))", "compile(ddp(model))", "model.compile()")
CALLS = {
    **{order: (ddp, {"order": order}) for order in ORDERS},
    "unused parameters": (ddp, {"order": ORDERS[0], "find_unused": True}),
    "reads on one rank": (ddp, {"order": ORDERS[0], "reads": True}),
    **{f"sharded table, {how}": (sharded, {"how": how}) for how in ("sync", "prefetch", "semi")},
    "a collective in the model": (collective, {}),
}


@pytest.fixture(scope="module")
def found():
    return run_several(2, CALLS, compiles=True)


@pytest.mark.parametrize("case", CALLS)
def test_trains_as_in_eager(found, case):
    assert all(rank["worst"] < 1e-10 for rank in found[case]), found[case]


@pytest.mark.parametrize("case", [*ORDERS, "unused parameters"])
def test_is_packed_as_with_the_loss_inside(found, case):
    assert all(rank["flops"] > 1.8 and rank["of the whole step"] <= 1.02 for rank in found[case]), found[case]


def test_random_programs_that_one_rank_reads():
    assert [rank == {"fine": 10} for rank in run_ranks(programs, 2, compiles=True, first=0, count=10)] == [True, True]
