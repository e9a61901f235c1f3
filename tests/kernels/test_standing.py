"""Where products stand among those of all rows: counted as one would with all of them at hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.kernels import standing as module

SIZES = st.sampled_from([1, 2, 11, 12, 13, 31, 32, 33, 100, 700])


@pytest.fixture(params=["kernels", "torch"])
def either(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(module, "library", lambda dtype: None)
        monkeypatch.setattr(module, "NUMBERS", 50)


@pytest.mark.usefixtures("either")
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), SIZES, st.sampled_from([1, 3, 31, 32, 33, 64, 100]), st.booleans(), st.integers(0, 2**31))
def test_counts_are_those_of_a_full_ranking(queries: int, rows: int, depth: int, wide: bool, seed: int):
    """Small whole numbers: products are exact, and many of them equal."""
    made, dtype = torch.Generator().manual_seed(seed), torch.float64 if wide else torch.float32
    query, table = (torch.randint(-2, 3, (n, depth), generator=made).to(dtype) for n in (queries, rows))
    skip = torch.randint(-1, rows + 2, (queries,), generator=made)
    named = torch.randint(0, rows, (queries,), generator=made)
    own = module.own_products(query, table[named])
    scores = query @ table.T
    assert torch.equal(own, scores.gather(1, named[:, None])[:, 0])
    above, equal = module.standing(query, table, own, skip)
    counts = torch.arange(rows) != skip[:, None]
    assert torch.equal(above, ((scores > own[:, None]) & counts).sum(1))
    assert torch.equal(equal, ((scores == own[:, None]) & counts).sum(1))


@pytest.mark.parametrize("depth", [7, 64, 96])
def test_rows_that_are_equal_tie_wherever_they_lie(depth: int):
    made = torch.Generator().manual_seed(depth)
    query, row = torch.randn(50, depth, generator=made), torch.randn(1, depth, generator=made)
    own = module.own_products(query, row.expand(50, depth).contiguous())
    above, equal = module.standing(query, row.repeat(1111, 1), own, torch.full((50,), 1100))
    assert not above.any() and (equal == 1110).all()


def test_what_is_no_number_is_neither_above_nor_equal():
    nan, inf = float("nan"), float("inf")
    query, table = torch.ones(2, 1), torch.tensor([[nan], [inf], [1.0], [-inf]])
    above, equal = module.standing(query, table, torch.tensor([1.0, nan]), torch.tensor([-1, -1]))
    assert above.tolist() == [1, 0] and equal.tolist() == [1, 0]


def test_any_number_of_threads_counts_the_same(monkeypatch):
    from turbogr_compile.kernels.cpu import standing as cpu

    query, table = torch.randn(30, 40), torch.randn(5000, 40)
    own, skip = module.own_products(query, table[:30]), torch.arange(30)
    alone = module.standing(query, table, own, skip)
    monkeypatch.setattr(cpu, "threads_for", lambda numbers: 3)
    for one, other in zip(alone, module.standing(query, table, own, skip), strict=True):
        assert torch.equal(one, other)


def test_memory_does_not_grow_with_the_table():
    """Scores of these would take 400 MB."""
    from turbogr_compile.training.memory import Peak

    query, table = torch.randn(1000, 8), torch.randn(100_000, 8)
    own = module.own_products(query, table[:1000])
    peak = Peak()
    module.standing(query, table, own, torch.arange(1000))
    assert (peak.bytes() or 0) < 16 << 20


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="skip"):
        module.standing(torch.ones(2, 3), torch.ones(4, 3), torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="D"):
        module.standing(torch.ones(2, 3), torch.ones(4, 2), torch.ones(2), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("which", ["rows", "own"])
def test_numbers_of_two_types_are_refused(which: str):
    """A kernel would read the bits of one as the other."""
    given = {"queries": torch.randn(4, 8), "rows": torch.randn(4, 8), "own": torch.zeros(4)}
    given[which] = given[which].double()
    skip = torch.full((4,), -1)
    with pytest.raises((TypeError, ValueError), match=which):
        module.standing(**given, skip=skip)
    if which == "rows":
        with pytest.raises((TypeError, ValueError), match=which):
            module.own_products(given["queries"], given["rows"])
