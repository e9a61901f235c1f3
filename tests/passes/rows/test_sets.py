"""Sets of rows in fewer words: the same rows, or more, of any batch."""

from __future__ import annotations

import random

import pytest
import torch

from turbogr_compile.passes.rows.sets import Batch, Holding, Read, Seen, read, seen, spanned, united
from turbogr_compile.passes.rows.spaces import Moved, Space

WIDTHS = {1: 7, 2: 9, 3: 12, 4: 7}  # of columns, by axis; sequences are axis 0
BASE = Holding(Space((0,), (1,)), frozenset())


def batch(seed: int) -> Batch:
    sizes = {0: 3, **WIDTHS}
    made = Batch({}, lambda node: [], int, lambda axis: sizes[axis])
    made._masks[BASE] = torch.rand(3, WIDTHS[1], generator=torch.Generator().manual_seed(seed)) < 0.3
    return made


def chain(drawn: random.Random, plain: bool):
    """A few moves and ranges, written down as they come or in few words."""
    term = BASE
    for _ in range(drawn.randint(1, 6)):
        if drawn.random() < 0.4:
            least, most = -drawn.randint(0, 3), drawn.randint(0, 4)
            term = Seen(term, least, most) if plain else seen(term, least, most)
        else:
            into = Space((0,), (drawn.choice([*WIDTHS, 1, 1]),))
            move = Moved(term.space, into, drawn.randint(-4, 4))
            term = Read(move, term) if plain else read(move, term)
    return term


@pytest.mark.parametrize("seed", range(60))
def test_what_is_read_is_among_the_rows(seed):
    plain, short = (chain(random.Random(seed), p) for p in (True, False))
    assert plain.space == short.space
    for at in range(3):
        assert not (batch(at).mask(plain) & ~batch(at).mask(short)).any()


@pytest.mark.parametrize("seed", range(30))
def test_ranges_that_meet_are_one_and_the_same_rows(seed):
    drawn = random.Random(seed)
    terms = frozenset(
        drawn.choice([BASE, Seen(BASE, (first := drawn.randint(-4, 4)), first + drawn.randint(0, 3))])
        for _ in range(drawn.randint(1, 5))
    )
    found = united(terms)
    assert len(found) <= len(terms) and united(found) == found
    for at in range(3):
        assert torch.equal(batch(at).union(terms), batch(at).union(found))
        assert not (batch(at).union(terms) & ~batch(at).union(spanned(terms))).any()


def test_there_and_back_is_where_it_began():
    here, wide = Space((0,), (1,)), Space((0,), (2,))
    back = read(Moved(wide, here, -2), read(Moved(here, wide, 2), BASE))
    assert back == BASE
    causal = read(Moved(wide, here, -2), seen(read(Moved(here, wide, 0), BASE), -2, 0))
    assert causal == Seen(BASE, 0, 2) and united(frozenset([BASE, causal])) == {causal}


def test_a_stack_of_causal_convolutions_needs_one_range():
    here, wide = Space((0,), (1,)), Space((0,), (2,))
    wanted = frozenset([BASE])
    for _ in range(20):
        wanted = united(
            wanted | {read(Moved(wide, here, -2), seen(read(Moved(here, wide, 0), t), -2, 0)) for t in wanted}
        )
    assert wanted == {Seen(BASE, 0, 40)}
