"""The tool itself: faults are made from source, live in a fork only, and those that change a number are noticed."""

from __future__ import annotations

import ast
import importlib

import pytest

from tests.fuzz import aimed
from tests.fuzz.judge import judge, quiet

from . import draw
from .__main__ import Guards
from .faults import KINDS, Fault, changes, faults
from .forks import Died, in_a_fork
from .planting import NotPlanted, plant
from .programs import Prepared
from .survivors import WORDS, named, survivors

ROWS = "turbogr_compile.passes.rows"


def described(text: str) -> list[str]:
    """What can be done to a piece of code."""
    return [what for node in ast.walk(ast.parse(text)) for _, what, _ in changes(node)]


@pytest.mark.parametrize(
    "text, what",
    [
        ("if a and b: pass", "drop `b`"),
        ("if a: pass", "drop the check `a`"),
        ("x = [i for i in y if f(i)]", "drop the filter `f(i)`"),
        ("x = a < b", "`a < b` with LtE"),
        ("x = 3", "3 - 1"),
        ("x = {1, y}", "leave out y"),
        ("f(x, keepdim=True)", "without keepdim=True"),
        ("row_op('a', models=('x',), mixes=f, packed=g)", "rows are never mixed"),
        ("row_op('a', models=('x',))", "zeros of the first operand"),
        ("require(x)", "drop `require(x)`"),
    ],
)
def test_what_is_done_to_code(text, what):
    assert what in described(text)


def one(module: str, where: str, what: str) -> Fault:
    (found,) = {str(f): f for f in faults(f"{ROWS}.{module}") if f.where.startswith(where) and what in f.what}.values()
    return found


def test_texts_for_the_user_are_left_alone():
    assert not [f for f in faults(f"{ROWS}.moves") if f.where == "Move.__doc__"]
    assert len([*faults(f"{ROWS}.moves")]) > 60


def test_a_function_is_changed_in_a_fork_alone():
    fault = one("sets", "within_band", "`count[:, last] > count[:, first]` with GtE")
    sets = importlib.import_module(f"{ROWS}.sets")

    def ask() -> bool:
        import torch

        return bool(sets.within_band(torch.zeros(1, 3), 0, 1).any())

    def planted() -> bool:
        plant(fault)
        return ask()

    assert in_a_fork(planted, 60) and not ask()


def test_a_declaration_is_changed_in_a_fork_alone():
    fault = one("ops.along", "row_op('cumsum'", "leave out 'dtype'")
    declaration = importlib.import_module(f"{ROWS}.declaration")

    def planted() -> bool:
        plant(fault)
        return "dtype" in declaration._DECLARED["cumsum"].models

    assert not in_a_fork(planted, 60) and "dtype" in declaration._DECLARED["cumsum"].models


def test_a_process_that_dies_is_an_answer():
    def dies() -> None:
        raise NotPlanted("no")

    with pytest.raises(Died, match="NotPlanted"):
        in_a_fork(dies, 60)


def test_a_fault_that_changes_a_number_is_noticed():
    """A triangle over rows that is said to mix none is cut from the rows that are kept."""
    program = aimed.program(1, "rows:triangle-of-features")
    with quiet():
        guards = Guards([("a triangle", Prepared(program))], None)
        answer = guards.ask(one("ops.along", "row_op('tril'", "rows are never mixed"), 30, 10)
        assert answer["verdict"] == "wrong" and answer["by"] == "a triangle", answer
    assert judge(program).status == "same"


def test_each_survivor_is_a_fault_that_can_be_planted():
    """And has a reason of a few kinds: a list that the sources have left behind proves nothing."""
    found = list(survivors())
    modules = {s.fault.partition(" ")[0] for s in found}
    every = {named(str(fault)) for module in modules for fault in faults(f"{ROWS}.{module}")}
    assert [s for s in found if s.word not in WORDS or not s.reason or s.fault not in every] == []
    assert len({s.fault for s in found}) == len(found) > 100


def test_faults_are_drawn_of_every_module_and_kind():
    drawn = draw.drawn(draw.modules(), 200)
    assert len({f.module for f in drawn}) > 60 and {f.kind for f in drawn} == set(KINDS)
    assert not any(draw.says_less(str(f)) for f in drawn)
