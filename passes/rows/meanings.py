"""From tables to meanings: what the value of a node says, evaluated at its own dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ... import _torch
from ...graph.nodes import TRAINABLE, is_collective, tensor
from .attention.language import AtLeast, Atom, Data, Number, Position, Sum, Test
from .attention.table import Table
from .axes import Typing, swapped
from .calls import COPIES, VIEWS, arg, is_tensor, number, op, quotient, rank_of, shape
from .known import Known
from .meaning import (
    MINUS_INFINITY,
    Band,
    Const,
    Holds,
    Iota,
    Literal,
    Meaning,
    OneHot,
    Predicate,
    Speculation,
    Two,
)
from .reading import AGAIN, Reader

# Never recomputed outside of the graph: too much work for the sake of knowing rows.
_HEAVY = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "layer_norm",
          "scaled_dot_product_attention", "embedding", "turbogr::sharded_lookup", "turbogr::own_lookup",
          "turbogr::left_rows", "convolution"}  # fmt: skip

_SAME_NUMBERS = {*COPIES, "_to_copy", "to", "type_as"}
_NAN = "nan"  # which does not equal itself
DimMap = Callable[[int], "int | None"]  # where a dim goes: exactly there, or None
Bits = frozenset[tuple[bool, ...]]
Rests = frozenset[Speculation]


class Meanings:
    """Meaning of every value of a graph, as far as it has one; found when it is asked for.

    `example` gives the value of an untainted node on the inputs seen at compile time, or None.
    """

    def __init__(self, graph: fx.Graph, typing: Typing, example: Callable[[fx.Node], torch.Tensor | None]) -> None:
        self.typing, self.example = typing, example
        self.tainted: set[fx.Node] = set()
        for node in graph.nodes:
            if _taints(node) or any(n in self.tainted for n in node.all_input_nodes):
                self.tainted.add(node)
        self.speculations: dict[fx.Node, Speculation] = {}  # what decisions rest on
        self.known = Known(graph, typing, self.tainted, example)
        self._as_is = Reader(self.known, speculate=False)
        self._guessed = Reader(self.known, speculate=True)
        self._meaning: dict[fx.Node, tuple[Meaning | None, Rests]] = {}
        self._resting: dict[Predicate, set[Speculation]] = {}

    def of(self, node: Any) -> Meaning | None:
        """What a value says. Who acts on it says so by `use`."""
        return self._found(node)[0]

    def speculations_of(self, node: Any) -> Rests:
        """What must hold of a batch for the meaning to be true of it."""
        return self._found(node)[1]

    def use(self, node: Any) -> None:
        """A decision rests on the meaning: its speculations are checked on every batch."""
        for speculation in self.speculations_of(node):
            self._add(speculation)

    def _add(self, speculation: Speculation) -> None:
        known = self.speculations.get(speculation.node)
        if known is None or known.kind != "same":
            self.speculations[speculation.node] = speculation

    def rely_on(self, predicate: Predicate) -> None:
        """A decision rests on rows that a predicate names, and so on what was guessed of the mask it comes from."""
        for speculation in self._resting.get(predicate, ()):
            self._add(speculation)

    def two(self, node: Any) -> Two | None:
        meaning = self.of(node)
        return meaning if isinstance(meaning, Two) else None

    def constant(self, value: Any) -> Any:
        """The number that an argument is, or None."""
        if not isinstance(value, fx.Node):
            return number(value)
        meaning = self.of(value)
        return meaning.value if isinstance(meaning, Const) else None

    def describes_rows(self, node: fx.Node) -> bool:
        """Determined by data alone, and no axis twice."""
        return self._as_is.describes_rows(node)

    def root(self, node: fx.Node) -> fx.Node:
        """The value that a chain of views and copies shows."""
        while op(node) in VIEWS | COPIES:
            (source, *_) = node.all_input_nodes
            if sorted(self.typing.flat(node)) != sorted(self.typing.flat(source)):
                break
            node = source
        return self._as_is.first(node)

    # --- from tables -------------------------------------------------------------------------------

    def _found(self, node: Any) -> tuple[Meaning | None, Rests]:
        if not is_tensor(node):
            return None, frozenset()
        if node not in self._meaning:
            meaning, rests = self._meaning[node] = self._read(node)
            for literal in meaning.literals if isinstance(meaning, Two) and rests else ():
                if isinstance(literal, Holds):
                    for predicate in (literal.predicate, literal.predicate.negated()):
                        self._resting.setdefault(predicate, set()).update(rests)
        return self._meaning[node]

    def _read(self, node: fx.Node) -> tuple[Meaning | None, Rests]:
        table, rests = self._as_is.table_of(node)
        found: Meaning | None = self._presented(self._as_is, node, table)[0] or self._one_hot(node)
        if found is not None or any(n in self.tainted for n in _data(table)):
            return found, frozenset()  # nothing is guessed about what gradients reach
        table, rests = self._guessed.table_of(node)
        found, more = self._presented(self._guessed, node, table)
        return (None, frozenset()) if isinstance(found, Const) else (found, rests | more)

    def _presented(self, reader: Reader, node: fx.Node, table: Table) -> tuple[Meaning | None, Rests]:
        if isinstance(table.only, Position):
            return _counted(table.only, reader.own(node)), frozenset()
        by_value: dict[Any, set[tuple[bool, ...]]] = {}
        for bits, leaf in table.rows.items():
            if not isinstance(leaf, Number):
                return None, frozenset()
            by_value.setdefault(leaf.value if leaf.value == leaf.value else _NAN, set()).add(bits)
        if len(by_value) == 1:
            return Const(table.leaves[0].value), frozenset()
        yes, no, true = _divided(by_value)
        if true is None:
            return None, frozenset()
        return _Masks(reader, node, table).two(frozenset(true), yes, no)

    # --- by hand -----------------------------------------------------------------------------------

    def _one_hot(self, node: fx.Node) -> OneHot | None:
        name = op(node)
        if name == "one_hot":
            index = node.all_input_nodes[0]
            return OneHot(rank_of(node) - 1, index) if index not in self.tainted else None
        if name == "index_put":
            return self._put(node)
        value, seen_through = tensor(node), name in VIEWS and node not in self.typing.untyped
        if value is None or value.dtype == torch.bool or not (seen_through or name in _SAME_NUMBERS):
            return None
        found = self.of(node.all_input_nodes[0])
        if not isinstance(found, OneHot):
            return None
        dim = self.view(node)(found.dim) if seen_through else found.dim
        return replace(found, dim=dim) if dim is not None else None

    def _put(self, node: fx.Node) -> OneHot | None:
        """zeros[arange(rows), index] = 1."""
        indices: Any = node.args[1]
        if self.constant(node.args[0]) != 0 or self.constant(node.args[2]) != 1 or arg(node, "accumulate"):
            return None
        if len(indices) != 2 or rank_of(node) != 2 or any(not is_tensor(i) or rank_of(i) != 1 for i in indices):
            return None
        rows, index = indices
        whole = self.of(rows) == Iota(0) and shape(rows) == shape(index) == shape(node)[:1]
        return OneHot(1, index) if whole and index not in self.tainted else None

    def view(self, node: fx.Node) -> DimMap:
        """Where a dim of the source of a view ends up."""
        name, source = op(node), node.args[0]
        rank, before = rank_of(node), rank_of(source)
        if name == "unsqueeze":
            at = arg(node, "dim") % rank
            return lambda i: i + (i >= at)
        if name in ("expand", "broadcast_to", "expand_as"):
            return lambda i: i + rank - before
        if name in ("repeat", "tile"):
            whole = [quotient(b, a) == 1 for a, b in zip(shape(source), shape(node)[rank - before :], strict=True)]
            return lambda i: i + rank - before if whole[i] else None
        if name == "permute":
            order = [i % rank for i in arg(node, "dims")]
            return lambda i: order.index(i)
        if name in ("transpose", "t"):
            if rank < 2:
                return lambda i: i
            a, b = swapped(node)
            return lambda i: {a: b, b: a}.get(i, i)
        here, there = self._places(node), self._places(source)
        return lambda i: here.index(there[i]) if len(there[i]) >= 1 and here.count(there[i]) == 1 else None

    def _places(self, node: Any) -> list[tuple[int, ...]]:
        """Which of all atoms, in order, each dim is made of: reshapes keep that order."""
        out, at = [], 0
        for dim in self.typing.atoms(node):
            out.append(tuple(range(at, at + len(dim))))
            at += len(dim)
        return out


class _Masks:
    """A table of two numbers as literals over the dims of a node."""

    def __init__(self, reader: Reader, node: fx.Node, table: Table) -> None:
        self.reader, self.table = reader, table
        self.own, self.names = reader.own(node), reader.names(node)
        self.rests: Rests = frozenset()

    def two(self, true: Bits, yes: Any, no: Any) -> tuple[Two | None, Rests]:
        here, there = self._conjunction(true), self._conjunction(frozenset(self.table.rows) - true)
        if here is None:
            here, there, yes, no = there, None, no, yes
        return (Two(here, yes, no, there), self.rests) if here is not None else (None, frozenset())

    def _conjunction(self, region: Bits) -> frozenset[Literal] | None:
        """Literals that all hold in these cases, and in these alone: atoms, then tensors that say several at once."""
        left, found = set(self.table.rows), set()
        for at, atom in enumerate(self.table.atoms):
            holds = {bits[at] for bits in region}
            literal = self._literal(atom, next(iter(holds))) if len(holds) == 1 else None
            if literal is not None:
                found.add(literal)
                left = {bits for bits in left if bits[at] in holds}
        for kept, literal, rests in self._names_within(region) if left != region else ():
            if left != region and not left <= kept:
                found.add(literal)
                self.rests |= rests
                left &= kept
        return frozenset(found) if left == region else None

    def _names_within(self, region: Bits) -> Iterator[tuple[Bits, Holds, Rests]]:
        """Boolean tensors that have one value in all these cases, smaller ones first, with the cases where they do."""
        places = {atom: at for at, atom in enumerate(self.table.atoms)}
        everywhere = frozenset(self.table.rows)
        for name in self.reader.named(places):
            at = [places[a] for a in name.atoms]
            kept = frozenset(bits for bits in everywhere if tuple(bits[i] for i in at) in name.true)
            equal = region <= kept
            dims = self._dims(name.index) if equal or not region & kept else None
            if dims is not None:
                literal = Holds(Predicate(name.node, True, equal), dims)
                yield kept if equal else everywhere - kept, literal, name.rests

    def _literal(self, atom: Atom, holds: bool) -> Literal | None:
        if isinstance(atom, Test) and atom.how in ("eq", "true"):
            plain = self.reader.describes_rows(atom.node) and self.reader.is_own(atom.node, atom.index)
            dims = self._dims(atom.index) if plain and not self.reader.is_triangle(atom.node) else None
            value = True if atom.how == "true" else atom.value
            return Holds(Predicate(atom.node, value, holds), dims) if dims is not None else None
        band = self._band(atom) if isinstance(atom, AtLeast) else None
        return band if band is None or holds else band.negated()

    def _band(self, atom: AtLeast) -> Band | None:
        for i, first in enumerate(self.own):
            for j, second in enumerate(self.own):
                if first.axes and second.axes and i != j and (first - second).coefs == atom.coefs:
                    return Band(i, j, atom.least) if isinstance(atom.least, int) else None
        return None

    def _dims(self, index: Any) -> tuple[int, ...] | None:
        """The dim of this node along which each dim of an index runs."""
        out = []
        for formula in index:
            if formula.axes:
                at = [d for d, names in enumerate(self.names) if formula.axes <= set(names)]
                if len(at) != 1 or any(_is_twice(axis, self.names[at[0]]) for axis in formula.axes):
                    return None
                out.append(at[0])
        return tuple(out)


def _is_twice(axis: str, names: list[str]) -> bool:
    """Pairs of rows in one dim: it would not tell which of the two is meant."""
    return sum(n.rstrip(AGAIN) == axis.rstrip(AGAIN) for n in names) > 1


def _divided(by_value: dict[Any, set[tuple[bool, ...]]]) -> tuple[Any, Any, set[tuple[bool, ...]] | None]:
    """Two numbers and where the first is; several that all remove a score count as one, the largest of them."""
    yes, no, *others = sorted(by_value, key=lambda v: -math.inf if v == _NAN else v, reverse=True)
    removed = yes == 0 and no != _NAN and no <= MINUS_INFINITY and _NAN not in others
    if others and not removed:
        return None, None, None
    return yes, math.nan if no == _NAN else no, by_value[yes]


def _counted(leaf: Position, own: Any) -> Iota | None:
    for dim, index in enumerate(own):
        offset = leaf.formula - index
        if index.axes and not offset.coefs and isinstance(offset.const, int):
            return Iota(dim, offset.const)
    return None


def _data(table: Table) -> list[fx.Node]:
    """Tensors that a table reads."""
    read = [f for leaf in table.leaves if isinstance(leaf, Sum) for f in leaf.factors]
    return [x.node for x in (*table.atoms, *read) if isinstance(x, (Test, Data))]


def _taints(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return bool(node.meta.get(TRAINABLE))
    if node.op != "call_function":
        return False
    # Looking at what a collective gives would start one, while the other ranks may be compiling something else.
    effect = _torch.is_random(node) or is_collective(node) or not _torch.is_functional(node)
    return effect or op(node) in _HEAVY
