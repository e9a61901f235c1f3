"""Row-space analysis of one graph, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .calls import is_tensor, shape, size_symbols
from .demand import DemandAnalysis
from .facts import Facts
from .program import Examples, batch_of
from .sets import ALL, Batch, Seen, Term, Terms, within

MOSTLY = 0.9  # of all rows: nothing is gained by leaving out the rest
GROWTH = 1.25  # keys per row that matters


@dataclass
class RowAnalysis:
    graph: fx.Graph
    demand: DemandAnalysis
    examples: Examples

    def reads_pads(self) -> frozenset[fx.Node]:
        """Attentions that, on the batch seen, read far more keys than rows matter: pads are among them, and to
        leave them out would change the result."""
        if not self.examples.known:
            return frozenset()
        batch, found = self._batch(self.examples), set()
        for node, a in self.demand.attentions.items():
            wanted, keys = self.demand.wanted.get(node), self.demand.wanted.get(a.value)
            own = {t for t in keys if isinstance(t, Seen)} if isinstance(keys, frozenset) else set()
            if a.predicates or not own or not isinstance(wanted, frozenset):
                continue
            read, matter = (int(batch.union(frozenset(t)).sum()) for t in (own, {_base(t) for t in own}))
            rows, columns = batch.extent(a.keys)
            if read >= MOSTLY * rows * columns and read > GROWTH * matter:
                found.add(node)
        return frozenset(found)

    def alike(self) -> frozenset[Terms]:
        """Sets that lie within the rows that layers share and, on the batch seen, are as large as those.

        A map between two sets costs a copy of each value that crosses it. Rows more than asked for are never wrong.
        """
        if not self.examples.known:
            return frozenset()
        batch, found = self._batch(self.examples), set()
        bodies, wanted = self.demand.bodies(), self.demand.wanted.items()
        asked = {
            (self.demand.space_of(n), terms) for n, terms in wanted if n.op == "call_function" and terms is not ALL
        }
        for space, terms in asked:
            body = bodies.get(space) if space is not None else None
            if body is not None and within(terms, body) and _size(batch, terms) == _size(batch, body):
                found.add(terms)
        return frozenset(found)

    def batch(self) -> Batch:
        """The batch seen."""
        return self._batch(self.examples)

    def _batch(self, known: Examples) -> Batch:
        class Lazy(dict[fx.Node, torch.Tensor]):
            def __missing__(self, node: fx.Node) -> torch.Tensor:
                value = known(node)
                assert value is not None, node
                return value

        symbols = size_symbols(self.graph.find_nodes(op="placeholder"))
        return batch_of(self.demand.typing, Lazy(), symbols, known.inputs or [])

    def undemanded(self, inputs: Sequence[Any]) -> dict[fx.Node, torch.Tensor]:
        """For each value that is demanded on some rows only: True where an element is not, shaped to broadcast."""
        an, typing = self.demand, self.demand.typing
        batch = self._batch(Examples(self.graph, inputs))
        out = {}
        for node, wanted in an.wanted.items():
            space = an.space_of(node)
            if wanted is ALL or space is None or not is_tensor(node) or node.op != "call_function":
                continue
            keep = batch.union(wanted)
            flat = typing.flat(node)
            order = [a for a in flat if a in space.axes]
            keep = keep.reshape([batch.size(a) for a in space.axes]).permute([space.axes.index(a) for a in order])
            keep = keep.reshape([batch.size(a) if a in space.axes else 1 for a in flat])
            keep = keep.expand([batch.size(a) for a in flat])
            out[node] = ~keep.reshape([batch.number(s) for s in shape(node)])
        return out


def _size(batch: Batch, terms: Terms) -> int:
    return int(batch.union(terms).sum())


def _base(term: Term) -> Term:
    return _base(term.of) if isinstance(term, Seen) else term


def analyse(graph: fx.Graph, inputs: Sequence[Any] | None = None, *, unspecified_outputs: bool = False) -> RowAnalysis:
    """Facts and demand of a captured graph; `inputs` are real ones, where they are known."""
    with torch.no_grad():
        examples = Examples(graph, inputs)
        facts = Facts(graph, examples)
        return RowAnalysis(graph, DemandAnalysis(facts, unspecified_outputs), examples)


def asked_again(
    found: RowAnalysis, *, refused: frozenset[fx.Node] = frozenset(), alike: frozenset[Terms] = frozenset(),
    barriers: frozenset[fx.Node] = frozenset(),
) -> RowAnalysis:  # fmt: skip
    """The same facts, another demand."""
    demand = found.demand
    with torch.no_grad():
        new = DemandAnalysis(demand.facts, demand.unspecified_outputs, refused, alike, barriers)
    return RowAnalysis(found.graph, new, found.examples)
