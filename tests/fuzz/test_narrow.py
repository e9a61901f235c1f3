"""What is judged by float64, and by how far off eager is itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from . import judge as judging
from .data import Sizes
from .fast import Fast
from .generate import generate
from .judge import Outcome, compare_narrow, judge
from .narrow import narrowed
from .program import Line, Program

EPSILON = torch.finfo(torch.float16).eps
MEANS = Program(
    (
        Line("m0", "(ids != 0).double()"), 
        Line("x0", "F.embedding(ids, E).square() * m0[..., None]"),
        Line("loss0", "((x0 @ W).tanh() * m0[..., None]).mean()"),
    ),
    "loss0", (), Sizes(), ("right", "left"), 1, dtype="float16",
)  # fmt: skip


def half(**values: float) -> Outcome:
    return Outcome({n.replace("_", " "): torch.tensor(v, dtype=torch.float16) for n, v in values.items()})


@pytest.mark.parametrize(
    "exact, expected, actual, verdict",
    [
        (1.0, 1.0, 1.0 + 2 * EPSILON, "same"),
        (1.0, 1.0, 1.1, "different"),
        (1.0, 1.1, 1.0, "same"),  # nearer than eager
        (1.0, 1.05, 0.9, "same"),  # as far off as eager
        (1.0, 1.05, 0.6, "different"),
        (2.0, 2.0, math.inf, "different"),
        (2.0, math.inf, 2.0, "same"),  # wider inside
        (2.0, math.inf, 3.0, "nan"),
        (math.nan, 2.0, 3.0, "different"),
        (math.nan, math.nan, 3.0, "nan"),
    ],
)
def test_how_far_off_a_number_may_be(exact, expected, actual, verdict):
    triple = [half(loss=1.0, output_1=x) for x in (exact, expected, actual)]
    assert compare_narrow(*triple, EPSILON)[0] == verdict


def test_whole_numbers_may_differ_where_rounding_decides():
    one, two = torch.tensor([1, 2]), torch.tensor([1, 3])
    loss = {"loss": torch.ones(())}
    found = [Outcome({**loss, "output 1": x}) for x in (one, two)]
    assert compare_narrow(found[0], found[1], found[0], EPSILON)[0] == "same"
    assert compare_narrow(found[0], found[0], found[1], EPSILON)[0] == "different"


def test_a_program_in_a_narrow_type_is_packed_and_the_same():
    verdict = judge(MEANS)
    assert (verdict.status, verdict.packed_calls) == ("same", 2), verdict.notes


def summed_first(program):
    """A mean as a sum in the narrow type that is divided afterwards."""
    return replace(program, lines=(*program.lines[:2], Line("loss0", "(x0 @ W).abs().sum().div(B * N * V)")))


@pytest.mark.parametrize("loud, status", [(1.0, "same"), (64.0, "different")])
def test_a_sum_that_overflows_is_a_fault(loud, status, monkeypatch):
    program = replace(MEANS, lines=(*MEANS.lines[:2], Line("loss0", "(x0 @ W).abs().mean()")), loud=loud)
    faulty = summed_first(program).function()
    monkeypatch.setattr(judging, "Fast", lambda fn, *args, **options: Fast(faulty, *args, **options))
    found = judge(program)
    assert found.status == status, found.notes


def test_numbers_that_a_type_lacks_become_its_largest():
    lines = (*MEANS.lines[:2], Line("loss0", "x0.masked_fill(ids[..., None] == 0, -1e9).logsumexp(1).double().sum()"))
    text = replace(MEANS, lines=lines).body
    assert "-6e+04" in text and "1e9" not in text and ".double()" not in text
    assert "-1e9" in replace(MEANS, lines=lines, dtype="bfloat16").body


def test_a_script_in_a_narrow_type_runs_and_says_same(capsys):
    exec(compile(MEANS.script("one"), "script", "exec"), {})
    assert capsys.readouterr().out.count("same") == 2


def test_embeddings_are_as_loud_as_seeds_say():
    found = [p.loud for _, p in narrowed(((str(s), generate(s)) for s in range(4)), "float16")]
    assert found == [1.0, 1.0, 16.0, 128.0]
