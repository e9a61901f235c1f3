"""Pipelines are values; order comes from declarations; errors name the declarations."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from turbogr_compile.errors import PipelineError
from turbogr_compile.graph.phases import Phase
from turbogr_compile.pipeline import catalogue
from turbogr_compile.pipeline.pass_base import Pass
from turbogr_compile.pipeline.pipeline import Pipeline, Repeat


def make(name: str, phase: Phase = Phase.PRE_GRAD, **declared: tuple[str, ...]) -> Pass:
    return dataclass(frozen=True)(type(name, (Pass,), {"name": name, "phase": phase, **declared}))()


def names(pipeline: Pipeline) -> list[str]:
    return [p.name for p in pipeline.ordered_passes()]


@dataclass(frozen=True)
class Sized(Pass):
    """A pass with options of every kind."""

    name = "sized"
    phase = Phase.PRE_GRAD
    multiple: int = 16
    scale: float = 1.0
    mode: str = "plain"
    deep: bool = False
    sizes: tuple = ()


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(catalogue.PASSES, "_registered", {"sized": Sized})


def test_order_follows_declarations_whatever_the_order_of_writing():
    passes = [make("c", after=("b",)), make("a", before=("b",)), make("b"), make("d", needs=("a",))]
    expected = ["a", "b", "c", "d"]
    for seed in range(20):
        random.Random(seed).shuffle(passes)
        assert names(Pipeline(tuple(passes))) == expected


def test_phases_come_one_after_the_other():
    pipeline = Pipeline((make("z", Phase.POST_GRAD), make("y"), make("x", Phase.JOINT)))
    assert names(pipeline) == ["y", "x", "z"]


def test_cycle_names_both_declarations():
    with pytest.raises(PipelineError) as error:
        Pipeline((First(), Second()))
    text = str(error.value)
    assert "first   must follow  second" in text and "second  must follow  first" in text
    assert 'after=("second",)' in text and 'before=("second",)' not in text
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    for declaration in ('    after = ("second",)', '    after = ("first",)'):
        assert f"test_pipeline.py:{lines.index(declaration) + 1}" in text


@dataclass(frozen=True)
class First(Pass):
    name = "first"
    phase = Phase.PRE_GRAD
    after = ("second",)


@dataclass(frozen=True)
class Second(Pass):
    name = "second"
    phase = Phase.PRE_GRAD
    after = ("first",)


def test_missing_need_suggests_a_close_name():
    with pytest.raises(PipelineError, match=r"'pack' needs 'normalise', which is not .*did you mean 'normalize'"):
        Pipeline((make("pack", needs=("normalise",)), make("normalize")))


def test_order_against_the_phases_is_an_error():
    with pytest.raises(PipelineError, match="other side of phase post-grad"):
        Pipeline((make("early", after=("late",)), make("late", Phase.POST_GRAD)))


def test_same_pass_twice_is_an_error():
    with pytest.raises(PipelineError, match="twice"):
        Pipeline((Sized(), Sized(multiple=8)))


def test_spec_prints_what_differs_and_reads_back(known):
    sized = Sized(multiple=32, scale=0.5, mode="a b", deep=True, sizes=(1, 2))
    assert Sized().spec == "sized"
    assert sized.spec == "sized{multiple=32, scale=0.5, mode='a b', deep=true, sizes=[1, 2]}"
    assert Pipeline.parse(sized.spec).items == (sized,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sized{multipel=1}", "did you mean 'multiple'"),
        ("sized{multiple=x}", "takes int"),
        ("sized{multiple=true}", "takes int"),
        ("sized{multiple}", "key=value"),
        ("sized{multiple=1", "unbalanced"),
        ("sizd", "did you mean 'sized'"),
        ("!!", "cannot read pass spec"),
    ],
)
def test_wrong_text_is_explained(known, text, message):
    with pytest.raises(PipelineError, match=message):
        Pipeline.parse(text)


def test_with_replaces_and_without_removes(known):
    pipeline = Pipeline.parse("sized").with_(Sized(multiple=4))
    assert pipeline.spec == "sized{multiple=4}"
    assert pipeline.without("sized").items == ()
    with pytest.raises(PipelineError, match="did you mean 'sized'"):
        pipeline.without("size")


def test_repeat_reads_back_and_is_ordered_inside(known):
    repeat = Repeat((make("b", after=("a",)), make("a")), limit=3)
    assert names(Pipeline((repeat,))) == ["a", "b"]
    assert Pipeline.parse("repeat(3: sized{multiple=4})").spec == "repeat(3: sized{multiple=4})"
    with pytest.raises(PipelineError, match="one phase"):
        Repeat((make("a"), make("b", Phase.JOINT)))


def test_two_passes_of_one_name_cannot_be_registered(monkeypatch):
    monkeypatch.setattr(catalogue.PASSES, "_registered", {})
    catalogue.register(Sized)
    catalogue.register(Sized)
    with pytest.raises(PipelineError, match="two passes are named 'sized'"):
        catalogue.register(type(make("sized")))


def test_passes_of_other_packages_are_found_through_entry_points(monkeypatch):
    class Entry:
        name, value = "sized", "somewhere:Sized"

        def load(self):
            return Sized

    monkeypatch.setattr(catalogue.PASSES, "_registered", {})
    monkeypatch.setattr(catalogue.PASSES, "_installed", lambda: {"sized": Entry()})
    assert catalogue.find("sized") is Sized
    assert "sized" in catalogue.names()


def test_entry_point_that_cannot_be_imported_is_named(monkeypatch):
    class Entry:
        name, value = "broken", "nowhere:Broken"

        def load(self):
            raise ModuleNotFoundError("No module named 'nowhere'")

    monkeypatch.setattr(catalogue.PASSES, "_registered", {})
    monkeypatch.setattr(catalogue.PASSES, "_installed", lambda: {"broken": Entry()})
    with pytest.raises(PipelineError, match=r"'broken' of entry point 'nowhere:Broken' cannot be imported"):
        catalogue.find("broken")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"name": "Bad_Name", "phase": Phase.PRE_GRAD}, "kebab-case"),
        ({"name": "x", "phase": "pre-grad"}, "must be a Phase"),
        ({"name": "x", "phase": Phase.PRE_GRAD, "after": "fold-views"}, "after must be a tuple"),
        ({"name": "x", "phase": Phase.PRE_GRAD, "before": ("x",)}, "names the pass itself"),
        ({"name": "x"}, "must be a Phase"),
    ],
    ids=str,
)
def test_slips_in_a_declaration_are_caught(attributes, message):
    cls = dataclass(frozen=True)(type("Slip", (Pass,), attributes))
    for use in (lambda: catalogue.register(cls), lambda: Pipeline((cls(),)), lambda: Pipeline.of([cls])):
        with pytest.raises(PipelineError, match=message):
            use()


def test_classes_rules_and_names_are_taken_for_passes(known):
    from turbogr_compile.passes.fold_views import fold_views

    assert Pipeline.of([Sized, fold_views]).spec == "fold-views, sized"
    assert Pipeline.of([Repeat(["sized"])]).spec == "repeat(sized)"
    with pytest.raises(PipelineError, match="not a subclass of Pass"):
        Pipeline.of([len])
    with pytest.raises(PipelineError, match=r"repeat\(20: a, b\)"):
        Pipeline.parse("repeat()")
