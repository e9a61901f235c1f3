"""Options are checked in one place, with the closest name for a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from turbogr_compile.errors import OptionError, PipelineError
from turbogr_compile.pipeline.options import Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targte": "cpu"}, "unknown option 'targte' .did you mean 'target'"),
        ({"target": "cpuu"}, "no target is named 'cpuu' .did you mean 'cpu'"),
        ({"codegen": "inducter"}, "no code generator 'inducter' .did you mean 'inductor'"),
        ({"verify": "strickt"}, "did you mean 'strict'"),
        ({"verify": "shadow:x"}, "'shadow:calls' with at least 1 call to compare, got 'shadow:x'"),
        ({"verify": "shadow:0"}, "at least 1 call to compare, got 'shadow:0'"),
        ({"verify": "shadow:-1"}, "at least 1 call to compare, got 'shadow:-1'"),
        ({"verify": "shadow:"}, "at least 1 call to compare"),
        ({"verify": "shadwo:3"}, "did you mean 'shadow'"),
        ({"verify": "strict:3"}, "takes off, fast, strict, numeric, validate, shadow; got 'strict:3'"),
        ({"on_error": "explode"}, "takes fallback, raise"),
        ({"expect": {"remove-nops": 1}}, "did you mean 'remove-noops'"),
        ({"expect": {"remove-noops": "many"}}, "takes a number"),
        ({"instruments": [object()]}, "takes Instrument objects"),
        ({"stop_after": "remove-nops"}, "did you mean 'remove-noops'"),
        ({"stop_after": "remove-noops:x"}, "'pass:number'"),
    ],
)
def test_mistakes_are_answered_with_the_culprit_and_a_suggestion(options, message):
    with pytest.raises(OptionError, match=message):
        Options.read(options)


def test_unknown_pass_in_pipeline():
    with pytest.raises(PipelineError, match=r"no pass is named 'remove-nops' .did you mean 'remove-noops'"):
        Options.read({"pipeline": "remove-nops"})


def test_environment_fills_what_options_leave_open():
    environment = {"TURBOGR_DUMP": "somewhere", "TURBOGR_VERIFY": "strict"}
    assert Options.read({}, environment).dump == Path("somewhere")
    assert Options.read({}, environment).verify == "strict"
    assert Options.read({"verify": "off"}, environment).verify == "off"


@pytest.mark.parametrize(
    ("verify", "level", "calls"),
    [("off", "off", 0), ("numeric", "numeric", 0), ("shadow", "fast", 3), ("shadow:12", "fast", 12)],
)
def test_a_shadow_comes_on_top_of_fast_verification(verify, level, calls):
    options = Options.read({}, {"TURBOGR_VERIFY": verify})
    assert (options.level(), options.shadow()) == (level, calls)


def test_passes_and_without_edit_the_default_pipeline():
    default = Options.read({}, {}).plan()
    edited = Options.read({"without": ["fold-masks"], "passes": ["remove-noops"]}, {}).plan()
    assert edited == default.without("fold-masks").with_("remove-noops")
