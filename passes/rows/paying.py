"""What packing would leave out of the batch seen, and what it would add: counts, for `pipeline/worth.py` to price."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy
import torch
from torch import fx

from ...graph.costs import known_sizes, node_cost
from ...graph.nodes import tensor
from ...pipeline.worth import Added, Work
from .analysis import RowAnalysis
from .attending import Attention
from .by_sequence import Operand, makes_matrix, times
from .calls import op, product, shape
from .deciding import Attends, AttendsAll, Keeps, Loses, Moves, OnRows, Picks, Pools, Sums, Weighs
from .sets import Terms
from .spaces import Space
from .spans import Window

# The batch seen may be the fullest of all: not packing for its sake would cost all others more than packing costs it.
FULLEST = 0.75
_CALLS = (Attends, AttendsAll, Keeps, Loses, Moves, Picks, Pools, Sums, Weighs)  # packed by an op of turbogr's own
PER_SEQUENCE = 0.25  # of a call, for each product of one sequence
_CALLS_OF = {"turbogr::grouped_mm": 6}  # rows are sorted by group, and put back


@dataclass(frozen=True)
class Counts:
    """Of the batch seen."""

    rows: int  # that packed values live on
    of: int
    whole: Work  # padded
    usually: Work  # left out where at least a quarter of the rows is
    here: Work  # left out of this very batch
    added: Added


Shares = dict[fx.Node, tuple[float, float]]  # of what a node computes, and of what it stores, how much is left


def _left_out(flops: float, bytes: float, share: tuple[float, float] | None) -> Work:
    computed, stored = share or (1.0, 1.0)
    return Work((1 - computed) * flops, (1 - stored) * bytes)


def counts(found: RowAnalysis) -> Counts | None:
    """None where no batch was seen."""
    if not found.examples.known:
        return None
    return _Counting(found).counts()


class _Counting:
    def __init__(self, found: RowAnalysis) -> None:
        self.an, self.batch = found.demand, found.batch()
        self.sizes = known_sizes(found.graph)
        self.sets: set[tuple[Space, Terms]] = {
            (d.space, d.rows) for d in self.an.decisions.values() if isinstance(d, OnRows)
        }

    def counts(self) -> Counts:
        usual, seen = self._shares(FULLEST), self._shares(1.0)
        whole, usually, here = Work(), Work(), Work()
        for node in self.an.graph.nodes:
            if node.op != "call_function" or (node not in self.an.wanted and not node.is_impure()):
                continue
            flops, bytes = (self._number(c) if c is not None else 0.0 for c in node_cost(node))
            whole += Work(flops, bytes, 1 if bytes else 0)
            usually += _left_out(flops, bytes, usual.get(node))
            here += _left_out(flops, bytes, seen.get(node))
        rows, total = max(
            ((self._size(s[1]), self._total(s[0])) for s in self.sets), default=(0, 0), key=lambda x: x[1]
        )
        return Counts(rows, total, whole, usually, here, Added(self._calls(), self._moved(seen)))

    def _calls(self) -> int:
        found = self.an.decisions
        by_kind = sum(isinstance(d, _CALLS) for d in found.values()) + len(self.sets)
        by_op = sum(_CALLS_OF.get(op(n), 0) for n in found)
        return by_kind + by_op + round(PER_SEQUENCE * sum(map(self._sequences, found)))

    def _sequences(self, node: fx.Node) -> int:
        """Of a product that is computed sequence by sequence."""
        decision = self.an.decisions[node]
        if isinstance(decision, Pools):
            p, pool = decision.product, decision.product.equation
            operands = Operand(p.left, pool[0]), Operand(p.right, pool[1])
            one_by_one = makes_matrix(self.an.typing, *operands, pool[2], p.space)
            return self.batch.extent(p.space)[0] if one_by_one else 0
        if not isinstance(decision, OnRows) or times(self.an.typing, node, decision.space) is None:
            return 0
        return self.batch.extent(decision.space)[0]

    def _moved(self, shares: Shares) -> float:
        """Windows of neighbouring rows, and rows that go from one form into the other: read and written."""
        total = 0.0
        for node, decision in self.an.decisions.items():
            if not isinstance(decision, OnRows):
                continue
            span = self.an.span_of(node)
            if isinstance(span, Window):
                total += 2 * shares[node][0] * len(span.starts) * self._bytes(span.source)
            if any(self._reads_padded(user) for user in node.users):
                total += (1 + shares[node][1]) * self._bytes(node)
        return total

    def _reads_padded(self, user: fx.Node) -> bool:
        runs = user in self.an.wanted or user.op == "output"
        return runs and user not in self.an.decisions and user not in self._chains and not op(user).startswith("sym_")

    @cached_property
    def _chains(self) -> set[fx.Node]:
        """Between the products of an attention: nobody computes it."""
        found = [d.attention for d in self.an.decisions.values() if isinstance(d, (Attends, AttendsAll))]
        return {n for a in found for n in a.form.chain}

    def _bytes(self, node: fx.Node) -> float:
        value = tensor(node)
        return 0.0 if value is None else self._number(sympy.sympify(product(shape(node)))) * value.element_size()

    def _shares(self, fullest: float) -> Shares:
        out: Shares = {}
        for node, decision in self.an.decisions.items():
            if isinstance(decision, (Attends, AttendsAll)):
                pairs = self._pairs(node, decision.attention, fullest)
                out |= dict.fromkeys(decision.attention.form.chain, (pairs, 0.0))  # no pair of rows is stored
                out[node] = (pairs, 0.0)
            elif isinstance(decision, OnRows):
                share = min(self._size(decision.rows) / max(self._total(decision.space), 1), fullest)
                out[node] = (share, share)
        return out

    def _pairs(self, node: fx.Node, a: Attention, fullest: float) -> float:
        """Of all pairs of query and key, those of rows that matter."""
        (rows, columns), (_, others) = self.batch.extent(a.queries), self.batch.extent(a.keys)
        queries = self._each(self.an.wanted.get(node), rows, columns)
        keys = self._each(self.an.wanted.get(a.value), rows, others)
        kept = torch.as_tensor(queries * keys).expand(rows).sum()
        return min(int(kept) / max(rows * columns * others, 1), fullest**2)

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
