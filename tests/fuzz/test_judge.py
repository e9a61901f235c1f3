"""The judge itself: programs are what their seeds say, differences are seen, failures become small."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from .data import KINDS, Sizes, make_batch
from .fast import Fast
from .generate import generate, words
from .judge import Outcome, compare, explained, inputs, judge, outcome, quiet
from .program import Line, Program
from .shrink import Shrinker, simpler, without_dead_lines
from .work import lost, measure

SUM = Program(
    (Line("x0", "F.embedding(ids, E)"), Line("m0", "ids != 0"), Line("loss0", "((x0 @ W) * m0[..., None]).sum()")),
    "loss0", (), Sizes(), ("right", "left", "full"), 1,
)  # fmt: skip


def test_a_seed_is_a_program():
    assert generate(5).text == generate(5).text != generate(6).text
    assert len(words()) == len(set(words()))


@pytest.mark.parametrize("word", words()[::40])
def test_a_forced_word_is_there(word):
    assert any(word in generate(seed, word).words for seed in range(6))


def test_a_script_runs_and_says_same(capsys):
    exec(compile(SUM.script("one"), "script", "exec"), {})
    said = capsys.readouterr().out
    assert said.count("same") == 3 and "graph" in said


def test_an_ordinary_program_is_packed_and_the_same():
    verdict = judge(SUM)
    assert verdict.status == "same" and verdict.packed_calls == 3


def test_every_kind_of_batch_can_be_made():
    for kind in KINDS:
        batch = make_batch(kind, 3, Sizes())
        assert batch.valid.shape == (3, 6) and batch.lens.shape == (3,)


def found(**values: float) -> Outcome:
    return Outcome({n.replace("_", " "): torch.tensor(v, dtype=torch.float64) for n, v in values.items()})


@pytest.mark.parametrize(
    "expected, actual, verdict",
    [
        (found(loss=1.0), found(loss=1.0 + 1e-12), "same"),
        (found(loss=1.0), found(loss=1.0 + 1e-6), "different"),
        (found(loss=1.0, gradient_of_E=2.0), found(loss=1.0, gradient_of_E=2.1), "different"),
        (found(loss=1.0, gradient_of_E=1e-9), found(loss=1.0, gradient_of_E=1e-9 + 1e-15), "same"),
        (found(loss=math.nan), found(loss=math.nan), "same"),
        (found(loss=math.nan), found(loss=1.0), "nan"),
        (found(loss=1.0), found(loss=math.nan), "different"),
        (found(loss=1.0, output_1=math.inf), found(loss=1.0, output_1=-math.inf), "nan"),
        (Outcome(error=IndexError("a")), Outcome(error=IndexError("b")), "same"),
        (Outcome(error=IndexError("a")), found(loss=1.0), "raises"),
        (found(loss=1.0), Outcome(error=IndexError("a")), "crash"),
    ],
)
def test_what_counts_as_the_same(expected, actual, verdict):
    assert compare(expected, actual, 1e-9)[0] == verdict


def test_zero_times_infinity_is_told_from_a_fault():
    """Pads are divided by zero, then multiplied with it: nan in eager; turbogr never computes them."""
    lines = [SUM.lines[0], Line("m0", "(ids != 0)[..., None]"), Line("loss0", "((x0 / m0) @ W * m0).sum()")]
    verdict = judge(SUM.with_lines(lines))
    assert verdict.status == "assumed" and "eager alone" in verdict.notes[0]


LARGE = "(F.embedding(ids, E) @ F.embedding(ids, E).mT * 1e6 + (ids == 0)[:, None] * {mask}).softmax(-1)"


@pytest.mark.parametrize("loud, mask", [(1e3, "-1e9"), (1.0, "-1e5")], ids=["products", "multiplied afterwards"])
@pytest.mark.parametrize("what", ["a mask", "a fault"])
def test_large_scores_are_told_from_a_fault(what, loud, mask):
    """A finite mask does not hide scores of 1e6 and more: what is wrong for small ones too is not excused by them."""
    lines = [*SUM.lines[:2], Line("p0", LARGE.format(mask=mask)), Line("loss0", "(p0 @ x0 * m0[..., None]).sum()")]
    program = replace(SUM.with_lines(lines), loud=loud)
    fault = 0.0 if what == "a mask" else 1e-3
    removed = [replace(line, text=line.text.replace(mask, "-1e300")) for line in program.lines]

    def compiled(*values):
        return program.with_lines(removed).function()(*values) * (1 + fault)

    with quiet():
        step = (program.function(), program.arguments, inputs(program, 0))
        wanted, got = outcome(*step), outcome(compiled, *step[1:])
        verdict = explained(compare(wanted, got, 1e-9), step, wanted, got, 1e-9, compiled)
    assert verdict[0] == ("assumed" if what == "a mask" else "different"), verdict


WRITTEN_OUT = "(F.embedding(ids, E) @ F.embedding(ids, E).mT {}).masked_fill((ids == 0)[:, None], -torch.inf).exp()"


@pytest.mark.parametrize("moved", ["* 1e3", "- 1e5"], ids=["overflow", "vanish"])
@pytest.mark.parametrize("off, status", [(0.0, "assumed"), (1e-3, "nan")])
def test_exponentials_out_of_range_are_told_from_a_fault(off, status, moved):
    lines = [*SUM.lines[:2], Line("e0", WRITTEN_OUT.format(moved)), Line("p0", "e0 / e0.sum(-1, keepdim=True)")]
    program = SUM.with_lines([*lines, Line("loss0", "(p0 @ x0 * m0[..., None]).sum()")])
    stable = [replace(x, text=x.text.replace(".exp()", ".softmax(-1)")) for x in program.lines]

    def compiled(*values):
        return program.with_lines(stable).function()(*values) * (1 + off)

    with quiet():
        step = (program.function(), program.arguments, inputs(program, 0))
        wanted, got = outcome(*step), outcome(compiled, *step[1:])
        verdict = explained(compare(wanted, got, 1e-9), step, wanted, got, 1e-9, compiled)
    assert verdict[0] == status, verdict


def test_rounding_that_the_program_magnifies_is_told_from_a_fault():
    swallowed = Line("x0", "F.embedding(ids, E) + 1e9 - 1e9")
    program = SUM.with_lines([swallowed, SUM.lines[1], Line("loss0", "((x0 @ W).square() * m0[..., None]).sum()")])
    with quiet():
        step = (program.function(), program.arguments, inputs(program, 0))
        wanted = outcome(*step)
        for off, verdict in ((1e-7, "rounding"), (1e-3, "different")):
            got = Outcome({n: v * (1 + off) for n, v in wanted.values.items()})
            assert explained(compare(wanted, got, 1e-9), step, wanted, got, 1e-9, step[0])[0] == verdict


def test_an_open_size_that_tracing_closed_is_compiled_anew():
    lines = (SUM.lines[0], Line("loss0", "(x0.sum(1) * (2.0 if N == 6 else 3.0)).sum()"))
    program = Program(lines, "loss0", (), replace(Sizes(), open=True), ("right", "wide"), 1)
    assert judge(program).status == "same"


def test_buffers_outputs_and_gradients_of_inputs_are_compared():
    lines = (Line("x0", "feats @ Q"), Line("e0", "ema.add_(x0.detach().mean((0, 1)))"), Line("loss0", "x0.sum()"))
    program = Program(lines, "loss0", ("x0",), Sizes(), ("right",), 1)
    with quiet():
        values = outcome(program.function(), program.arguments, inputs(program, 0)).values
    assert set(values) == {"loss", "output 1", "gradient of feats", "gradient of Q", "buffer ema"}
    assert bool(values["buffer ema"].abs().sum() > 0)


def test_shrinking_keeps_what_matters_and_drops_the_rest():
    program = generate(11)
    small = Shrinker(program, lambda p: "E" in p.arguments and judge(p).status == "same", 60).run()
    assert "E" in small.arguments and len(small.body) < len(program.body) and len(small.kinds) == 1


def test_parts_of_an_expression_are_simpler():
    assert set(simpler("(a + b).sum(1, keepdim=True)")) == {
        "a + b", "a.sum(1, keepdim=True)", "b.sum(1, keepdim=True)", "(a + b).sum(1)",
    }  # fmt: skip


def test_lines_nobody_reads_go():
    dead = SUM.with_lines([*SUM.lines[:2], Line("y0", "x0 * 2"), SUM.lines[2]])
    assert without_dead_lines(dead).lines == SUM.lines


def test_a_program_that_lost_rows_is_named():
    old = measure(SUM)
    assert old["packed"] and old["work"]["right"][0][0] < old["work"]["right"][1][0]
    more = {**old, "work": {k: [[p[0] * 2, *p[1:]], e] for k, (p, e) in old["work"].items()}}
    assert lost([old], [old]) == [] and "rows" in lost([old], [more])[0]
    assert "no longer packed" in lost([old], [{**old, "packed": False}])[0]


def test_nan_where_it_matters_is_a_fault():
    """A wanted query that sees no key: eager gives nan, and whoever gives a number is wrong."""
    lines = [SUM.lines[0], Line("s0", "x0.masked_fill((ids != 9)[..., None], -torch.inf).softmax(-1)")]
    program = SUM.with_lines([*lines, Line("loss0", "(s0 @ W).sum()")])
    with quiet():
        step = (program.function(), program.arguments, inputs(program, 0))
        wanted = outcome(*step)
        got = Outcome({n: v.nan_to_num(0.25) for n, v in wanted.values.items()})
        assert explained(compare(wanted, got, 1e-9), step, wanted, got, 1e-9, step[0])[0] == "nan"


HIDDEN = "torch.where(ids == 0, -torch.inf, 1.0) * (wts > 0.8)"


SPOILED = """
x0 = F.embedding(ids, E) + P
x1 = x0 * (torch.arange(N) < lens[:, None]).unsqueeze(-1)
m1 = maskf.bool()
y0 = F.embedding(ids, E2)
h0 = (x1 @ Q).view(B, N, H, D // H).transpose(1, 2)
h1 = (y0 @ Kw).view(B, N, H, D // H).transpose(1, 2)
h2 = y0.view(B, N, H, D // H).transpose(1, 2)
s1 = torch.where(torch.ones(N, N).tril().bool() & m1[:, None, None, :], h0 @ h1.transpose(-1, -2), float('-inf'))
s2 = s1 - s1.amax(-1, keepdim=True)
p0 = (s2 - s2.logsumexp(-1, keepdim=True)).exp()
x2 = F.layer_norm(x1 + (p0 @ h2).transpose(1, 2).reshape(B, N, D) @ O, (D,))
x3 = x2 + (x2 * m1[..., None]).sum(1, keepdim=True) * 0.1
m2 = maski == 1
a0 = (torch.arange(N)[:, None] >= torch.arange(N)) & m2[:, None, :]
o2 = torch.bmm(x3 @ Q, (x3 @ Kw).permute(0, 2, 1)).masked_fill(~a0, -3.0).relu() @ x3
r0 = ((o2 @ w).masked_fill(~m2, -1e9).softmax(1)[..., None] * o2).sum(1)
loss2 = r0.sum() + ((o2 * m2.double()[..., None]) ** 2).mean() * 0.5
"""


def test_a_gradient_beside_those_that_are_no_numbers_has_their_scale():
    """It is all but zero, by rounding: the others say how large it might be, once nothing spoils them."""
    lines = [Line(name, text) for name, _, text in (x.partition(" = ") for x in SPOILED.strip().splitlines())]
    program = Program(tuple(lines), "loss2", (), Sizes(9, 9, 4, 2, 9, 4, 9), ("left", "disagree"), 2330599)
    assert judge(program).status == "assumed"


@pytest.mark.parametrize("factor, verdict", [(HIDDEN, "assumed"), ("wts", "nan")])
def test_inputs_that_are_not_finite_excuse_nothing(factor, verdict):
    """Pads of `wts` are infinite: what that matters to is checked, and what it does not is assumption D as ever."""
    lines = [SUM.lines[0], Line("z0", factor), Line("loss0", "(x0 * z0[..., None])[ids != 0].sum()")]
    program = replace(SUM.with_lines(lines), kinds=("inf-pads",))
    with quiet():
        step = (program.function(), program.arguments, inputs(program, 0))
        wanted = outcome(*step)
        got = Outcome({n: v.nan_to_num(0.0) for n, v in wanted.values.items()})
        found = explained(compare(wanted, got, 1e-9), step, wanted, got, 1e-9, step[0])
    assert found[0] == verdict, found


@pytest.mark.parametrize("off, status", [(0.0, "assumed"), (1e-3, "different")])
def test_eagers_nan_made_a_number_is_told_from_a_fault(off, status, monkeypatch):
    """-inf makes NaN of SiLU in eager, of pads too, where the packed step has nothing; nan_to_num hides that."""

    class Faulty(Fast):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            run = self.run
            self.run = lambda *values: run(*values) * (1 + off)

    monkeypatch.setitem(judge.__globals__, "Fast", Faulty)
    lines = [Line("x0", "F.embedding(ids, E) * (ids != 0)[..., None]"), Line("a0", "torch.ones(N, N).tril().bool()")]
    lines += [Line("p0", "F.silu((x0 @ x0.mT).masked_fill(~a0, float('-inf')))")]
    lines += [Line("loss0", "(p0 @ x0 * x0).nan_to_num().sum()")]
    assert judge(SUM.with_lines(lines)).status == status
