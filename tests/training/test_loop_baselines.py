"""Popularity and Markov baselines against counts by hand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.training import baselines as module
from turbogr_compile.training.data import Histories

SOME_HISTORIES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=8), min_size=1, max_size=8)


def histories(of: list[list[int]], items: int = 9) -> Histories:
    flat = np.array([i for one in of for i in one], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, of)]).astype(np.int64)
    return Histories(flat, np.zeros(len(flat), dtype=np.int64), offsets, np.arange(len(of)), np.arange(items))


def standing(key: dict[int, tuple[int, ...]], target: int) -> float:
    above = sum(k > key[target] for k in key.values())
    return above + (sum(k == key[target] for k in key.values()) - 1) / 2


@pytest.mark.parametrize("some", [2, 1 << 24])
@settings(max_examples=150, deadline=None)
@given(of=SOME_HISTORIES)
def test_as_counted_by_hand(some: int, of: list[list[int]]):
    users = [u for u, one in enumerate(of) if len(one) >= 2]
    known = [one[:-1] for one in of]
    had = Counter(i for one in known for i in one)
    followed = Counter((a, b) for one in known for a, b in pairwise(one))
    before, module.SOME = module.SOME, some
    try:
        found = module.baselines(histories(of), np.array(users, dtype=np.int64))
    finally:
        module.SOME = before
    items = range(1, 10)
    assert found["popularity"].tolist() == [standing({i: (had[i],) for i in items}, of[u][-1]) for u in users]
    assert found["markov"].tolist() == [
        standing({i: (followed[of[u][-2], i], had[i]) for i in items}, of[u][-1]) for u in users
    ]
