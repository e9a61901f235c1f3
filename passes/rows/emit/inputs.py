"""Row sets of the packed graph, and the tensors that the prologue makes for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from .... import _torch
from ....errors import TurbogrError
from ....pipeline.capacity import Capacity
from ....runtime.prologue import add_input
from ....runtime.specialize import ROUNDED
from ..calls import Size, is_tensor, product, shape, size, value_of
from ..demand import DemandAnalysis
from ..meaning import Predicate, Within
from ..program import BatchCheck, InRange, Program, Recipe, Rows, RowSet, subgraph
from ..sets import Holding, Terms, VisibleTo
from ..spaces import Numbered, Projected, Relation, Space, Taken
from .building import Builder
from .finite import FiniteInputs


class Inputs(Builder):
    """What the packed graph asks of a batch."""

    def __init__(self, graph: fx.Graph, an: DemandAnalysis, capacity: Capacity | None) -> None:
        super().__init__(graph, an.typing)
        self.an, self.capacity = an, capacity  # packed rows come in these sizes
        self._captured = list(graph.nodes)
        self.pair_counts: dict[sympy.Symbol, tuple[RowSet, RowSet]] = {}
        self._sets: dict[tuple[Space, Terms | None, bool], RowSet] = {}
        self._counts: dict[RowSet, Any] = {}
        self._inputs: dict[Any, fx.Node] = {}
        self._recipes: dict[str, Recipe] = {}
        self._checks: list[BatchCheck] = []
        self._needed: dict[fx.Node, None] = {}
        self._finite = FiniteInputs(an)

    def set_of(self, space: Space, terms: Terms | None, *, exact: bool = False) -> RowSet:
        """`exact`: the number of rows may not be rounded."""
        rounded = self.capacity is not None and not exact and self._known_count(space, terms) is None
        key = (space, terms, rounded)
        if key not in self._sets:
            self._sets[key] = RowSet(len(self._sets), space, terms, rounded)
        return self._sets[key]

    def count(self, chosen: RowSet) -> Any:
        """Number of rows, as a size of fake tensors."""
        if chosen not in self._counts:
            total = product(self.typing.axes.size(a) for a in chosen.space.axes)
            limit = total if isinstance(total, int) else None
            known = self._known_count(chosen.space, chosen.terms)
            self._counts[chosen] = known or _torch.new_row_count(self.mode, limit)
        return self._counts[chosen]

    def _known_count(self, space: Space, terms: Terms | None) -> Any:
        """All rows of a space; rows that the caller has packed keep the size they came with."""
        if terms is None:
            return self.fake_size(product(self.typing.axes.size(a) for a in space.axes))
        if len(terms) != 1:
            return None
        (term,) = terms
        if not isinstance(term, Holding) or len(term.predicates) != 1:
            return None
        (predicate,) = term.predicates
        if not isinstance(predicate, Within):
            return None
        for node in self.placeholders:
            if is_tensor(node):
                row = self.typing.axes.atoms(self.typing.jagged[predicate.node][2])
                at = [i for i, d in enumerate(self.typing.atoms(node)) if d == row]
                if at:
                    return value_of(node).shape[at[0]]
        return None

    def pairs(self, queries: RowSet, keys: RowSet) -> sympy.Symbol:
        """The number of pairs of query and key, which only a batch knows."""
        symbol = sympy.Symbol(f"pairs_{queries.number}_{keys.number}", positive=True, integer=True)
        self.pair_counts[symbol] = (queries, keys)
        return symbol

    def need(self, *nodes: fx.Node) -> None:
        self._needed.update(dict.fromkeys(nodes))

    def _needs(self, chosen: RowSet) -> None:
        for term in chosen.terms or ():
            self._needs_term(term)

    def _needs_term(self, term: Any) -> None:
        for predicate in getattr(term, "predicates", ()):
            self.need(predicate.node)
            self.an.meanings.rely_on(predicate)
        self.need(*(term.pairs.nodes if isinstance(term, VisibleTo) else ()))
        relation = getattr(term, "relation", None)
        if relation is not None:
            self._needs_relation(relation)
        if getattr(term, "of", None) is not None:
            self._needs_term(term.of)

    def _needs_relation(self, relation: Relation) -> None:
        if isinstance(relation, Taken):
            self.need(relation.column)
        elif isinstance(relation, Numbered):
            self.need(*relation.numbers)

    def input(
        self, name: str, key: Any, sizes: Sequence[Any], recipe: Recipe, dtype: torch.dtype = torch.int64
    ) -> fx.Node:
        """A tensor that the prologue provides; one per key."""
        if key not in self._inputs:
            with self.mode:
                fake = torch.empty(list(sizes), dtype=dtype)
            node = add_input(self.graph, name, fake, lambda call: None)
            self._inputs[key] = node
            self._recipes[node.name] = recipe
        return self._inputs[key]

    def per_row(
        self, name: str, key: Any, chosen: RowSet, recipe: Recipe, dtype: torch.dtype = torch.int64,
        dummy: Callable[[Rows], int] | None = None,
    ) -> fx.Node:  # fmt: skip
        """One number per row of a set; a dummy row has the last row's, or its own."""
        self._needs(chosen)

        def filled(r: Rows) -> torch.Tensor:
            return r.filled(chosen, recipe(r), dummy(r) if dummy is not None else None)

        node = self.input(name, key, [self.count(chosen)], filled, dtype)
        node.meta[ROUNDED] = chosen.rounded
        return node

    def rows(self, chosen: RowSet) -> fx.Node:
        return self.per_row("rows", ("rows", chosen), chosen, lambda r: r.rows(chosen))

    def columns(self, chosen: RowSet) -> fx.Node:
        return self.per_row("columns", ("columns", chosen), chosen, lambda r: r.columns(chosen))

    def sequences(self, chosen: RowSet) -> fx.Node:
        return self.per_row("sequences", ("sequences", chosen), chosen, lambda r: r.sequences(chosen))

    def dummies(self, chosen: RowSet) -> fx.Node:
        """True for dummy rows."""
        return self.per_row(
            "dummies", ("dummies", chosen), chosen, lambda r: torch.zeros(len(r.rows(chosen)), dtype=torch.bool),
            torch.bool, lambda r: True,
        )  # fmt: skip

    def offsets(self, chosen: RowSet) -> fx.Node:
        """Of real rows: dummies belong to no sequence."""
        self._needs(chosen)
        return self.input("offsets", ("offsets", chosen), [self._bounds(chosen)], lambda r: r.offsets(chosen))

    def query_offsets(self, chosen: RowSet) -> fx.Node:
        """Dummies are queries like the last row, in its sequence."""
        if not chosen.rounded:
            return self.offsets(chosen)
        self._needs(chosen)

        def recipe(r: Rows) -> torch.Tensor:
            offsets = r.offsets(chosen)
            return offsets.where(offsets < offsets[-1], r.size(chosen))

        return self.input("query_offsets", ("query offsets", chosen), [self._bounds(chosen)], recipe)

    def _bounds(self, chosen: RowSet) -> Any:
        return self.fake_size(product(self.typing.axes.size(a) for a in chosen.space.sequence)) + 1

    def holding(self, chosen: RowSet, predicates: frozenset[Predicate]) -> fx.Node:
        """Where predicates hold, on the rows of a set."""
        self.need(*(p.node for p in predicates))

        def recipe(r: Rows) -> torch.Tensor:
            out = torch.ones(r.batch.extent(chosen.space), dtype=torch.bool)
            for p in predicates:
                out = out & r.batch.holds(p, chosen.space)
            return out.flatten()[r.rows(chosen)]

        return self.per_row("valid", ("valid", chosen, predicates), chosen, recipe, torch.bool)

    def map_to(self, source: RowSet, chosen: RowSet, zero_outside: bool = False) -> fx.Node:
        """For each row of a set, its place in another set of the same or a coarser space."""
        self._needs(source)
        relation = Projected(chosen.space, source.space)

        def recipe(r: Rows) -> torch.Tensor:
            rows = r.rows(chosen)
            there = rows if source.space == chosen.space else relation.index(r.batch)[rows]
            if zero_outside:
                places = r.places(source)[there]
                return places.where(places >= 0, r.size(source))
            return r.found(source, there)

        return self.per_row("map", ("map", source, chosen, zero_outside), chosen, recipe)

    @property
    def added(self) -> list[fx.Node]:
        """Inputs that the prologue provides."""
        return list(self._inputs.values())

    def recipe(self, node: fx.Node) -> Recipe:
        return self._recipes[node.name]

    # --- checks ------------------------------------------------------------------------------------

    def check(self, *checks: BatchCheck) -> None:
        self._checks += [c for c in checks if c not in self._checks]

    def note_lookup(self, index: fx.Node, count: Size, from_end: bool = False, ignored: int | None = None) -> None:
        """Rows of an index are left out, among which one may be out of range: eager raises then."""
        root = self.an.meanings.root(index)
        if root not in self.an.meanings.tainted:
            self.check(InRange(root, count, from_end, ignored, self._counted(count)))

    def _counted(self, count: Size) -> tuple[fx.Node, int] | None:
        """A value of the batch, and its dim, that has a size which no input has: distinct ids, say."""
        if isinstance(count, int) or count.free_symbols <= self.symbols.keys():
            return None
        for node in self._captured:
            if is_tensor(node) and node not in self.an.meanings.tainted and count in shape(node):
                return node, shape(node).index(count)
        raise TurbogrError(f"a table of {count} rows, which nothing but the graph itself tells")

    def note_entry(self, *padded: fx.Node, chosen: RowSet | None = None) -> None:
        """Rows of padded values are left out, among which one may hold what spreads."""
        self._finite.behind(padded, chosen)

    def note_readers(self, x: fx.Node, chosen: RowSet) -> None:
        """Padded values are computed from rows of which some are left out."""
        self._finite.beside(x, chosen)

    def _entries(self, inputs: Iterable[fx.Node]) -> list[tuple[int, str]]:
        return [(self.placeholders.index(x), x.name) for x in inputs]

    def _promised(self) -> dict[RowSet, Size]:
        """Row counts that the graph was made for: those of rows the caller has packed."""
        counts = ((s, c) for s, c in self._counts.items() if s.terms is not None)
        return {s: size(c) for s, c in counts if isinstance(c, int) or c.node.has_hint()}

    def program(self, original: fx.Graph, copies: dict[fx.Node, fx.Node]) -> Program:
        """What the prologue runs; `copies` leads to the nodes of the graph as it was."""
        for chosen in self._sets.values():
            self._needs(chosen)
        for check in self._checks:
            self.need(*check.nodes)
        self.need(*self.an.meanings.speculations)
        order = list(self._needed)
        for chosen in self._sets.values():
            self.count(chosen)
        if not any(n.users for n in self._inputs.values()):
            self.rows(next(iter(self._sets.values())))  # nobody reads it, but what it depends on must be checked
        used = {n for n in self._inputs.values() if n.users} or set(self._inputs.values())
        for key, node in list(self._inputs.items()):
            if node not in used:
                self._recipes.pop(node.name)
                self.graph.erase_node(node)
                del self._inputs[key]
        program = Program(
            subgraph(original, [copies[n] for n in order]), order, self.typing, self.symbols,
            self._recipes, self._checks, list(self.an.meanings.speculations.values()), list(self._sets.values()),
            self._entries(self._finite.inputs), self._entries(self._finite.hiding), self._promised(), self.capacity,
        )  # fmt: skip
        for node in self._inputs.values():
            node.meta["turbogr_provider"] = program.provider(node.name)
        return program
