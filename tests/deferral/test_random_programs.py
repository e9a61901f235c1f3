"""A sample of random user programs; thousands are run by `python -m tests.deferral.random_programs`."""

from __future__ import annotations

import pytest

from . import random_programs


@pytest.mark.parametrize("seed", range(40))
def test_same_as_eager_op_by_op(seed):
    verdict, source = random_programs.run(seed, op_by_op=True)
    assert verdict in random_programs.FINE, source


@pytest.mark.parametrize("seed", range(1000, 1012))
def test_same_as_eager_compiled(seed):
    verdict, source = random_programs.run(seed)
    assert verdict in random_programs.FINE, source
