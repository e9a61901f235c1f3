"""Ways to run a training step, from the naive one to all that turbogr does, as programs for the event core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..errors import OptionError, did_you_mean
from .events import (
    ACROSS,
    COMPUTE,
    HOST,
    INSIDE,
    LINKS,
    NODE,
    PEERS,
    WORLD,
    Floats,
    Task,
    Timeline,
    Usage,
    communicating,
    usage,
)
from .workload import Compute, Load, Workload

FEATURES = {
    "prefetch": "ids of the next batch are exchanged during this one",
    "overlap": "negatives arrive during the forward, dense gradients are summed during the backward",
    "balanced": "sequences are assigned to devices by cost, each step",
    "hierarchical": "rows are sharded inside a node and replicated across nodes",
    "semi-async": "rows are fetched, and their gradients sent, during the neighbouring step: one step stale",
}
NAIVE = "naive"
BUCKETS = 6  # that the dense gradient is summed in, where it overlaps
WARM_UP = 2


@dataclass(frozen=True)
class Variant:
    """Which features are on."""

    features: frozenset[str] = frozenset()
    name: str = field(default=NAIVE, compare=False)

    def __contains__(self, feature: str) -> bool:
        return feature in self.features

    @classmethod
    def read(cls, text: str) -> Variant:
        """'naive', or features joined by '+'."""
        parts = [part.strip() for part in text.split("+")]
        if parts == [NAIVE]:
            return cls()
        for part in parts:
            if part not in FEATURES:
                known = [NAIVE, *FEATURES]
                raise OptionError(f"variant {part!r}: one of {', '.join(known)}{did_you_mean(part, known)}")
        return cls(frozenset(parts), text)


def ladder() -> list[Variant]:
    """Naive, then one feature more at a time; then what sharding inside of nodes would change."""
    steps = ["prefetch", "overlap", "balanced", "semi-async"]
    growing = [Variant(frozenset(steps[: i + 1]), f"+ {steps[i]}") for i in range(len(steps))]
    inside = [Variant(v.features | {"hierarchical"}, f"{v.name}, hierarchical") for v in growing[2:]]
    return [Variant(), *growing, *inside]


class Outcome(NamedTuple):
    """A variant at a scale, over the simulated steps. Simulated, not measured."""

    variant: str
    devices: int
    step_seconds: float
    tokens_per_second: float  # of one device
    usage: Usage
    communicating: float  # share of the time, hidden or not
    mfu: float
    imbalance: float  # of tokens' costs, mean over steps
    timeline: Timeline
    begin: float
    end: float


class Loads:
    """Steps of the workload, drawn and planned once for all variants that share them."""

    def __init__(self, workload: Workload, compute: Compute, steps: int) -> None:
        self.workload, self.cost, self.steps = workload, compute.cost(), steps + WARM_UP
        self._known: dict[tuple[int, bool], list[Load]] = {}

    def __call__(self, devices: int, balanced: bool) -> list[Load]:
        key = devices, balanced
        if key not in self._known:
            drawn = self.workload.draw(self.steps, devices)
            self._known[key] = [Load.of(self.workload, n, devices, self.cost, balanced) for n in drawn]
        return self._known[key]


def simulate(compute: Compute, variant: Variant, devices: int, loads: Loads) -> Outcome:
    """The steps after two that fill the pipeline."""
    every = loads(devices, "balanced" in variant)
    job = Job(compute, variant, devices, every)
    ends = [job.step(t) for t in range(len(every))]
    begin, end = ends[WARM_UP - 1], ends[-1]
    counted = every[WARM_UP:]
    tokens = sum(float(load.tokens.sum()) for load in counted)
    flops = sum(float(compute.flops(load).sum()) for load in counted)
    work = [compute.forward(load) + compute.backward(load) for load in counted]
    span = end - begin
    return Outcome(
        variant.name,
        devices,
        span / len(counted),
        tokens / span / devices,
        usage(job.timeline.tasks, begin, end),
        communicating(job.timeline.tasks, begin, end),
        flops / span / devices / compute.cluster.peak,
        float(np.mean([w.max() / w.mean() - 1.0 for w in work])),
        job.timeline,
        begin,
        end,
    )


class Job:
    """Issues the tasks of one step after another, for all devices."""

    def __init__(self, compute: Compute, variant: Variant, devices: int, loads: Sequence[Load]) -> None:
        self.compute, self.workload, self.cluster = compute, compute.workload, compute.cluster
        cluster = self.cluster
        self.variant, self.devices, self.loads = variant, devices, loads
        self.timeline = Timeline(cluster.nodes(devices), cluster.in_node(devices))
        self.random = np.random.default_rng(self.workload.seed + 1)
        self.one_node = cluster.nodes(devices) == 1
        self.near = "hierarchical" in variant or self.one_node  # rows stay inside of a node
        self.hosted: dict[int, Task] = {}
        self.ids: dict[int, Task] = {}
        self.rows: dict[int, tuple[Task, Task]] = {}
        self.forwards: dict[int, Task] = {}
        self.pushed: list[Task] = []  # what the update of the last step's rows waits for
        self.updated: Task | None = None
        self.dense: Task | None = None

    def step(self, t: int) -> float:
        """When the last device ends its backward and the update that must follow at once."""
        semi, overlap = "semi-async" in self.variant, "overlap" in self.variant
        load = self.loads[t]
        if t not in self.rows:
            self._exchange_ids(t, [self.updated, self.dense])
            self._fetch(t, [self.updated])
        history, negatives = self.rows.pop(t)
        if "prefetch" in self.variant or semi:
            self._exchange_ids(t + 1, [])
        delay = 1.0 + self.workload.jitter * np.abs(self.random.standard_normal(self.devices))
        waits = [history, self.dense] + ([] if overlap else [negatives])
        forward = self.timeline.run("forward", COMPUTE, self.compute.forward(load) * delay, waits)
        self.forwards[t] = forward
        if semi:
            if self.pushed:
                self._update(self.loads[t - 1])
            if t + 1 < len(self.loads):
                self._fetch(t + 1, [self.updated])
        self.timeline.run("loss", COMPUTE, self.compute.loss(load, False) * delay, [negatives])
        loss = self.timeline.run("loss backward", COMPUTE, self.compute.loss(load, True) * delay)
        self.pushed = []
        if overlap:
            self._push("negative gradients", load.negatives, load, [loss], negatives=True)
        backward, summed = self._backward(load, delay, overlap)
        rows = load.history if overlap else load.history + load.negatives
        self._push("gradients", rows, load, [backward if overlap else summed], negatives=not overlap)
        if not semi:
            self._update(load)
        self.dense = self.timeline.run("dense update", COMPUTE, self.compute.dense_update(), [summed])
        return float(self.dense.end.max())

    # --- parts of a step -------------------------------------------------------------------------------

    def _host(self, t: int) -> Task:
        """Read and pack a batch, and plan it; at most two steps ahead of its use."""
        if t not in self.hosted:
            w = self.workload
            seconds = w.sequences * w.load_time
            if "balanced" in self.variant:
                seconds += w.sequences * self.devices * w.plan_time
            self.hosted[t] = self.timeline.run("load batch", HOST, seconds, [self.forwards.get(t - 2)])
        return self.hosted[t]

    def _exchange_ids(self, t: int, after: list[Task | None]) -> None:
        """How many ids go where, then the ids."""
        if t in self.ids or t >= len(self.loads):
            return
        load = self.loads[t]
        counts = self._all_to_all("counts", np.full(self.devices, 8.0), [self._host(t), *after])
        self.ids[t] = self._all_to_all("ids", (load.history + load.negatives) * 8.0, [counts])

    def _fetch(self, t: int, after: list[Task | None]) -> None:
        """Look rows up where they are, and send them to those who asked."""
        load = self.loads[t]
        size = self.workload.row_bytes
        if "overlap" not in self.variant:
            found = self.timeline.run(
                "lookup", COMPUTE, self.compute.lookup(load.history + load.negatives), [self.ids[t], *after]
            )
            rows = self._all_to_all("rows", (load.history + load.negatives) * size, [found])
            self.rows[t] = rows, rows
            return
        found = self.timeline.run("lookup", COMPUTE, self.compute.lookup(load.history), [self.ids[t], *after])
        history = self._all_to_all("rows", load.history * size, [found])
        more = self.timeline.run(
            "lookup negatives", COMPUTE, self.compute.lookup(load.negatives), [self.ids[t], *after]
        )
        self.rows[t] = history, self._all_to_all("negative rows", load.negatives * size, [more])

    def _backward(self, load: Load, delay: Floats, overlap: bool) -> tuple[Task, Task]:
        """Layers from last to first; the dense gradient is summed behind them, or afterwards."""
        buckets = BUCKETS if overlap else 1
        seconds = self.compute.backward(load) * delay / buckets
        size = self.workload.dense * self.workload.bytes_per_number / buckets
        for _ in range(buckets):
            backward = self.timeline.run("backward", COMPUTE, seconds)
            summed = self._all_reduce(size, [backward])
        return backward, summed

    def _push(self, name: str, rows: Floats, load: Load, after: list[Task | None], negatives: bool) -> None:
        """Gradients of rows to their owners; replicas of an owner add theirs up."""
        sent = self._all_to_all(name, rows * self.workload.row_bytes, after)
        self.pushed.append(sent)
        if self.near and not self.one_node:
            own, union = self._touched(load, negatives, history=name == "gradients")
            seconds = self.cluster.rows_across(own, union, self.devices)
            self.pushed.append(self.timeline.run(f"{name} across", ACROSS, seconds, [sent], PEERS))

    def _touched(self, load: Load, negatives: bool, history: bool) -> tuple[float, float]:
        """Bytes of different rows of one device's shard that its node, and the cluster, met."""
        w = self.workload
        total = float(load.tokens.sum())
        node = total / self.cluster.nodes(self.devices)
        rows = np.zeros(2)
        if history:
            rows += w.distinct(np.array([node, total]))
        if negatives:
            rows += w.distinct_negatives(np.array([node, total]) * w.negatives)
        own, union = rows * w.row_bytes / self.cluster.per_node
        return float(own), float(union)

    def _update(self, load: Load) -> None:
        """The optimizer on rows; where replicas are kept, each applies what all nodes met."""
        touched = load.history + load.negatives
        if self.near and not self.one_node:
            size = self._touched(load, negatives=True, history=True)[1] / self.workload.row_bytes
            touched = np.full(self.devices, size)
        self.updated = self.timeline.run("update rows", COMPUTE, self.compute.update(touched), self.pushed)

    # --- collectives -----------------------------------------------------------------------------------

    def _all_to_all(self, name: str, size: Floats, after: Sequence[Task | None]) -> Task:
        if self.near:
            return self.timeline.run(name, INSIDE, self.cluster.all_to_all_inside(size, self.devices), after, NODE)
        return self.timeline.run(name, LINKS, self.cluster.all_to_all(size, self.devices), after, WORLD)

    def _all_reduce(self, size: float, after: Sequence[Task | None]) -> Task:
        inside = self.cluster.reduce_inside(size, self.devices)
        done = self.timeline.run("sum dense", INSIDE, inside, after, NODE)
        if not self.one_node:
            done = self.timeline.run("sum dense", ACROSS, self.cluster.reduce_across(size, self.devices), [done], PEERS)
        return self.timeline.run("sum dense", INSIDE, inside, [done], NODE)
