"""An order of nodes played through: when each runs on its stream, when compute waits, how much memory is in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from ...graph.nodes import is_wait
from ...graph.streams import COMMUNICATION, HOST, stream_of
from .costs import Costs
from .dependences import is_async, owner, started_by

COMPUTE = "compute"


@dataclass(frozen=True)
class Span:
    node: fx.Node
    stream: str
    start: float
    end: float


@dataclass
class Played:
    spans: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)  # compute stands still
    seconds: float = 0.0

    @property
    def exposed(self) -> float:
        return sum(s.end - s.start for s in self.waits)


class Clock:
    """Compute runs node by node; collectives and work of the host queue up on streams of their own."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.now = costs, 0.0
        self._free = {COMMUNICATION: 0.0, HOST: 0.0}
        self._ends: dict[fx.Node, float] = {}

    def ready(self, node: fx.Node) -> float:
        """When everything that the node waits for is there; 0 where it waits for nothing."""
        if is_wait(node):
            started = started_by(node)
            return self._ends.get(started, 0.0) if started is not None else 0.0
        hosted = [self._ends.get(n, 0.0) for n in node.all_input_nodes if stream_of(n) == HOST]
        return max(hosted, default=0.0) if not is_async(node) else 0.0

    def run(self, node: fx.Node) -> tuple[float, Span]:
        """Seconds that compute stood still before it, and when it runs."""
        if is_async(node):
            stream = stream_of(node) or COMMUNICATION
            start = max(self.now, self._free[stream])
            self._free[stream] = self._ends[node] = start + self.costs.seconds(node)
            return 0.0, Span(node, stream, start, self._ends[node])
        stood = max(0.0, self.ready(node) - self.now)
        start = self.now + stood
        self.now = start + self.costs.seconds(node)
        return stood, Span(node, COMPUTE, start, self.now)


def play(order: Sequence[fx.Node], costs: Costs) -> Played:
    clock, played = Clock(costs), Played()
    for node in order:
        stood, span = clock.run(node)
        if stood:
            played.waits.append(Span(node, COMPUTE, span.start - stood, span.start))
        if span.end > span.start:
            played.spans.append(span)
    played.seconds = max((s.end for s in played.spans), default=0.0)
    return played


class Memory:
    """Bytes that values of a graph take while they are needed, in-flight ones included; inputs are not counted."""

    def __init__(self, nodes: Sequence[fx.Node], costs: Costs) -> None:
        self._costs = costs
        self._reads = {n: self._needed_by(n) for n in nodes}
        self._left = Counter(owned for owners in self._reads.values() for owned in owners)
        self.live = 0.0

    def _needed_by(self, node: fx.Node) -> set[fx.Node]:
        """Memory that must be there when the node runs. A collective reads its inputs until it is waited for."""
        started = started_by(node) if is_wait(node) else None
        sources = [*node.all_input_nodes, *(started.all_input_nodes if started is not None else ())]
        return {owner(n) for n in sources}

    def run(self, node: fx.Node) -> None:
        self.live += self._costs.bytes(node) if node.op != "placeholder" else 0.0
        for owned in self._reads[node]:
            self._left[owned] -= 1
            if not self._left[owned] and owned.op != "placeholder":
                self.live -= self._costs.bytes(owned)


def peak(order: Sequence[fx.Node], costs: Costs) -> float:
    memory, highest = Memory(order, costs), 0.0
    for node in order:
        memory.run(node)
        highest = max(highest, memory.live)
    return highest
