"""Which dims of values are rows: whatever can leave rows out says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from ...graph.nodes import TRAINABLE, tensor
from .axes import Typing
from .calls import SPLITS, arg, dim_of, is_tensor, live, op, operand, rank_of, size_symbols, value_of
from .meaning import Holds, OneHot, Two
from .meanings import Meanings
from .moves import RESIZING
from .spaces import Space
from .zeros import Zeros

LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd")


class RowSpaces:
    """The row spaces of a graph."""

    def __init__(self, graph: fx.Graph, typing: Typing, meanings: Meanings, zeros: Zeros) -> None:
        self.graph, self.typing, self.meanings, self.zeros = graph, typing, meanings, zeros
        self.symbols = set(size_symbols(graph.find_nodes(op="placeholder")))
        self._of: dict[fx.Node, Space | None] = {}
        self.alone = self._columns_of_one_sequence()
        self._picked: set[Space] = set()  # where nothing but a pick says that these are rows
        self.found = self._find()

    def _find(self) -> list[Space]:
        pairs: set[int] = set()
        seeds: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        picks: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for node in live(self.graph):
            if is_tensor(node):
                flat = self.typing.flat(node)
                pairs |= {a for a in flat if flat.count(a) > 1}
                seeds += self._seeds(node)
                picks += self._picks(node)
        for sequence, column, _ in self.typing.jagged.values():
            seeds.append((tuple(self.typing.axes.atoms(sequence)), tuple(self.typing.axes.atoms(column))))
        found: dict[frozenset[int], Space] = {}
        for number, (first, second) in enumerate([*seeds, *picks]):
            axes = (*first, *second)
            if not axes or len(set(axes)) != len(axes) or not all(self.is_sized(a) for a in axes):
                continue
            turned = set(first) & pairs and not set(second) & pairs and second
            alone = not second and first in self.alone
            space = Space(second, first) if turned or alone else Space(first, second)
            if found.setdefault(frozenset(axes), space) is space and number >= len(seeds):
                self._picked.add(space)
        self._split_columns(found)
        self._follow_moves(found)
        return list(found.values())

    def _columns_of_one_sequence(self) -> set[tuple[int, ...]]:
        """Of inputs of shape (1, N, ...): a dim of one sequence has no axis, and its rows are columns all the same."""
        found = set()
        for node in self.graph.find_nodes(op="placeholder"):
            value = tensor(node)
            if value is not None and value.dim() > 1 and not value.requires_grad and not node.meta.get(TRAINABLE):
                first, second, *_ = self.typing.atoms(node)
                if not first and second:
                    found.add(tuple(second))
        return found

    def _split_columns(self, found: dict[frozenset[int], Space]) -> None:
        """Where each row became several (item and action, one after the other), pairs show what a column is."""
        for node in self.graph.nodes:
            dims = [tuple(d) for d in self.typing.atoms(node) if len(d) > 1] if is_tensor(node) else []
            for column in {d for d in dims if dims.count(d) > 1}:
                for space in list(found.values()):
                    if set(space.column) < set(column) and space.column and not set(space.sequence) & set(column):
                        finer = Space(space.sequence, column)
                        found.setdefault(frozenset(finer.axes), finer)

    def is_sized(self, axis: int) -> bool:
        """Is the size known before the graph runs?"""
        value = self.typing.axes.size(axis)
        return value > 0 if isinstance(value, int) else value.free_symbols <= self.symbols

    def _seeds(self, node: fx.Node) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Whatever can narrow demand says which dims are rows."""
        meaning = self.meanings.of(node)
        if isinstance(meaning, Two):
            for literal in meaning.literals:
                if isinstance(literal, Holds):
                    yield from self._plane(literal.predicate.node)
        name = op(node)
        if name in LOSSES:
            if not value_of(node.args[1]).dtype.is_floating_point:
                yield from self._plane(node.args[1], single=self._ignores(node))
        elif name in ("bmm", "matmul") and isinstance(self.meanings.of(node.args[0]), OneHot):
            atoms = self.typing.atoms(operand(node, 1))
            if len(atoms) > 2:
                yield tuple(atoms[-3]), tuple(atoms[-2])
        elif name == "mul":
            for factor in node.args[:2]:
                weight = self.zeros.weight(factor)
                if weight is not None:
                    yield from self._plane(weight)

    def _picks(self, node: fx.Node) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
        """What is picked from a second dim may be rows, or features."""
        name = op(node)
        if name in ("gather", "select", "index", "take_along_dim") and rank_of(node.args[0]) > 2:
            at = dim_of(node) if name != "index" else 1
            if at == 1:
                atoms = self.typing.atoms(operand(node))
                yield tuple(atoms[0]), tuple(atoms[1])
        elif name in ("index_select", "index", "embedding") and len(self.typing.atoms(operand(node))[0]) > 1:
            merged = tuple(self.typing.atoms(operand(node))[0])
            yield merged[:1], merged[1:]

    def _ignores(self, loss: fx.Node) -> bool:
        """Did the loss ignore a row of the batch seen? Without padding it rarely does."""
        target: Any = loss.args[1]
        seen = self.meanings.example(target) if target not in self.meanings.tainted else None
        return seen is not None and bool((seen == arg(loss, "ignore_index")).any())

    def _plane(self, node: Any, single: bool = False) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
        dims = [tuple(d) for d in self.typing.atoms(node) if d]
        if len(dims) == 2:
            yield dims[0], dims[1]
        elif len(dims) == 1 and dims[0] in self.alone:
            yield (), dims[0]
        elif len(dims) == 1 and len(dims[0]) > 1:
            yield dims[0][:1], dims[0][1:]
        elif len(dims) == 1 and single:
            yield dims[0], ()

    def _follow_moves(self, found: dict[frozenset[int], Space]) -> None:
        """What is sliced, padded or concatenated from rows is rows."""
        moving = [n for n in self.graph.nodes if op(n) in RESIZING or (op(n) == "getitem" and op(n.args[0]) in SPLITS)]
        before = -1
        while before != len(found):
            before = len(found)
            for node in moving:
                source = node.args[0].args[0] if op(node) == "getitem" else node.args[0]
                parts: Any = source if isinstance(source, (list, tuple)) else [source]
                for x in parts:
                    if is_tensor(node) and is_tensor(x) and rank_of(node) == rank_of(x):
                        self._follow(found, node, x)
                        self._follow(found, x, node)

    def _follow(self, found: dict[frozenset[int], Space], here: fx.Node, there: fx.Node) -> None:
        for mine, theirs in zip(self.typing.atoms(here), self.typing.atoms(there), strict=True):
            if mine == theirs or not theirs:
                continue
            for space in list(found.values()):
                shared = set(space.sequence) <= set(self.typing.flat(there))
                sized = all(self.is_sized(a) for a in theirs)
                if tuple(mine) == space.column and shared and sized and not set(theirs) & set(space.axes):
                    new = Space(space.sequence, tuple(theirs))
                    found.setdefault(frozenset(new.axes), new)

    def around(self, node: fx.Node) -> list[Space]:
        """Every row space a value lies in."""
        flat = self.typing.flat(node)
        return [s for s in self.found if all(flat.count(a) == 1 for a in s.axes)]

    def of(self, node: Any) -> Space | None:
        """The one row space a value lies in; the finest where spaces are nested."""
        if not is_tensor(node):
            return None
        if node not in self._of:
            hits = self.around(node)
            finest = [s for s in hits if not any(o is not s and o.includes(s) for o in hits)]
            if len(finest) > 1:
                finest = [s for s in finest if s not in self._picked]
            self._of[node] = finest[0] if len(finest) == 1 else None
        return self._of[node]
