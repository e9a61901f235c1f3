"""Some calls of `make fuzz-ops`, and that its judge sees what it is there for."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz_ops import judge as judging
from tests.fuzz_ops.calls import OPS, Call, Maker
from tests.fuzz_ops.judge import judge
from turbogr_compile.kernels.declare import CONTRACTS


def test_calls_from_contracts():
    for case in range(120):
        call = Maker(case).call()
        assert not judge(call), (case, call.op, call.kind)


def test_most_calls_that_should_be_valid_are():
    refused = {op: 0 for op in OPS}
    for case in range(600):
        call = Maker(case).call()
        if call.kind == "valid":
            try:
                CONTRACTS[call.op].check(*call.arguments)
            except (ValueError, IndexError):
                refused[call.op] += 1
    assert sum(refused.values()) < 30, refused


ROWS = Call("gather_rows", "valid", [torch.arange(6.0).view(3, 2), torch.tensor([2, 0])])


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
    assert not judge(ROWS)
    monkeypatch.setitem(judging.REFERENCES, "gather_rows", wrong)
    try:
        assert said in judge(ROWS)
    except ZeroDivisionError:
        assert said == "ZeroDivisionError"  # no error that an op may raise


def test_a_contract_that_forgets_is_seen(monkeypatch):
    class Forgetful:
        def check(self, *arguments):
            pass

    monkeypatch.setitem(judging.CONTRACTS, "gather_rows", Forgetful())
    beyond = Call("gather_rows", "almost", [ROWS.arguments[0], torch.tensor([3])])
    assert "the contract holds, and the op raises" in judge(beyond)
