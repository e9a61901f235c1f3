"""A sample of random user programs; thousands are run by `python -m tests.deferral.random_programs`."""

from __future__ import annotations

import pytest
import torch

from turbogr_compile.deferral.step import Programs

from . import random_programs
from .programs import IDS, assert_same, cross_entropy


@pytest.mark.parametrize("seed", range(40))
def test_same_as_eager_op_by_op(seed):
    verdict, source = random_programs.run(seed, op_by_op=True)
    assert verdict in random_programs.FINE, source


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_same_as_eager_compiled(seed):
    verdict, source = random_programs.run(seed)
    assert verdict in random_programs.FINE, source


def best_loss(model, called):
    optimizer, best = torch.optim.SGD(model.parameters(), lr=0.5), None
    for i in range(3):
        loss = cross_entropy(called(IDS.roll(i, 0)))
        best = loss if best is None or loss < best else best
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return best


def test_an_earlier_loss_that_is_only_compared_is_left_alone(monkeypatch):
    """A step is one function, which the earlier loss goes into, too: its graph is gone, and has no gradient to get."""
    run = Programs.run
    one = random_programs.one_function
    monkeypatch.setattr(Programs, "run", lambda _, plan, ready=lambda: None: run(Programs(one), plan, ready))
    assert_same(best_loss)
