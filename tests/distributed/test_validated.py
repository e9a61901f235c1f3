"""Validation among ranks: a rank compares by itself, and a graph that is wrong on one rank stops all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # ranks import these modules by their bare names

import validated
from ranks import run_several

KINDS = ("summed", "sharded")
WAYS = {"both": ["validate", "validate"], "one": ["validate", "fast"], "other": ["fast", "validate"]}


@pytest.fixture(scope="module")
def two():
    calls = {f"{kind} {way}": (validated.steps, {"kind": kind, "verify": WAYS[way]}) for kind in KINDS for way in WAYS}
    wrong = {f"{kind} wrong": (validated.wrong_on_one, {"kind": kind}) for kind in KINDS}
    # Wrong ones first: ranks that have agreed on the same collectives before do not meet again.
    return run_several(2, {**wrong, **calls}, timeout=120, compiles=True)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_compares_without_the_others(two, kind: str, way: str):
    for rank, found in enumerate(two[f"{kind} {way}"]):
        assert found["turbogr"] == pytest.approx(found["eager"], rel=1e-12)
        compares = WAYS[way][rank] == "validate"
        assert (found["compared"], "compared-in-part" in found["remarks"]) == (2 * compares, compares)
        assert "packed" in found["remarks"] and "not-compared" not in found["remarks"]


def test_a_rank_whose_graph_is_wrong_stops_all(two):
    right, wrong = two["summed wrong"]
    assert wrong["kind"] == "VerifyError" and "no rank goes on" in wrong["text"]
    assert right["kind"] == "RanksDisagree" and "differs from the captured graph" in right["text"]


def test_a_rank_that_stops_before_rows_are_exchanged_is_not_waited_for(two):
    right, wrong = two["sharded wrong"]
    assert wrong["kind"] == "VerifyError"
    assert right["kind"] == "RanksApart"
