"""The discrete-event core: streams that serve tasks in the order of issue, and barriers within groups of devices.

Each device has a few resources; a task holds one or more of them. It starts when they are free and what it waits for
is over; a collective starts when that holds for all devices of its group, and ends for all of them at once. Since
every device issues the same tasks in the same order, as programs and communication libraries do, events need no queue:
one task of all devices is one operation on vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

COMPUTE, INSIDE, ACROSS, HOST = RESOURCES = ("compute", "inside", "across", "host")
LINKS = (INSIDE, ACROSS)
NODE, PEERS, WORLD = "node", "peers", "world"  # devices of a node; the same device of each node; all


@dataclass(frozen=True, eq=False)
class Task:
    """When a task ran, on each device."""

    name: str
    on: tuple[str, ...]
    start: Floats
    end: Floats


class Timeline:
    """What has been issued so far, on `nodes * per_node` devices."""

    def __init__(self, nodes: int, per_node: int) -> None:
        self.nodes, self.per_node = nodes, per_node
        self.devices = nodes * per_node
        self.tasks: list[Task] = []
        self._free = {resource: np.zeros(self.devices) for resource in RESOURCES}

    def run(
        self,
        name: str,
        on: str | Sequence[str],
        seconds: Any,
        after: Iterable[Task | None] = (),
        among: str | None = None,
    ) -> Task:
        """Issue a task; `seconds` may differ from device to device, and `among` makes it a collective."""
        resources = (on,) if isinstance(on, str) else tuple(on)
        ready = np.maximum.reduce([self._free[r] for r in resources] + [t.end for t in after if t is not None])
        took = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (self.devices,))
        start = self._together(ready, among)
        task = Task(name, resources, start, start + self._together(took, among))
        for resource in resources:
            self._free[resource] = task.end
        self.tasks.append(task)
        return task

    def _together(self, values: Floats, among: str | None) -> Floats:
        """The latest of each group, for all of its devices."""
        if among is None:
            return values
        if among == WORLD:
            return np.full(self.devices, values.max())
        axis = {NODE: 1, PEERS: 0}[among]
        table = values.reshape(self.nodes, self.per_node)
        return np.broadcast_to(table.max(axis, keepdims=True), table.shape).reshape(-1).copy()


class Usage(NamedTuple):
    """Shares of a span of time, averaged over devices; they add up to 1."""

    compute: float
    communication: float  # exposed: the device communicates and does not compute
    host: float  # exposed: only the host works
    waiting: float  # nothing runs: the device waits for others


def usage(tasks: Sequence[Task], begin: float, end: float) -> Usage:
    """What devices did between two points in time."""
    span = end - begin
    computing = _covered([t for t in tasks if COMPUTE in t.on], begin, end)
    or_communicating = _covered([t for t in tasks if t.on != (HOST,)], begin, end)
    anything = _covered(tasks, begin, end)
    shares = computing, or_communicating - computing, anything - or_communicating, np.maximum(span - anything, 0.0)
    return Usage(*(float(np.mean(part)) / span for part in shares))


def communicating(tasks: Sequence[Task], begin: float, end: float) -> float:
    """Share of the time in which a device communicates, hidden or not."""
    return float(np.mean(_covered([t for t in tasks if set(t.on) & set(LINKS)], begin, end))) / (end - begin)


def _covered(tasks: Sequence[Task], begin: float, end: float) -> Floats:
    """Seconds in which at least one of the tasks runs, for each device."""
    if not tasks:
        return np.zeros(1)
    starts = np.clip(np.stack([t.start for t in tasks]), begin, end)
    ends = np.clip(np.stack([t.end for t in tasks]), begin, end)
    order = np.argsort(starts, axis=0, kind="stable")
    starts, ends = np.take_along_axis(starts, order, 0), np.take_along_axis(ends, order, 0)
    before = np.vstack([np.full((1, starts.shape[1]), begin), np.maximum.accumulate(ends, axis=0)[:-1]])
    return np.maximum(ends - np.maximum(starts, before), 0.0).sum(0)
