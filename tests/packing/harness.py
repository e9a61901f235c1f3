"""Running a model of the zoo in eager and compiled, and comparing all that training sees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import turbogr_compile
from turbogr_compile import GraphRun, Instrument, Role
from turbogr_compile.testing import Flops

from .batches import Batch
from .zoo import Model, Spec

TOLERANCE = 1e-9  # of float64 results, relative to the largest value


def step(model: Model, batch: Batch) -> torch.Tensor:
    """One training step up to the loss, which is all it returns: no padded row can be seen from outside."""
    return model(batch)


@dataclass
class Outcome:
    """What a step leaves behind: the loss, a gradient for every parameter, buffers."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    @property
    def poisoned(self) -> str | None:
        """Not a number in eager itself: which rows it reaches says nothing about a compiler."""
        if not self.loss.isfinite():
            return "loss"
        if any(not g.isfinite().all() for g in self.gradients.values()):
            return "gradients"
        return None


def outcome(run: Callable[[Model, Batch], torch.Tensor], model: Model, batch: Batch) -> Outcome:
    model.zero_grad(set_to_none=True)
    loss = run(model, batch)
    loss.backward()
    # No gradient and a zero gradient train alike.
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return Outcome(loss.detach(), gradients, {n: b.detach().clone() for n, b in model.named_buffers()})


def differences(expected: Outcome, actual: Outcome) -> list[str]:
    """What is not the same; nothing is said about what eager itself cannot compute."""
    pairs = {"loss": (expected.loss, actual.loss)}
    pairs |= {f"gradient of {n}": (g, actual.gradients[n]) for n, g in expected.gradients.items()}
    pairs |= {f"buffer {n}": (b, actual.buffers[n]) for n, b in expected.buffers.items()}
    scale = max((g.abs().max().item() for g in expected.gradients.values() if g.isfinite().all()), default=0.0)
    found = []
    for name, (a, b) in pairs.items():
        if not a.is_floating_point():
            found += [] if a.equal(b) else [f"{name}: other values"]
            continue
        if not a.isfinite().all():
            continue
        own = a.abs().max().item()
        # A gradient that is all but zero has the rounding errors of the others.
        allowed = TOLERANCE * max(own, 1e-3 * scale, 1e-12)
        error = (a - b).abs().max().item()
        if not error <= allowed:
            found.append(f"{name}: {error:.1e} off, of {own:.1e}")
    return found


class Graphs(Instrument):
    """How many graphs were compiled, and what was said about them."""

    def __init__(self) -> None:
        self.count = 0
        self.remarks: list[Any] = []

    def start(self, run: GraphRun) -> None:
        self.count += run.role is Role.CAPTURED

    def finish(self, run: GraphRun) -> None:
        self.remarks += run.remarks


@dataclass
class Compiled:
    """A step that was compiled for one model, next to an equal model for eager."""

    model: Model
    graphs: Graphs = field(default_factory=Graphs)
    more: tuple[Instrument, ...] = ()
    graphs_at_first: int = 0

    @property
    def spec(self) -> Spec:
        return self.model.spec

    def __post_init__(self) -> None:
        torch._dynamo.reset()
        self.reference = copy.deepcopy(self.model)
        self.run = turbogr_compile.compile(
            step, target="eager", on_error="raise", verify="strict", instruments=(self.graphs, *self.more)
        )

    def compare(self, batch: Batch) -> Outcome:
        """Both on the same batch: eager's outcome. Differences are an error, and so is compiling a second time."""
        expected = outcome(step, self.reference, batch)
        actual = outcome(self.run, self.model, batch)
        found = differences(expected, actual)
        assert not found, "\n".join([f"{self.spec}: not what eager gives", *found])
        self.graphs_at_first = self.graphs_at_first or self.graphs.count
        # Where Dynamo cuts the graph, a data-dependent size is an ordinary size of the next one.
        again = self.graphs_at_first == 1 and self.graphs.count > 1
        assert self.graphs.count and not again, f"{self.spec}: compiled {self.graphs.count} times"
        return expected


# --- arithmetic ------------------------------------------------------------------------------------------


@contextmanager
def counted() -> Iterator[Flops]:
    """Attention in its mathematical form: the fused CPU op has no formula."""
    with sdpa_kernel(SDPBackend.MATH), Flops() as flops:
        yield flops


def flops(run: Callable[[Model, Batch], torch.Tensor], model: Model, batch: Batch) -> int:
    """Of forward and backward."""
    with counted() as found:
        run(model, batch).backward()
    return found.total


def flops_of_sequences(spec: Spec, batch: Batch, d: int) -> int:
    """What eager needs where nothing is padded: every sequence of a right-padded batch as a batch of its own."""
    total = 0
    for row in range(len(batch.lengths)):
        alone = batch.alone(row)
        total += flops(step, spec.model(alone.ids.shape[1], d), alone)
    return total
