"""Row indices for a batch, computed outside of the compiled graph.

A program holds what the packed graph asks of a batch: row sets, and tensors made from them (rows, columns, offsets,
maps from one set to another). It evaluates the few nodes of the captured graph that sets mention, checks what the
compiler speculated on, and refuses batches that the packed graph would get wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from ... import _torch
from ...graph.nodes import is_collective, is_storage
from ...pipeline.capacity import Capacity
from ...runtime.prologue import Call, Unprovable, reading
from .attending import Attention, checked_nodes
from .attention.checks import OnBatch, SizeAtMost
from .attention.normal import Blindness
from .axes import Typing
from .calls import Size
from .meaning import Speculation, only
from .sets import Batch, Shown, Terms, within_band
from .spaces import Space

Recipe = Callable[["Rows"], torch.Tensor]


@dataclass(frozen=True)
class RowSet:
    """Rows of a space: a union of terms, or all of them."""

    number: int
    space: Space
    terms: Terms | None
    rounded: bool = False  # dummy rows may follow (capacity.py)

    def __str__(self) -> str:
        return "all rows" if self.terms is None else " | ".join(sorted(map(str, self.terms)))


@dataclass
class Rows:
    """The row sets of one batch."""

    batch: Batch
    capacity: Capacity | None = None
    _rows: dict[RowSet, torch.Tensor] = field(default_factory=dict)
    _places: dict[RowSet, torch.Tensor] = field(default_factory=dict)

    def mask(self, chosen: RowSet) -> torch.Tensor:
        if chosen.terms is None:
            return torch.ones(self.batch.extent(chosen.space), dtype=torch.bool)
        return self.batch.union(chosen.terms)

    def rows(self, chosen: RowSet) -> torch.Tensor:
        """Flat row numbers, sequence by sequence."""
        if chosen not in self._rows:
            self._rows[chosen] = self.mask(chosen).flatten().nonzero().squeeze(1)
        return self._rows[chosen]

    def columns(self, chosen: RowSet) -> torch.Tensor:
        return self.rows(chosen) % self.batch.extent(chosen.space)[1]

    def sequences(self, chosen: RowSet) -> torch.Tensor:
        return self.rows(chosen) // self.batch.extent(chosen.space)[1]

    def offsets(self, chosen: RowSet) -> torch.Tensor:
        count = self.mask(chosen).sum(1).cumsum(0)
        return torch.cat([count.new_zeros(1), count])

    def size(self, chosen: RowSet) -> int:
        """Number of rows in the packed graph, dummies included."""
        kept = len(self.rows(chosen))
        if not chosen.rounded or self.capacity is None:
            return kept
        size = self.capacity.rounded(kept)
        if size is None:
            raise Unprovable(f"more rows matter than the largest bucket of option 'capacity' ({self.capacity}) holds")
        total, columns = self.batch.extent(chosen.space)
        return min(size, total * columns)

    def filled(self, chosen: RowSet, values: torch.Tensor, dummy: int | None = None) -> torch.Tensor:
        """One value per row, and one per dummy: the last row's again, or a number."""
        count = self.size(chosen) - len(values)
        if not count:
            return values
        return torch.cat([values, values[-1:].expand(count) if dummy is None else values.new_full((count,), dummy)])

    def places(self, chosen: RowSet) -> torch.Tensor:
        """Where each row of the space is in the set; -1 where it is not."""
        if chosen not in self._places:
            total, columns = self.batch.extent(chosen.space)
            rows = self.rows(chosen)
            out = rows.new_full((total * columns,), -1)
            out[rows] = torch.arange(len(rows))
            self._places[chosen] = out
        return self._places[chosen]

    def found(self, chosen: RowSet, rows: torch.Tensor) -> torch.Tensor:
        """Places of given rows, which must all be in the set."""
        out = rows if chosen.terms is None else self.places(chosen)[rows]
        if bool((out < 0).any()):
            raise Unprovable("a row that is read is not among the rows that were kept")
        return out


@dataclass(frozen=True)
class SeesKey:
    """Every demanded query of a softmax sees a key, unless eager gives zero for it anyway.

    Without one, eager gives an average over what is hidden, or no number at all.
    """

    attention: Attention
    queries: RowSet
    line: str

    __hash__ = object.__hash__

    @property
    def nodes(self) -> list[fx.Node]:
        a, check = self.attention, self.attention.sees_key
        assert check is not None
        told = [p.node for p in (*a.predicates, *a.shown)] if self._is_told else a.tested(check.visible)
        return [*told, *a.tested(check.exempt)]

    @property
    def _is_told(self) -> bool:
        """Do predicates and distance tell what is visible, without a look at pairs?"""
        a = self.attention
        return a.exact and (a.self_attention or not a.bounded)

    def check(self, rows: Rows) -> None:
        seen = self._seen_by_predicates(rows.batch) if self._is_told else self._seen_by_pairs(rows.batch)
        if self.attention.form.blind is Blindness.NAN:
            # Also of queries that nobody reads: NaN times zero is NaN in the gradients of keys and values.
            if not bool(seen.all()):
                raise Unprovable("a query sees no valid key, and is not a number in eager", self.line)
        elif bool((rows.mask(self.queries) & ~seen).any()):
            raise Unprovable("a query that matters sees no valid key, and eager averages over pads", self.line)

    def _seen_by_predicates(self, batch: Batch) -> torch.Tensor:
        a = self.attention
        visible = torch.ones(batch.extent(a.keys), dtype=torch.bool)
        for predicate in a.predicates:
            visible = visible & batch.holds(predicate, a.keys)
        seen = within_band(visible, -a.most, -a.least) if a.bounded else visible.any(1, keepdim=True)
        for predicate in a.shown:
            seen = seen & batch.holds(predicate, a.queries)
        return seen | self._exempt(batch).all(1)

    def _seen_by_pairs(self, batch: Batch) -> torch.Tensor:
        assert self.attention.sees_key is not None
        pairs = Shown.of(self.attention.sees_key.visible, self.attention.pairs, self.attention.form.sizes).on(batch)
        return (pairs.any(3) | self._exempt(batch)).all(1)

    def _exempt(self, batch: Batch) -> torch.Tensor:
        """(sequences, heads, queries), or ones."""
        assert self.attention.sees_key is not None
        dims = (*self.attention.pairs[:3], ())
        return Shown.of(self.attention.sees_key.exempt, dims, self.attention.form.sizes).on(batch).squeeze(3)


@dataclass(frozen=True)
class Holds:
    """What an attention relies on is so in the batch at hand."""

    check_: OnBatch
    line: str

    @property
    def nodes(self) -> list[fx.Node]:
        return checked_nodes(self.check_)

    def check(self, rows: Rows) -> None:
        asked, batch = self.check_, rows.batch
        holds = batch.number(asked.size) <= asked.most if isinstance(asked, SizeAtMost) else asked.holds(batch.values)
        if not holds:
            raise Unprovable(f"it does not hold that {asked}", self.line)


@dataclass(frozen=True)
class InRange:
    """Indices lie within the table that they are looked up in, also those of rows that are left out: eager raises."""

    index: fx.Node
    count: Size
    from_end: bool  # may they be negative?
    ignored: int | None = None  # a number that is no index
    counted: tuple[fx.Node, int] | None = None  # a value and its dim, where no input has the size

    @property
    def nodes(self) -> list[fx.Node]:
        return [self.index] if self.counted is None else [self.index, self.counted[0]]

    def check(self, rows: Rows) -> None:
        value, count = rows.batch.values[self.index], self._count(rows.batch)
        value = value if self.ignored is None else value[value != self.ignored]
        if value.numel() == 0:
            return
        least, most = (int(x) for x in value.aminmax())
        if most >= count or least < (-count if self.from_end else 0):
            raise Unprovable(f"%{self.index} holds an index that is out of range")

    def _count(self, batch: Batch) -> int:
        if self.counted is None:
            return batch.number(self.count)
        node, dim = self.counted
        return batch.values[node].shape[dim]


@dataclass(frozen=True)
class HasRow:
    """Every sequence has a row that a softmax over its columns counts: eager averages over pads otherwise."""

    visible: Shown  # (sequences, other dims, columns)
    line: str

    @property
    def nodes(self) -> list[fx.Node]:
        return self.visible.nodes

    def check(self, rows: Rows) -> None:
        if not bool(self.visible.on(rows.batch).any(2).all()):
            raise Unprovable("a sequence has no valid row to take a softmax over", self.line)


BatchCheck = SeesKey | Holds | InRange | HasRow


@dataclass
class Program:
    """Everything the prologue does for one graph."""

    nodes: fx.GraphModule  # computes the nodes that sets mention
    order: list[fx.Node]  # those nodes, as the analysis knows them
    typing: Typing
    symbols: dict[sympy.Symbol, tuple[int, int | None]]  # where a symbolic size is read: input, dim
    recipes: dict[str, Recipe]
    checks: list[BatchCheck]
    speculations: list[Speculation]
    sets: list[RowSet]
    entries: list[tuple[int, str]]  # padded floating-point inputs, which must be finite
    hiding: list[tuple[int, str]]  # those of -inf, which must leave each query a key
    promised: dict[RowSet, Size]  # numbers of rows that the graph was made for
    capacity: Capacity | None = None

    def provider(self, name: str) -> Callable[[Call], torch.Tensor]:
        return reading(lambda call: call.once(self, lambda: self.run(call.inputs))[name], self.reads())

    def reads(self) -> set[int]:
        """Inputs of the graph that rows depend on."""
        used = {i for i, n in enumerate(self.nodes.graph.find_nodes(op="placeholder")) if n.users}
        return used | {i for i, _ in self.symbols.values()} | {i for i, _ in (*self.entries, *self.hiding)}

    __hash__ = object.__hash__

    def batch(self, inputs: Sequence[Any]) -> Batch:
        try:
            values = self.nodes(*inputs)
        except Exception as error:  # the captured graph raises it where eager does
            raise Unprovable(f"what rows depend on cannot be computed: {type(error).__name__}") from error
        return batch_of(self.typing, dict(zip(self.order, values, strict=True)), self.symbols, inputs)

    def run(self, inputs: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        with torch.no_grad():
            rows = self.checked(inputs)
            return {name: recipe(rows) for name, recipe in self.recipes.items()}

    def checked(self, inputs: Sequence[Any]) -> Rows:
        """The row sets of a batch that the packed graph can take."""
        with torch.no_grad():
            batch = self.batch(inputs)
            for a, b in self.typing.axes.assumed_equal:
                if batch.number(a) != batch.number(b):
                    raise Unprovable(f"sizes {a} and {b} differ, which were equal when this was compiled")
            for speculation in self.speculations:
                verify(speculation, batch.values[speculation.node])
            for index, name in self.entries:
                given = inputs[index].float() if is_storage(inputs[index]) else inputs[index]
                if not bool(torch.isfinite(given).all()):
                    raise Unprovable(f"%{name} holds values that are not finite, which pads may spread")
            for index, name in self.hiding:
                mask = inputs[index]
                if bool((mask.isnan() | mask.isposinf()).any()) or bool(mask.isneginf().all(-1).any()):
                    raise Unprovable(f"%{name} hides every key of a query, or holds more than what hides")
            rows = Rows(batch, self.capacity)
            for chosen in self.sets:
                kept = len(rows.rows(chosen))
                if kept == 0:
                    raise Unprovable("no row of this batch matters")
                if chosen in self.promised and batch.number(self.promised[chosen]) != kept:
                    raise Unprovable("the offsets of packed rows are not those of the rows that are there")
                rows.size(chosen)
            for check in self.checks:
                check.check(rows)
            return rows


def verify(speculation: Speculation, value: torch.Tensor) -> None:
    """Is what was seen at compile time still so?"""
    if speculation.kind != "same":
        if not bool(only(value, speculation.kind, speculation.seen).all()):
            raise Unprovable(f"%{speculation.node} no longer holds a mask's two values only")
    elif not torch.equal(value, speculation.seen):
        raise Unprovable(f"%{speculation.node} no longer holds what it held when this was compiled")


def batch_of(
    typing: Typing, values: Mapping[fx.Node, torch.Tensor], symbols: Mapping[sympy.Symbol, Any], inputs: Sequence[Any]
) -> Batch:
    known: dict[Any, int] = {}

    def number(value: Size) -> int:
        if isinstance(value, int):
            return value
        if not known:
            for symbol, (index, dim) in symbols.items():
                known[symbol] = int(inputs[index] if dim is None else inputs[index].shape[dim])
        return int(value.subs(known))

    return Batch(values, typing.atoms, number, typing.axes.size)


class Examples:
    """Values of untainted nodes on the inputs seen at compile time."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[Any] | None) -> None:
        placeholders = graph.find_nodes(op="placeholder")
        self.known = inputs is not None
        self._values: dict[fx.Node, Any] = dict(zip(placeholders, inputs or [], strict=False))
        self.inputs = inputs

    def __call__(self, node: fx.Node) -> torch.Tensor | None:
        if not self.known:
            return None
        try:
            with torch.no_grad():
                found = self._value(node)
            return None if isinstance(found, torch.Tensor) and is_storage(found) else found
        except Exception:
            return None  # an op that does not run on these inputs: nothing is known

    def _value(self, node: fx.Node) -> Any:
        todo = [node]
        while todo:
            at = todo[-1]
            if at in self._values:
                todo.pop()
                continue
            waiting = [n for n in at.all_input_nodes if n not in self._values]
            if waiting:
                todo += waiting
                continue
            self._values[at] = self._run(at)
            todo.pop()
        return self._values[node]

    def _run(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return getattr(node.graph.owning_module, str(node.target))
        assert node.op == "call_function" and callable(node.target)
        if is_collective(node):
            raise ValueError(f"%{node.name} needs the other ranks, who may be compiling something else")
        if _torch.is_impure(node) or _torch.is_random(node) or not _torch.is_functional(node):
            raise ValueError(f"%{node.name} writes or draws: compiling a step has no effect of its own")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._values[n])
        return node.target(*args, **kwargs)


def subgraph(graph: fx.Graph, wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """A module that computes some nodes of a graph from its inputs."""
    live: set[fx.Node] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in live:
            live.add(node)
            todo += node.all_input_nodes
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or node in live:
            copies[node] = new.node_copy(node, lambda n: copies[n])
    new.output(tuple(copies[n] for n in wanted))
    owner = graph.owning_module
    assert owner is not None
    module = fx.GraphModule(owner, new)
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    return module
