"""What packing would leave out of the batch seen, and what it would add: counts, for `pipeline/worth.py` to price."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from ...graph.costs import known_sizes, node_cost
from .analysis import RowAnalysis
from .attending import Attention
from .deciding import Attends, AttendsAll, Keeps, Loses, Moves, OnRows, Picks, Pools, Sums, Weighs
from .sets import Terms
from .spaces import Space

# The batch seen may be the fullest of all: not packing for its sake would cost all others more than packing costs it.
FULLEST = 0.75
_CALLS = (Attends, AttendsAll, Keeps, Loses, Moves, Picks, Pools, Sums, Weighs)  # packed by an op of turbogr's own


@dataclass(frozen=True)
class Counts:
    """Of one forward of the batch seen."""

    rows: int  # that packed values live on
    of: int
    flops: float  # left out
    bytes: float  # left out: read or written
    calls: int  # added
    whole: tuple[float, float]  # FLOPs and bytes of the padded forward


def counts(found: RowAnalysis) -> Counts | None:
    """None where no batch was seen."""
    if not found.examples.known:
        return None
    return _Counting(found).counts()


class _Counting:
    def __init__(self, found: RowAnalysis) -> None:
        self.an, self.batch = found.demand, found.batch()
        self.sizes = known_sizes(found.graph)
        self.sets: set[tuple[Space, Terms]] = set()

    def counts(self) -> Counts:
        flops = moved = all_flops = all_moved = 0.0
        shares = self._shares()
        for node in self.an.graph.nodes:
            if node.op != "call_function":
                continue
            computed, stored = shares.get(node, (1.0, 1.0))
            cost, size = (self._number(c) if c is not None else 0.0 for c in node_cost(node))
            all_flops, all_moved = all_flops + cost, all_moved + size
            flops, moved = flops + (1 - computed) * cost, moved + (1 - stored) * size
        calls = sum(isinstance(d, _CALLS) for d in self.an.decisions.values()) + len(self.sets)
        rows, total = max(
            ((self._size(s[1]), self._total(s[0])) for s in self.sets), default=(0, 0), key=lambda x: x[1]
        )
        return Counts(rows, total, flops, moved, calls, (all_flops, all_moved))

    def _shares(self) -> dict[fx.Node, tuple[float, float]]:
        """Of what a node computes, and of what it stores, how much is left."""
        out: dict[fx.Node, tuple[float, float]] = {}
        for node, decision in self.an.decisions.items():
            if isinstance(decision, (Attends, AttendsAll)):
                pairs = self._pairs(node, decision.attention)
                out |= dict.fromkeys(decision.attention.form.chain, (pairs, 0.0))  # no pair of rows is stored
                out[node] = (pairs, 0.0)
            elif isinstance(decision, OnRows):
                self.sets.add((decision.space, decision.rows))
                share = min(self._size(decision.rows) / max(self._total(decision.space), 1), FULLEST)
                out[node] = (share, share)
        return out

    def _pairs(self, node: fx.Node, a: Attention) -> float:
        """Of all pairs of query and key, those of rows that matter."""
        (rows, columns), (_, others) = self.batch.extent(a.queries), self.batch.extent(a.keys)
        queries = self._each(self.an.wanted.get(node), rows, columns)
        keys = self._each(self.an.wanted.get(a.value), rows, others)
        kept = torch.as_tensor(queries * keys).expand(rows).sum()
        return min(int(kept) / max(rows * columns * others, 1), FULLEST**2)

    def _each(self, wanted: Any, rows: int, columns: int) -> Any:
        """How many rows of each sequence; all of them where that is not known, or said of other sequences."""
        found = self.batch.union(wanted).sum(1) if isinstance(wanted, frozenset) else None
        return found if found is not None and len(found) in (1, rows) else columns

    def _size(self, rows: Terms) -> int:
        return int(self.batch.union(rows).sum())

    def _total(self, space: Space) -> int:
        rows, columns = self.batch.extent(space)
        return rows * columns

    def _number(self, value: sympy.Expr) -> float:
        number = value.subs(self.sizes)
        return float(number) if number.is_number else 0.0
