"""Option `capacity`: packed rows in a few sizes. Dummy rows change neither loss nor gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, note, settings

import turbogr_compile
from turbogr_compile import OptionError
from turbogr_compile.passes.rows.program import Program, Rows, RowSet
from turbogr_compile.pipeline.capacity import Capacity
from turbogr_compile.pipeline.options import Options
from turbogr_compile.runtime.statistics import statistics

from .batches import SHAPES, Batch, batch
from .harness import Graphs, differences, outcome, step
from .test_property import PROPERTY, PUBLISHED, kinds, sizes, specs
from .zoo import SLOT, Model, Spec

# --- the option --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "rows", "expected"),
    [
        (8, (1, 8, 9), (8, 8, 16)),
        (1, (1, 5), (1, 5)),
        ("8", (3,), (8,)),
        ("pow2", (1, 2, 3, 4, 5, 64, 65), (1, 2, 4, 4, 8, 64, 128)),
        ((4, 10), (1, 4, 5, 10, 11), (4, 4, 10, 10, None)),
        ("4, 10", (5, 11), (10, None)),
        ([7], (7, 8), (7, None)),
    ],
    ids=str,
)
def test_buckets(option: Any, rows: tuple[int, ...], expected: tuple[int | None, ...]):
    capacity = Options.read({"capacity": option}).capacity
    assert tuple(capacity.rounded(r) for r in rows) == expected
    assert Capacity.read(capacity) is capacity


@pytest.mark.parametrize("value", [0, -8, 2.5, True, "", "pow3", "8,,9", "8,x", (), (8, 8), (16, 8), (8, "9"), {8: 1}],
                         ids=str)  # fmt: skip
def test_other_values_are_one_clear_error(value: Any):
    with pytest.raises(OptionError, match=r"option 'capacity' takes .*'pow2'.*; got"):
        Options(capacity=value)


def test_none_is_the_default_and_the_environment_is_read():
    assert Options.read({}, {}).capacity is None
    assert Options.read({}, {"TURBOGR_CAPACITY": "4,8"}).capacity == Capacity(sizes=(4, 8))
    assert Options.read({"capacity": 2}, {"TURBOGR_CAPACITY": "4,8"}).capacity == Capacity(step=2)


# --- results -----------------------------------------------------------------------------------------


class Rounded:
    """A step compiled with capacity, next to an equal model for eager; sizes of row sets by call."""

    def __init__(self, model: Model, capacity: Any, monkeypatch: pytest.MonkeyPatch, target: str = "eager") -> None:
        torch._dynamo.reset()
        self.model, self.reference = model, copy.deepcopy(model)
        self.graphs = Graphs()
        self.calls: list[dict[RowSet, tuple[int, int]]] = []  # real rows, rows
        self.run = turbogr_compile.compile(
            step, target=target, on_error="raise", verify="fast", instruments=(self.graphs,), capacity=capacity
        )
        run = Program.run

        def watched(program: Program, inputs: Sequence[Any]) -> Any:
            rows = program.checked(inputs)
            self.calls.append({s: (len(rows.rows(s)), rows.size(s)) for s in program.sets})
            return run(program, inputs)

        monkeypatch.setattr(Program, "run", watched)

    def compare(self, given: Batch) -> None:
        expected, actual = outcome(step, self.reference, given), outcome(self.run, self.model, given)
        found = differences(expected, actual)
        assert not found, "\n".join([f"{self.model.spec}: not what eager gives", *found])

    @property
    def dummies(self) -> int:
        return sum(size - real for call in self.calls for real, size in call.values())


def check(spec: Spec, size: tuple[int, int, int], kinds: Sequence[str], capacity: Any, patch: Any) -> Rounded:
    b, n, d = size
    compiled = Rounded(spec.model(n, d), capacity, patch)
    for seed, kind in enumerate(kinds):
        compiled.compare(batch(kind, seed, b, n, spec.pad))
    return compiled


# Every way in which rows leave a set.
EXITS = [
    "standard", "layers=1 loss=ce-weighted", "layers=1 loss=ce-masked", "layers=1 loss=log-softmax-gather",
    "layers=1 loss=bce-masked", "layers=1 loss=ce-per-sequence", "layers=1 loss=cosine-unclamped after=times",
    "layers=1 readout=masked-mean loss=ce-plain", "layers=1 readout=softmax-pool loss=ce-plain",
    "layers=1 readout=gather loss=ce-plain", "layers=1 readout=shifted loss=ce-labels", "layers=1 readout=boolean",
    "layers=1 frame=interleaved", "layers=1 attend=sdpa-causal mask=causal",
]  # fmt: skip


@pytest.mark.parametrize("text", EXITS)
def test_exits(text: str, monkeypatch: pytest.MonkeyPatch):
    """As they come, and with dummies whose indices each name a row of their own: they look like no row at all."""
    compiled = check(Spec.parse(text), (4, 6, 8), ["graded", "right"], 7, monkeypatch)
    random, filled = torch.Generator().manual_seed(0), Rows.filled

    def garbage(rows: Rows, chosen: RowSet, values: torch.Tensor, dummy: int | None = None) -> torch.Tensor:
        out = filled(rows, chosen, values, dummy)
        if dummy is None:
            count = len(out) - len(values)
            out[len(values) :] = values[torch.randint(len(values), (count,), generator=random)]
        return out

    monkeypatch.setattr(Rows, "filled", garbage)
    for kind in ("graded", "right", "holes", "length-one"):
        compiled.compare(batch(kind, 0, 4, 6))
    assert compiled.graphs.count == 1 and len(compiled.calls) >= 5
    assert compiled.dummies > 0


PAIRS = {"SASRec": 8, "HSTU": "pow2", "language model": (3, 12, 40), "candidates": 16}


@pytest.mark.parametrize("name", PAIRS)
def test_published(name: str, monkeypatch: pytest.MonkeyPatch):
    check(Spec.parse(PUBLISHED[name]), (4, 8, 8), ["right", "left", "some-empty", "full"], PAIRS[name], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [8, 16, "pow2", (3, 12, 40)], ids=str)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_with_all_batches(name: str, capacity: Any, monkeypatch: pytest.MonkeyPatch):
    check(Spec.parse(PUBLISHED[name]), (4, 8, 8), list(SHAPES), capacity, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("slot", SLOT)
def test_every_idiom(slot: str, monkeypatch: pytest.MonkeyPatch):
    for place, idiom in enumerate(SLOT[slot]):
        spec = replace(Spec(layers=1), **{slot: idiom}).mended()
        with monkeypatch.context() as patch:
            check(spec, (4, 6, 8), ["right", "holes", "left", "length-one"], ("pow2", 7)[place % 2], patch)


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_any_model(examples: int):
    @settings(PROPERTY, max_examples=examples)
    @given(specs(), sizes, kinds)
    def gives_what_eager_gives(spec: Spec, size: tuple[int, int, int], kinds: list[str]) -> None:
        note(f"{spec}  B, N, D = {size}  {kinds}")
        with pytest.MonkeyPatch.context() as patch:
            check(spec, size, kinds, 7, patch)

    gives_what_eager_gives()


def test_on_cpu_with_kernels(monkeypatch: pytest.MonkeyPatch):
    compiled = Rounded(Spec(layers=1).model(8, 8), "pow2", monkeypatch, target="cpu")
    for kind in ("right", "holes", "length-one"):
        compiled.compare(batch(kind, 0, 4, 8))
    assert compiled.dummies > 0


# --- sizes -------------------------------------------------------------------------------------------


def lengths(*wanted: int, n: int = 8) -> Batch:
    given = batch("full", 0, len(wanted), n)
    valid = torch.arange(n) < torch.tensor(wanted)[:, None]
    return given._replace(
        ids=given.ids * valid, lengths=torch.tensor(wanted), valid=valid, targets=given.targets * valid
    )


def test_few_sizes_and_one_graph(monkeypatch: pytest.MonkeyPatch):
    compiled = Rounded(Spec(layers=1).model(8, 8), (8, 16), monkeypatch)
    for one in (lengths(3, 2, 1), lengths(1, 0, 0), lengths(8, 0, 0), lengths(3, 3, 3), lengths(8, 4, 4)):
        compiled.compare(one)
    found = [set(call.values()) for call in compiled.calls]
    assert found == [{(6, 8)}, {(1, 8)}, {(8, 8)}, {(9, 16)}, {(16, 16)}]  # one row; a bucket hit exactly
    assert compiled.graphs.count == 1


def test_never_more_rows_than_there_are(monkeypatch: pytest.MonkeyPatch):
    compiled = Rounded(Spec(layers=1).model(8, 8), 1000, monkeypatch)
    compiled.compare(lengths(3, 2, 1))
    assert {size for call in compiled.calls for _, size in call.values()} == {24}


def test_more_rows_than_the_largest_bucket_run_the_captured_graph(monkeypatch: pytest.MonkeyPatch):
    older = statistics()  # of graphs that other tests keep alive
    compiled = Rounded(Spec(layers=1).model(8, 8), (4, 8), monkeypatch)
    compiled.compare(lengths(3, 2, 1))
    compiled.compare(lengths(3, 5, 1))
    compiled.compare(lengths(8, 8, 8))
    (found,) = [s.fallbacks for s in statistics() if s.fallbacks and s not in older]
    assert list(found.values()) == [2]
    assert "largest bucket of option 'capacity' (4, 8)" in next(iter(found))


def test_the_report_tells_what_is_wasted():
    torch._dynamo.reset()
    report = str(turbogr_compile.explain(step, Spec(layers=1).model(8, 8), lengths(3, 2, 1), capacity=8))
    assert "[rows-rounded] pack-rows: 6 rows of the batch seen are computed as 8: 2 of them dummies, 25%" in report
    assert "rows-not-rounded" not in report


def test_a_number_of_rows_that_the_model_sees_is_not_rounded(monkeypatch: pytest.MonkeyPatch):
    compiled = Rounded(Spec.parse("layers=1 readout=boolean").model(8, 8), 8, monkeypatch)
    compiled.compare(lengths(3, 2, 1))
    (call,) = compiled.calls
    assert set(call.values()) == {(6, 8), (6, 6)}
    said = [r for r in compiled.graphs.remarks if r.id == "rows-not-rounded"]
    assert said and all("zoo.py" in str(r) for r in said)


# --- an oracle ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["valid=mask-bool head=linear", "valid=mask-bool head=linear layers=1 readout=shifted"]
)
def test_not_a_number_in_a_dummy_stays_there(text: str, monkeypatch: pytest.MonkeyPatch):
    """Pads hold an item whose embedding is not a number, and dummies are made to read a pad. Of the forward only: a
    gradient of zero times such a row is not a number, which is why dummies repeat a real row."""
    filled = Rows.filled

    def of_a_pad(rows: Rows, chosen: RowSet, values: torch.Tensor, dummy: int | None = None) -> torch.Tensor:
        out = filled(rows, chosen, values, dummy)
        if dummy is None and values.equal(rows.rows(chosen)):
            out[len(values) :] = (~rows.mask(chosen)).flatten().nonzero()[0]
        return out

    poison = 49
    given = batch("right", 3, 4, 6, pad=poison)
    model = Spec.parse(text).model(6, 8)
    compiled = Rounded(model, 7, monkeypatch)
    with torch.no_grad():
        expected = step(compiled.reference, given)
        model.items.weight[poison] = torch.nan
        assert step(model, given).isnan()  # eager computes the pads too
        monkeypatch.setattr(Rows, "filled", of_a_pad)
        model.requires_grad_(False)
        torch.testing.assert_close(compiled.run(model, given), expected)
    assert compiled.dummies > 0
