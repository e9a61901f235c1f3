"""`expect={"fuse-rms-norm": ">=1"}`: fail when a pass did not fire as often as its user counts on."""

from __future__ import annotations

import operator
from collections.abc import Mapping

from ..errors import ExpectationError
from ..pipeline.instrument import GraphRun, Instrument
from ..pipeline.options import read_expectation
from ..show.report import near_miss_lines

_RELATIONS = {"==": operator.eq, ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


class Expectations(Instrument):
    """Counts rewrites per pass and graph; checked on each graph in which the pass ran."""

    explains = True

    def __init__(self, expect: Mapping[str, str | int]) -> None:
        self.expect = expect

    def finish(self, run: GraphRun) -> None:
        for step in run.steps:
            if step.pass_.name not in self.expect:
                continue
            relation, count = read_expectation(step.pass_.name, self.expect[step.pass_.name])
            context = step.context
            fired = len(context.rewrites) if context is not None else 0
            if _RELATIONS[relation](fired, count):
                continue
            why = f"\n  {step.status}: {step.reason}" if step.reason else ""
            misses = "".join(f"\n{line}" for line in near_miss_lines(context.near_misses if context else ()))
            wanted = f"expected {step.pass_.name} to fire {relation} {count} times"
            raise ExpectationError(f"{run.name}: {wanted}, it fired {fired}{why}{misses}")
