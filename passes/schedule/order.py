"""List scheduling: collectives and work of the host start early, and are waited for late.

At each step, of the nodes whose inputs are there, in this order of preference:

1. what runs beside the compute, at once;
2. what the next of those needs;
3. compute that waits for nothing, in the order of the program;
4. the wait that ends first.

Where values take more memory than allowed, the program's own order is followed until they do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ...graph.nodes import is_wait
from .costs import Costs
from .dependences import Dependences, is_async
from .play import Clock, Memory, peak, play

WORTH = 0.999  # of the time before; for less, nodes stay where they are


@dataclass(frozen=True)
class Schedule:
    order: list[fx.Node]
    limited: bool  # memory kept it from a faster one


def schedule(graph: fx.Graph, before: Dependences, costs: Costs, budget: float) -> Schedule:
    """The fastest order found, by estimate, whose peak is at most `budget` bytes above that of the graph as it is."""
    given = list(graph.nodes)
    after = _reversed(given, before)
    limit = peak(given, costs) + budget
    # Waits go down whatever the estimates say: these may be wrong, and a later wait is never a longer one.
    best, limited = given, False
    if peak(sunk := _sunk(given, after), costs) <= limit:
        best = sunk
    for allowed in (limit, limit - budget / 2, limit - budget):
        found = _sunk(_Lister(given, before, after, costs, allowed).run(), after)
        if play(found, costs).seconds >= WORTH * play(best, costs).seconds:
            break
        if peak(found, costs) <= limit:
            best = found
            break
        limited = True
    return Schedule(best, limited)


class _Lister:
    def __init__(
        self, given: Sequence[fx.Node], before: Dependences, after: Dependences, costs: Costs, limit: float
    ) -> None:
        self.given, self.before, self.after, self.limit = given, before, after, limit
        self.place = {n: i for i, n in enumerate(given)}
        self.missing = {n: len(before[n]) for n in given}
        self.clock, self.memory = Clock(costs), Memory(given, costs)
        self.order: list[fx.Node] = []
        self.ready = {n for n in given if not self.missing[n]}
        self.starts = [n for n in reversed(given) if is_async(n)]
        self.needed: set[fx.Node] = set()

    def run(self) -> list[fx.Node]:
        for node in [n for n in self.given if n.op == "placeholder"]:
            self._run(node)
        self._aim()
        while self.ready:
            node = min(self.ready, key=self._preference)
            self._run(node)
            if self.starts and node is self.starts[-1]:
                self.starts.pop()
                self._aim()
        return self.order

    def _run(self, node: fx.Node) -> None:
        self.order.append(node)
        self.clock.run(node)
        self.memory.run(node)
        self.ready.remove(node)
        for later in self.after[node]:
            self.missing[later] -= 1
            if not self.missing[later]:
                self.ready.add(later)

    def _aim(self) -> None:
        self.needed = _ancestors(self.starts[-1], self.before) if self.starts else set()

    def _preference(self, node: fx.Node) -> tuple[float, ...]:
        if self.memory.live > self.limit:
            return (0, self.place[node])
        if is_async(node):
            return (1, self.place[node])
        until = self.clock.ready(node)
        if until <= self.clock.now and (node in self.needed or not is_wait(node)):
            return (2 if node in self.needed else 3, self.place[node])
        return (4 if node.op != "output" else 5, max(until, self.clock.now), self.place[node])


def _reversed(given: Sequence[fx.Node], before: Dependences) -> Dependences:
    after: Dependences = {n: set() for n in given}
    for node in given:
        for earlier in before[node]:
            after[earlier].add(node)
    return after


def _ancestors(node: fx.Node, before: Dependences) -> set[fx.Node]:
    found, todo = {node}, [node]
    while todo:
        for earlier in before[todo.pop()] - found:
            found.add(earlier)
            todo.append(earlier)
    return found


def _sunk(order: Sequence[fx.Node], after: Dependences) -> list[fx.Node]:
    """Each wait directly before what comes after it first."""
    result: list[fx.Node] = []
    held: list[fx.Node] = []
    for node in order:
        if is_wait(node):
            held.append(node)
            continue
        if node.op == "output":
            result += held
        else:
            due = {w for w in held if node in after[w]}
            while more := {w for w in held if after[w] & due} - due:  # a wait may be what reads another one
                due |= more
            result += [w for w in held if w in due]
            held = [w for w in held if w not in due]
        result.append(node)
    return result
