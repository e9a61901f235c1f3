"""What runs have to say about each other: one of them is the baseline, the others are measured against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from turbogr_compile.errors import OptionError, did_you_mean

from .runs import Run, median

BASELINES = ("eager", "padded", "baseline")


@dataclass(frozen=True)
class Comparison:
    """One run against the baseline; None where one of them lacks what is compared."""

    run: Run
    baseline: Run
    speedup: float | None
    memory_saved: float | None
    same_steps: int
    largest_difference: float | None  # of the losses, at any of the steps that both took
    largest_at: int | None
    relative_difference: float | None


def baseline_of(runs: Sequence[Run], name: str | None = None) -> Run:
    """The run of that name, or the first whose name says that it is one, or the first."""
    if name is not None:
        for run in runs:
            if run.name == name:
                return run
        known = [run.name for run in runs]
        raise OptionError(f"no run is named {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    for word in BASELINES:
        for run in runs:
            if word in run.name.lower():
                return run
    return runs[0]


def compare(run: Run, baseline: Run) -> Comparison:
    mine, other = run.peak_memory(), baseline.peak_memory()
    differences = loss_differences(run, baseline)
    finite = [(abs(d), step) for step, d in differences if math.isfinite(d)]
    worst = max(finite, default=None)
    base = dict(baseline.values("loss"))
    return Comparison(
        run=run,
        baseline=baseline,
        speedup=speedup(run, baseline),
        memory_saved=1 - mine / other if mine is not None and other else None,
        same_steps=len(differences),
        largest_difference=worst[0] if worst else None,
        largest_at=worst[1] if worst else None,
        relative_difference=worst[0] / abs(base[worst[1]]) if worst and base[worst[1]] else None,
    )


def loss_differences(run: Run, baseline: Run) -> list[tuple[int, float]]:
    """Loss minus the baseline's, at the steps that both took."""
    base = dict(baseline.values("loss"))
    return [(step, loss - base[step]) for step, loss in run.values("loss") if step in base]


def speedup(run: Run, baseline: Run) -> float | None:
    """Median of single ratios where both took the same steps: what disturbs one of two neighbours disturbs both."""
    mine = {s["step"]: s for s in run.warm_steps}
    ratios = []
    for step in baseline.warm_steps:
        theirs, ours = step.get("seconds"), mine.get(step["step"], {}).get("seconds")
        if theirs and ours:
            ratios.append(theirs / ours)
    if ratios:
        return median(ratios)
    ours, theirs = run.seconds(), baseline.seconds()
    return theirs / ours if ours and theirs else None
