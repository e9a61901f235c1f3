"""What a run measures: tables, made of groups, made of ways to do the same thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measure import Effort, Samples, say, take_turns
from torch import Tensor

SIZES = ("full", "quick", "tiny")
FORWARD, TRAINING, STEP = "forward", "forward + backward", "step"
OURS, OPTIMIZER = "turbogr", "optimizer"


@dataclass(frozen=True)
class Settings:
    """Under which conditions one process measures."""

    size: str = "full"  # full; quick: a first look; tiny: does it run at all
    threads: int = 1
    malloc: str = "default"
    meta: Path | None = None  # checkout of meta-recsys/generative-recommenders

    def pick(self, full: Any, quick: Any, tiny: Any) -> Any:
        return {"full": full, "quick": quick, "tiny": tiny}[self.size]

    @property
    def effort(self) -> Effort:
        return self.pick(Effort(), Effort(3, 5, 1.0), Effort(1, 1))


@dataclass
class Group:
    """Ways to compute the same thing, each called once before, to compile and to compare; a row of a table."""

    name: str
    part: str
    ways: dict[str, Callable[[], Any]]
    flops: float | None = None  # that the result needs: no pads, no pairs above the diagonal, nothing twice
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Table:
    """`ours` is compared with each of `against`."""

    name: str
    title: str
    ours: str
    against: tuple[str, ...]
    results: Callable[[Settings], Iterator[dict[str, Any]]]
    about: str
    unit: str = "ms"
    once: str | None = None  # measured under this allocator only, and with all threads


def by_turns(groups: Callable[[Settings], Iterator[Group]]) -> Callable[[Settings], Iterator[dict[str, Any]]]:
    """Results of groups whose ways take turns."""

    def results(settings: Settings) -> Iterator[dict[str, Any]]:
        for group in groups(settings):
            say(f"    {group.name}, {group.part}")
            samples = take_turns(group.ways, settings.effort, peak=group.flops is not None, called_before=True)
            yield result_of(group, samples)

    return results


def result_of(group: Group, samples: dict[str, Samples]) -> dict[str, Any]:
    """A group as JSON has it."""
    return {
        "name": group.name, "part": group.part, "flops": group.flops, "facts": group.facts, "notes": group.notes,
        "ways": samples,
    }  # fmt: skip


# --- ways that are functions of tensors --------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """A function, what it is called with, and the gradient of its result; or of its results."""

    run: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    grad: Tensor | Sequence[Tensor]

    def forward(self) -> Any:
        with torch.no_grad():
            return self.run(*self.inputs)

    def training(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.run(*self.inputs), self.inputs, self.grad)


def both_parts(
    name: str, ways: dict[str, Way], flops: float | None, facts: dict[str, Any],
    comparable: Callable[[Tensor], Tensor] = lambda x: x,
) -> Iterator[Group]:  # fmt: skip
    """The forward by itself, then with the backward, which needs twice the products of the forward.

    Each is checked just before it is measured: a backward that fails may leave its compiled forward slow.
    """
    check_same({n: w.forward for n, w in ways.items()}, comparable)
    yield Group(name, FORWARD, {n: w.forward for n, w in ways.items()}, flops, facts)
    check_same({n: w.training for n, w in ways.items()}, comparable)
    yield Group(name, TRAINING, {n: w.training for n, w in ways.items()}, 3 * flops if flops else None, facts)


def check_same(runs: dict[str, Callable[[], Any]], comparable: Callable[[Tensor], Tensor]) -> None:
    """All have the results of turbogr, once `comparable` has brought them to one form."""

    def results(run: Callable[[], Any]) -> list[Tensor]:
        found = run()
        return [comparable(x) for x in ((found,) if isinstance(found, Tensor) else found)]

    expected = results(runs[OURS])
    for name, run in runs.items():
        try:
            found = results(run)
        except RuntimeError:  # does not run here; when its turn comes it says why
            continue
        require_same(f"{name} and {OURS}", found, expected)


class Disagreement(Exception):
    """Two ways have different results: their times mean nothing."""


def require_same(what: str, found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-3) -> None:
    """Up to rounding in fp32, relative to the largest entry."""
    for number, (x, y) in enumerate(zip(found, expected, strict=True)):
        error = (x - y).abs().max() / y.abs().max().clamp(min=1e-30)
        if not error <= tolerance:
            raise Disagreement(f"{what}: result {number} differs by {error:.1e} of its largest entry")
