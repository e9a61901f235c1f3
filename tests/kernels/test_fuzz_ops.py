"""Some calls of `make fuzz-ops`, and that its judge sees what it is there for."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz_ops import judge as judging
from tests.fuzz_ops.calls import FAMILY, OPS, Call, call, first
from tests.fuzz_ops.judge import judge
from turbogr_compile.kernels.contract import tensors
from turbogr_compile.kernels.declare import CONTRACTS


def test_calls_from_contracts():
    for case in range(120):
        made = call(case)
        assert not judge(made), (case, made.op, made.kind)


def test_most_calls_that_should_be_valid_are():
    refused = {op: 0 for op in OPS}
    for family in range(300):
        made = first(family)
        try:
            CONTRACTS[made.op].check(*made.arguments)
        except (ValueError, IndexError):
            refused[made.op] += 1
    assert sum(refused.values()) < 5, refused


def test_a_case_says_everything():
    """Whatever was called before it."""
    cases = range(3 * len(FAMILY))
    forwards, backwards = [call(case) for case in cases], [call(case) for case in reversed(cases)]
    for a, b in zip(forwards, reversed(backwards), strict=True):
        assert a.op == b.op and a.kind == b.kind
        for x, y in zip(tensors(tuple(a.arguments)), tensors(tuple(b.arguments)), strict=True):
            assert x.shape == y.shape and x.stride() == y.stride()
            assert x.is_meta or torch.equal(x.nan_to_num(), y.nan_to_num())


def rows(*ids: int) -> Call:
    return Call("gather_rows", "valid", [torch.arange(6.0).view(3, 2), torch.tensor(ids)])


@pytest.mark.parametrize(
    "wrong, said",
    [
        (lambda x, rows: x.index_select(0, rows) + 1, "differs from the reference"),
        (lambda x, rows: x.index_select(0, rows)[:1], "that of the reference"),
        (lambda x, rows: x.index_select(0, rows).double(), "that of the reference"),
        (lambda x, rows: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_reference_that_differs_is_seen(monkeypatch, wrong, said):
    assert not judge(rows(2, 0))
    monkeypatch.setitem(judging.REFERENCES, "gather_rows", wrong)
    try:
        assert said in judge(rows(2, 0))
    except ZeroDivisionError:
        assert said == "ZeroDivisionError"  # no error that an op may raise


def test_a_contract_that_forgets_is_seen(monkeypatch):
    class Forgetful:
        def check(self, *arguments):
            pass

    monkeypatch.setitem(judging.CONTRACTS, "gather_rows", Forgetful())
    assert "the contract holds, and the op raises" in judge(rows(3))
