"""What a prologue says that it reads, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.fuzz.fast import Fast
from turbogr_compile.passes.rows.program import Program
from turbogr_compile.runtime.prologue import Unprovable

IDS = torch.tensor([[3, 1, 4, 0, 0], [2, 5, 0, 0, 0]])
RAW, OTHER, TABLE = torch.randn(2, 5, 4), torch.randn(4), torch.randn(9, 4, requires_grad=True)
INPUTS = [OTHER, RAW, TABLE, IDS]


def step(other, raw, table, ids):
    x = F.embedding(ids, table) + raw
    return ((x * (ids != 0)[..., None]) @ other).square().sum()


@pytest.fixture
def program(monkeypatch) -> Program:
    """Of a step that was called once."""
    found, run = [], Program.run

    def watched(program, inputs):
        found.append(program)
        return run(program, inputs)

    monkeypatch.setattr(Program, "run", watched)
    Fast(step, ["other", "raw", "table", "ids"], INPUTS, open_dims={"raw": (1,), "ids": (1,)}).run(*INPUTS)
    return found[0]


def test_a_prologue_says_what_it_reads(program):
    """The mask's ids, the features that must be finite, and whatever tells how long sequences are; no parameter."""
    assert program.reads() == {1, 3}


def test_rows_that_came_packed_are_those_of_their_offsets(program):
    """A graph that was made for a number of rows takes no other."""
    (chosen,) = program.sets
    assert len(replace(program, promised={chosen: 5}).checked(INPUTS).rows(chosen)) == 5
    with pytest.raises(Unprovable, match="not those of the rows that are there"):
        replace(program, promised={chosen: 6}).checked(INPUTS)
