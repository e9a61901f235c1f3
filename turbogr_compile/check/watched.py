"""A compiled graph whose first calls are compared with the captured graph, and what follows from a difference."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import VerifyError
from ..pipeline.remarks import warn
from ..runtime.prologue import InputRows, Unprovable
from ..runtime.statistics import RunStatistics
from .comparison import Comparison, NotComparable
from .disturbance import disturbances
from .sampling import Sample

DIFFERS = "differs from the captured graph"
_SHOWN = 3
_TRY_NEXT = (
    "  try: verify='numeric' names the pass, if it is one before autograd; 'turbogr bisect' finds any\n"
    "  a pass that changes numbers on purpose says so by `changes_numbers`"
)


@dataclass(frozen=True)
class Trial:
    """What is compared with what, and on which batches."""

    comparison: Comparison
    calls: int  # to compare
    rows: InputRows | None = None  # where a batch with other lengths is tried too
    sample: Sample | None = None  # where the whole batch would be too much


@dataclass(frozen=True)
class Verdict:
    """What is done about a difference."""

    captured: Callable[..., Any]  # serves from then on
    raises: bool
    blame: Callable[[Sequence[Any]], str]  # whose work first goes wrong on these inputs, if that can be said
    refuse: Callable[[str], None] | None = None  # tells ranks that would wait for this one


class Watched:
    """A compiled graph with so many calls left to compare; afterwards only the one or the other graph is kept."""

    def __init__(self, run: Callable[..., Any], trial: Trial, verdict: Verdict, stats: RunStatistics) -> None:
        self.run, self.stats = run, stats
        self.trial: Trial | None = trial
        self.verdict: Verdict | None = verdict
        self.left = trial.calls

    def __call__(self, *inputs: Any) -> Any:
        if self.trial is not None:
            began = time.perf_counter()
            try:
                self._try(self.trial, inputs)
            finally:
                self.stats.comparing += time.perf_counter() - began
        return self.run(*inputs)

    def _try(self, trial: Trial, inputs: Sequence[Any]) -> None:
        tried, where = inputs, "call"
        try:
            if trial.sample is not None:
                tried, where = trial.sample.of(inputs), f"{trial.sample.text} of call"
            found = trial.comparison.differences(tried)
        except Unprovable:
            return  # nothing of the rewritten graph runs in this call, or in one like it
        except NotComparable as error:
            if trial.sample is not None:
                self._give_up(f"on {trial.sample.text} the captured graph raises {error}")
                return
            found = [f"the captured graph raises {error}"] if self._runs(trial, inputs) else []
        self.stats.compared += 1
        self.left -= 1
        if not found and trial.rows is not None and self.left == trial.calls - 1:
            found, tried = self._on_other_lengths(trial, tried)
            where = f"a batch like that of {where}"
        if found:
            self._differs(trial, found, where, tried)
        elif not self.left:
            self.trial = self.verdict = None  # the memory of the captured graph is not needed any more

    def _give_up(self, why: str) -> None:
        self.stats.uncompared = why
        self.trial = self.verdict = None

    def _runs(self, trial: Trial, inputs: Sequence[Any]) -> bool:
        """Does the compiled graph take what the captured one refuses?"""
        try:
            trial.comparison.again(inputs)
        except Exception:
            return False
        return True

    def _on_other_lengths(self, trial: Trial, inputs: Sequence[Any]) -> tuple[list[str], Sequence[Any]]:
        assert trial.rows is not None
        try:
            for other in disturbances(inputs, trial.rows):
                try:
                    found = trial.comparison.differences(other, made_up=True)
                except (Unprovable, NotComparable):
                    continue  # the compiled graph would not serve such a batch, or the model does not take it
                self.stats.compared += 1
                return found, other
        except Unprovable:
            pass  # raised while the batch was made
        return [], inputs

    def _differs(self, trial: Trial, found: list[str], where: str, inputs: Sequence[Any]) -> None:
        verdict = self.verdict
        assert verdict is not None
        self.run = counted(verdict.captured, self.stats, DIFFERS)
        self.trial = self.verdict = None
        located = verdict.blame(inputs)
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        lines = [f"graph {self.stats.graph}, {where} {trial.calls - self.left}, {DIFFERS}:"]
        lines += [f"  {text}" for text in [*found[:_SHOWN], *more, *located.splitlines()]]
        if verdict.refuse is not None:
            # The captured graph may start other collectives than the compiled graph of the other ranks.
            verdict.refuse("\n".join(lines))
            raise VerifyError("\n".join([*lines, "  it has collectives: no rank goes on with either graph", _TRY_NEXT]))
        if verdict.raises:
            raise VerifyError("\n".join([*lines, _TRY_NEXT]))
        warn("\n".join([*lines, "  all calls of this graph run the captured graph, op by op", _TRY_NEXT]))


def counted(graph: Callable[..., Any], stats: RunStatistics, reason: str = "") -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        stats.calls += 1
        if reason:
            stats.fallbacks[reason] += 1
        return graph(*inputs)

    return run
