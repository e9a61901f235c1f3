"""How calls of compiled graphs went: what users read to see whether batches take the rewritten graph."""

from __future__ import annotations

import weakref
from collections import Counter


class RunStatistics:
    """How the calls of one compiled graph went."""

    def __init__(self, graph: str) -> None:
        self.graph = graph  # '0.0': Dynamo's frame and compilation
        self.calls = 0
        self.fallbacks: Counter[str] = Counter()  # calls that ran an unrewritten graph, by reason
        self.compared = 0  # batches on which it was compared with the captured graph
        self.comparing = 0.0  # seconds that took
        self.uncompared = ""  # why it was not compared
        self.ahead = 0  # calls whose added inputs were computed during the call before
        self.waited = 0.0  # seconds that those waited for them
        self.at_once: Counter[str] = Counter()  # calls in a loop over `ahead` that computed them themselves, by reason
        _ALIVE.add(self)

    def __repr__(self) -> str:
        fell = "".join(f"; {count} fell back: {reason}" for reason, count in self.fallbacks.items())
        ahead = f"; {self.ahead} computed ahead, waited {self.waited:.3f} s" if self.ahead else ""
        at_once = "".join(f"; {count} not ahead: {reason}" for reason, count in self.at_once.items())
        return f"graph {self.graph}: {self.calls} calls, {self.compared} compared{fell}{ahead}{at_once}"


# Compiled code owns its statistics; Dynamo drops both together.
_ALIVE: weakref.WeakSet[RunStatistics] = weakref.WeakSet()


def statistics() -> list[RunStatistics]:
    """Of every compiled graph that decides something at run time, was called and is alive."""
    return sorted((s for s in _ALIVE if s.calls), key=lambda s: [(len(part), part) for part in s.graph.split(".")])
