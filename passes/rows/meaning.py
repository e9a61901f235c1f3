"""What masks and indices say.

A value is described as a formula over its own dims, or not at all:

    Const(c)               one number
    Iota(dim, offset)      the index along a dim, plus an offset
    Two(literals, yes, no) `yes` where every literal holds, `no` elsewhere
    OneHot(dim, index)     1 at `index` along a dim, 0 elsewhere

`Two` is one object for boolean masks, 0/1 floats and additive 0/-1e4/-inf masks. A literal says that a *predicate* of
the data holds, or that two indices are so far apart. Predicates are compared by what they test, not by how they are
written: `ids != 0`, `~(ids == 0)` and `ids.bool()` are one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ... import _torch
from ...graph.nodes import TRAINABLE, is_collective, tensor
from .axes import Typing, dim_of_cat, swapped
from .ops import COPIES, VIEWS, arg, dim_of, is_tensor, number, op, quotient, rank_of, shape

MINUS_INFINITY = -1e4  # what is added to a score to remove it: this or less
# Never recomputed outside of the graph: too much work for the sake of knowing rows.
_HEAVY = {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "conv1d", "conv2d", "layer_norm",
          "scaled_dot_product_attention", "embedding", "turbogr::sharded_lookup", "convolution"}  # fmt: skip


@dataclass(frozen=True)
class Predicate:
    """Holds where `(node == value)` is `equal`."""

    node: fx.Node
    value: Any = True
    equal: bool = True

    def negated(self) -> Predicate:
        return replace(self, equal=not self.equal)

    def __str__(self) -> str:
        if self.value is True:
            return f"%{self.node}" if self.equal else f"not %{self.node}"
        return f"%{self.node} {'==' if self.equal else '!='} {self.value}"


@dataclass(frozen=True)
class Within:
    """Holds in the first columns of a sequence, as many as its length in jagged offsets."""

    node: fx.Node

    def __str__(self) -> str:
        return f"column < length in %{self.node}"


@dataclass(frozen=True)
class Holds:
    """A predicate, and the dim of this tensor along which each non-unit dim of the predicate's tensor runs."""

    predicate: Predicate
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Band:
    """index along dim i - index along dim j >= least."""

    i: int
    j: int
    least: Any

    def negated(self) -> Band:
        return Band(self.j, self.i, 1 - self.least)


Literal = Holds | Band


@dataclass(frozen=True)
class Const:
    value: Any


@dataclass(frozen=True)
class Iota:
    dim: int
    offset: Any = 0


@dataclass(frozen=True)
class Two:
    literals: frozenset[Literal]
    yes: Any
    no: Any

    def flipped(self) -> Two | None:
        """The same with `yes` and `no` exchanged, which one literal allows."""
        if len(self.literals) != 1:
            return None
        (literal,) = self.literals
        other = (
            literal.negated() if isinstance(literal, Band) else replace(literal, predicate=literal.predicate.negated())
        )
        return Two(frozenset([other]), self.no, self.yes)

    def with_yes(self, wanted: Callable[[Any, Any], bool]) -> Two | None:
        """In the form whose (yes, no) is as wanted."""
        if wanted(self.yes, self.no):
            return self
        flipped = self.flipped()
        return flipped if flipped is not None and wanted(flipped.yes, flipped.no) else None

    def keeps(self) -> frozenset[Literal] | None:
        """Literals under which a 0/1 or boolean mask is 1."""
        found = self.with_yes(lambda yes, no: yes == 1 and no == 0)
        return found.literals if found is not None else None

    def admits(self) -> frozenset[Literal] | None:
        """Literals under which an additive mask is 0; minus infinity elsewhere."""
        found = self.with_yes(lambda yes, no: yes == 0 and no <= MINUS_INFINITY and no is not False)
        return found.literals if found is not None else None


@dataclass(frozen=True)
class OneHot:
    dim: int
    index: fx.Node


Meaning = Const | Iota | Two | OneHot
DimMap = Callable[[int], "int | None"]  # where a dim goes: exactly there, or None
HoldsMap = Callable[[Holds], "tuple[int, ...] | None"]


@dataclass(frozen=True)
class Speculation:
    """What was true of the inputs seen at compile time, and is checked on every batch."""

    node: fx.Node
    kind: str  # 'binary': only 0 and 1; 'additive': only 0 and minus infinity; 'same': still the tensor seen
    seen: Any = None


class Meanings:
    """Meaning of every value of a graph, as far as it has one.

    `example` gives the value of an untainted node on the inputs seen at compile time, or None.
    """

    def __init__(self, graph: fx.Graph, typing: Typing, example: Callable[[fx.Node], torch.Tensor | None]) -> None:
        self.typing, self.example = typing, example
        self.tainted: set[fx.Node] = set()
        self.speculations: dict[fx.Node, Speculation] = {}
        self._meaning: dict[fx.Node, Meaning | None] = {}
        self._first: dict[Any, fx.Node] = {}  # of nodes that compute the same from the same
        self._same: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if _taints(node) or any(n in self.tainted for n in node.all_input_nodes):
                self.tainted.add(node)
            elif node.op == "call_function":
                self._same[node] = self._first.setdefault(self._computes(node), node)
            if is_tensor(node):
                self._meaning[node] = self._rule(node)

    def of(self, node: Any) -> Meaning | None:
        return self._meaning.get(node)

    def two(self, node: Any) -> Two | None:
        meaning = self.of(node)
        return meaning if isinstance(meaning, Two) else None

    def constant(self, value: Any) -> Any:
        """The number that an argument is, or None."""
        if not isinstance(value, fx.Node):
            return number(value)
        meaning = self.of(value)
        return meaning.value if isinstance(meaning, Const) else None

    def predicate(self, node: fx.Node) -> Predicate | None:
        """A boolean tensor that only data determines, no axis twice, is a predicate of rows."""
        value = tensor(node)
        if value is None or value.dtype != torch.bool or not self.describes_rows(node):
            return None
        return Predicate(self.root(node))

    def describes_rows(self, node: fx.Node) -> bool:
        flat = self.typing.flat(node)
        return node not in self.tainted and bool(flat) and len(set(flat)) == len(flat)

    def root(self, node: fx.Node) -> fx.Node:
        """The value that a chain of views and copies shows."""
        while (op(node) in VIEWS | COPIES) and len(self.typing.flat(node)) == len(self.typing.flat(node.args[0])):  # type: ignore[arg-type]
            if sorted(self.typing.flat(node)) != sorted(self.typing.flat(node.args[0])):  # type: ignore[arg-type]
                break
            node = node.args[0]  # type: ignore[assignment]
        return self._same.get(node, node)

    def _computes(self, node: fx.Node) -> Any:
        """Equal for nodes with equal values. Two aranges are equal when they run over the same axes."""

        def plain(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return ("%", self._same.get(argument, argument))
            if isinstance(argument, (list, tuple)):
                return tuple(plain(a) for a in argument)
            return repr(argument)

        atoms = tuple(map(tuple, self.typing.atoms(node))) if is_tensor(node) else ()
        return node.target, plain(node.args), tuple((k, plain(v)) for k, v in node.kwargs.items()), atoms

    def holds(self, predicate: Predicate, node: fx.Node) -> Two | None:
        """The predicate as a mask laid out as `node` is."""
        atoms = self.typing.atoms(node)
        dims = []
        for dim in self.typing.atoms(predicate.node):
            if dim:
                at = [i for i, d in enumerate(atoms) if set(dim) <= set(d)]
                if len(at) != 1:
                    return None
                dims.append(at[0])
        return Two(frozenset([Holds(predicate, tuple(dims))]), True, False)

    # --- rules -------------------------------------------------------------------------------------

    def _rule(self, node: fx.Node) -> Meaning | None:
        if node.op == "placeholder":
            return self._input(node)
        if node.op == "get_attr":
            value = getattr(node.graph.owning_module, str(node.target), None)
            return Const(value.item()) if isinstance(value, torch.Tensor) and value.dim() == 0 else None
        name = op(node)
        rule = _RULES.get(name)
        if node in self.typing.untyped and name in VIEWS:
            found = None  # it cuts across dims
        elif rule is not None:
            found = rule(self, node)
        elif name in COPIES:
            found = self.of(node.args[0])
        elif name in VIEWS:
            found = remapped(self.of(node.args[0]), self.view(node), self._inside(node))
        else:
            found = self._binary(node) if name in _NUMBERS else None
        return found if found is not None else self._leaf(node)

    def _leaf(self, node: fx.Node) -> Two | None:
        predicate = self.predicate(node)
        return self.holds(predicate, node) if predicate is not None else None

    def _input(self, node: fx.Node) -> Meaning | None:
        """Buffers that hold a causal mask or positions mean what they held when they were seen."""
        seen = self.example(node) if node not in self.tainted else None
        found = _recognized(seen) if seen is not None else None
        if found is not None:
            self.speculations[node] = Speculation(node, "same", seen.clone())  # type: ignore[union-attr]
            return found
        return self._leaf(node)

    def binary(self, node: fx.Node) -> Two | None:
        """A numeric mask that holds only 0 and 1, as far as has been seen; checked on every batch."""
        if not self.describes_rows(node) or tensor(node).dtype == torch.bool:  # type: ignore[union-attr]
            return None
        root = self.root(node)
        seen = self.example(root)
        if seen is None or not bool(only(seen, "binary").all()):
            return None
        mask = self.holds(Predicate(root, 0, False), node)
        if mask is None:
            return None
        self.speculations[root] = Speculation(root, "binary")
        return Two(mask.literals, 1, 0)

    def _inside(self, node: fx.Node) -> HoldsMap:
        """Where the rows of a predicate end up, be it as a part of a larger dim: they are known by their axes."""
        exact = self.view(node)
        if op(node) in ("repeat", "tile"):
            added = rank_of(node) - rank_of(node.args[0])
            return lambda literal: tuple(d + added for d in literal.dims)
        if op(node) not in ("reshape", "view", "flatten", "unflatten", "squeeze"):
            return lambda literal: _all(exact(d) for d in literal.dims)
        source: Any = node.args[0]
        here, there = self._places(node), self._places(source)
        flat = self.typing.flat(source)

        def inside(literal: Holds) -> tuple[int, ...] | None:
            own = [d for d in self.typing.atoms(literal.predicate.node) if d]
            return _all(_holder(here, {p for p in there[at] if flat[p] in dim})
                        for at, dim in zip(literal.dims, own, strict=True))  # fmt: skip

        return inside

    def mask_of_pairs(self, node: fx.Node, kind: str) -> bool:
        """Does a tensor of the batch hold only 0 and 1 ('binary'), or 0 and minus infinity ('additive')?"""
        if node in self.tainted or not is_tensor(node):
            return False
        seen = self.example(node)
        if seen is None or not bool(only(seen, kind).all()):
            return False
        self.speculations[node] = Speculation(node, kind)
        return True

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
        if name in ("transpose", "t", "swapaxes"):
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

    def operand(self, value: Any, rank: int) -> Meaning | None:
        """Meaning of an operand in the dims of a broadcast result."""
        if not isinstance(value, fx.Node):
            plain = number(value)
            return Const(plain) if plain is not None else None
        if not is_tensor(value):
            return None
        return remapped(self.of(value), lambda i: i + rank - rank_of(value))

    def _binary(self, node: fx.Node) -> Meaning | None:
        name, rank = op(node), rank_of(node)
        fold = _NUMBERS[name]
        if arg(node, "alpha", 1) != 1 or len(node.args) < 2:
            return None
        x, y = (self.operand(a, rank) for a in node.args[:2])
        if isinstance(x, Const) and isinstance(y, Const):
            return Const(fold(x.value, y.value))
        if isinstance(x, Iota) and isinstance(y, Const) and name in ("add", "sub") and isinstance(y.value, int):
            return Iota(x.dim, fold(x.offset, y.value))
        if isinstance(x, Iota) and isinstance(y, Iota) and x.dim != y.dim:
            return _compared(name, x, y)
        if name in _ARITHMETIC:
            x = self._speculated(node.args[0], rank, y) if x is None or _is_bare(x, node.args[0]) else x
            y = self._speculated(node.args[1], rank, x) if y is None or _is_bare(y, node.args[1]) else y
        if name in _OR and self.describes_rows(node):
            return None  # one predicate of its own, which can be negated
        found = _combined(name, fold, x, y)
        return found if found is not None else self._comparison(node, name, y)

    def _speculated(self, value: Any, rank: int, other: Meaning | None) -> Meaning | None:
        known = self.operand(value, rank)
        if known is not None or not isinstance(other, (Const, Two)) or not is_tensor(value):
            return known
        return remapped(self.binary(value), lambda i: i + rank - rank_of(value))

    def _comparison(self, node: fx.Node, name: str, other: Meaning | None) -> Two | None:
        """Data compared with a constant."""
        source = node.args[0]
        if name not in ("ne", "eq", "not_equal") or not isinstance(other, Const) or not is_tensor(source):
            return None
        assert isinstance(source, fx.Node)
        if not self.describes_rows(source) or rank_of(source) != rank_of(node):
            return None
        return self.holds(Predicate(self.root(source), other.value, name == "eq"), node)


def only(value: torch.Tensor, kind: str) -> torch.Tensor:
    """Where a mask holds what masks of its kind hold."""
    return (value == 0) | (value == 1 if kind == "binary" else value <= MINUS_INFINITY)


def _taints(node: fx.Node) -> bool:
    if node.op in ("placeholder", "get_attr"):
        return bool(node.meta.get(TRAINABLE))
    # Looking at what a collective gives would start one, while the other ranks may be compiling something else.
    return op(node) in _HEAVY or (node.op == "call_function" and (_torch.is_random(node) or is_collective(node)))


def _is_bare(meaning: Meaning | None, value: Any) -> bool:
    return meaning is None and isinstance(value, fx.Node)


def _all(dims: Iterable[int | None]) -> tuple[int, ...] | None:
    found = tuple(dims)
    return None if None in found else found  # type: ignore[return-value]


def _holder(dims: list[tuple[int, ...]], places: set[int]) -> int | None:
    """The dim that holds all of some places."""
    found = [k for k, d in enumerate(dims) if places and places <= set(d)]
    return found[0] if len(found) == 1 else None


def remapped(meaning: Meaning | None, to: DimMap, inside: HoldsMap | None = None) -> Meaning | None:
    """The meaning with its dims renumbered; None where one of them is gone. `inside` serves predicates, which know
    their rows by axes."""
    if isinstance(meaning, Two):
        literals: set[Literal] = set()
        for literal in meaning.literals:
            if isinstance(literal, Holds):
                new = inside(literal) if inside is not None else _all(to(d) for d in literal.dims)
                if new is None:
                    return None
                literals.add(Holds(literal.predicate, new))
            else:
                i, j = to(literal.i), to(literal.j)
                if i is None or j is None:
                    return None
                literals.add(Band(i, j, literal.least))
        return Two(frozenset(literals), meaning.yes, meaning.no)
    if isinstance(meaning, (Iota, OneHot)):
        dim = to(meaning.dim)
        return None if dim is None else replace(meaning, dim=dim)
    return meaning


def two(literals: frozenset[Literal], yes: Any, no: Any) -> Meaning:
    return Const(yes) if yes == no else Two(literals, yes, no)


def _compared(name: str, x: Iota, y: Iota) -> Meaning | None:
    apart = y.offset - x.offset  # index_x - index_y <name> apart
    least = {"ge": Band(x.dim, y.dim, apart), "gt": Band(x.dim, y.dim, apart + 1),
             "le": Band(y.dim, x.dim, -apart), "lt": Band(y.dim, x.dim, 1 - apart)}  # fmt: skip
    if name == "eq":
        return Two(frozenset([Band(x.dim, y.dim, apart), Band(y.dim, x.dim, -apart)]), True, False)
    if name in ("ne", "not_equal"):
        return Two(frozenset([Band(x.dim, y.dim, apart), Band(y.dim, x.dim, -apart)]), False, True)
    return Two(frozenset([least[name]]), True, False) if name in least else None


_AND = {"bitwise_and", "logical_and", "__and__", "mul", "multiply"}
_OR = {"bitwise_or", "logical_or", "__or__", "maximum"}


def _combined(name: str, fold: Callable[[Any, Any], Any], x: Meaning | None, y: Meaning | None) -> Meaning | None:
    if isinstance(x, Two) and isinstance(y, Const):
        return two(x.literals, fold(x.yes, y.value), fold(x.no, y.value))
    if isinstance(y, Two) and isinstance(x, Const):
        return two(y.literals, fold(x.value, y.yes), fold(x.value, y.no))
    if not isinstance(x, Two) or not isinstance(y, Two):
        return None
    if x.literals == y.literals:
        return two(x.literals, fold(x.yes, y.yes), fold(x.no, y.no))
    if name in _AND:
        a, b = (m.with_yes(lambda yes, no: not no and bool(yes)) for m in (x, y))
        return Two(a.literals | b.literals, fold(a.yes, b.yes), 0 * a.no) if a is not None and b is not None else None
    if name in _OR:
        a, b = (m.with_yes(lambda yes, no: not yes and bool(no)) for m in (x, y))
        return Two(a.literals | b.literals, False, True) if a is not None and b is not None else None
    if name in ("add", "minimum"):
        a, b = (m.with_yes(lambda yes, no: yes == 0 and no <= MINUS_INFINITY) for m in (x, y))
        if a is not None and b is not None:
            return Two(a.literals | b.literals, 0.0, max(a.no, b.no))
    return None


def _divide(a: Any, b: Any) -> Any:
    return a / b if b else math.nan


_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "subtract": operator.sub, "mul": operator.mul, "multiply": operator.mul,
    "div": _divide, "true_divide": _divide, "divide": _divide, "rsub": lambda a, b: b - a, "eq": operator.eq,
    "ne": operator.ne, "not_equal": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
    "ge": operator.ge, "minimum": min, "maximum": max,
    **{n: (lambda a, b: bool(a) and bool(b)) for n in ("bitwise_and", "logical_and", "__and__")},
    **{n: (lambda a, b: bool(a) or bool(b)) for n in ("bitwise_or", "logical_or", "__or__")},
}  # fmt: skip
_ARITHMETIC = {"rsub", "sub", "subtract", "mul", "multiply", "add"}

Rule = Callable[[Meanings, fx.Node], "Meaning | None"]
_RULES: dict[str, Rule] = {}


def means(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


@means("arange")
def _arange(m: Meanings, n: fx.Node) -> Meaning | None:
    start, step = arg(n, "start", 0) or 0, arg(n, "step", 1)
    return Iota(0, start) if step in (1, None) and isinstance(start, int) else None


@means("zeros", "zeros_like", "new_zeros")
def _zeros(m: Meanings, n: fx.Node) -> Meaning:
    return Const(False if tensor(n).dtype == torch.bool else 0)  # type: ignore[union-attr]


@means("ones", "ones_like", "new_ones")
def _ones(m: Meanings, n: fx.Node) -> Meaning:
    return Const(True if tensor(n).dtype == torch.bool else 1)  # type: ignore[union-attr]


@means("full", "full_like", "new_full", "fill", "scalar_tensor")
def _full(m: Meanings, n: fx.Node) -> Meaning | None:
    value = arg(n, "fill_value", arg(n, "value", arg(n, "s")))
    found = m.constant(value)
    return Const(found) if found is not None else None


@means("_to_copy", "to", "type_as")
def _cast(m: Meanings, n: fx.Node) -> Meaning | None:
    source, dtype = n.args[0], tensor(n).dtype  # type: ignore[union-attr]
    meaning = m.of(source)
    cast = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    if isinstance(meaning, Two):
        return two(meaning.literals, _as(cast, meaning.yes), _as(cast, meaning.no))
    if isinstance(meaning, Const):
        return Const(_as(cast, meaning.value))
    if isinstance(meaning, (Iota, OneHot)):
        return meaning if dtype != torch.bool else None
    assert isinstance(source, fx.Node)
    if dtype == torch.bool and m.describes_rows(source):
        return m.holds(Predicate(m.root(source), 0, False), n)
    return None


def _as(cast: Any, value: Any) -> Any:
    return value if cast is int and isinstance(value, float) and not math.isfinite(value) else cast(value)


@means("logical_not", "bitwise_not")
def _not(m: Meanings, n: fx.Node) -> Meaning | None:
    found = m.two(n.args[0])
    if found is None or tensor(n).dtype != torch.bool:  # type: ignore[union-attr]
        return None
    return Two(found.literals, not found.yes, not found.no)


@means("neg")
def _neg(m: Meanings, n: fx.Node) -> Meaning | None:
    found = m.of(n.args[0])
    if isinstance(found, Two):
        return Two(found.literals, -found.yes, -found.no)
    return Const(-found.value) if isinstance(found, Const) else None


@means("tril", "triu")
def _triangle(m: Meanings, n: fx.Node) -> Meaning | None:
    found, rank, diagonal = m.of(n.args[0]), rank_of(n), arg(n, "diagonal") or 0
    lower = op(n) == "tril"
    band = Band(rank - 2, rank - 1, -diagonal) if lower else Band(rank - 1, rank - 2, diagonal)
    if isinstance(found, Const):
        return two(frozenset([band]), found.value, type(found.value)(0))
    found = found.with_yes(lambda yes, no: not no) if isinstance(found, Two) else None
    return Two(found.literals | {band}, found.yes, found.no) if found is not None else None


@means("eye")
def _eye(m: Meanings, n: fx.Node) -> Meaning:
    one = tensor(n).dtype == torch.bool or 1  # type: ignore[union-attr]
    return Two(frozenset([Band(0, 1, 0), Band(1, 0, 0)]), one, type(one)(0))  # type: ignore[misc]


@means("slice", "narrow")
def _slice(m: Meanings, n: fx.Node) -> Meaning | None:
    found, at = m.of(n.args[0]), dim_of(n)
    start = arg(n, "start") or 0
    if found is None or isinstance(found, OneHot) or arg(n, "step", 1) not in (1, None):
        return None
    if isinstance(found, Const):
        return found
    if not isinstance(start, int) or (start < 0 and not isinstance(shape(n.args[0])[at], int)):
        return None
    start = start + shape(n.args[0])[at] if start < 0 else start
    if isinstance(found, Iota):
        return replace(found, offset=found.offset + start) if found.dim == at else found
    moved: set[Literal] = set()
    for literal in found.literals:
        if isinstance(literal, Holds):
            whole = quotient(shape(n)[at], shape(n.args[0])[at]) == 1
            if at in literal.dims and not whole:
                return None  # a predicate of other rows; its own tensor, sliced, is one of these
            moved.add(literal)
        else:
            shift = (literal.j == at) * start - (literal.i == at) * start
            moved.add(replace(literal, least=literal.least + shift))
    return Two(frozenset(moved), found.yes, found.no)


@means("cat", "concat")
def _repeated(m: Meanings, n: fx.Node) -> Meaning | None:
    """The same mask once per head, one after the other."""
    parts: Any = n.args[0]
    if any(p is not parts[0] for p in parts):
        return None
    at = dim_of_cat(n)
    return remapped(m.of(parts[0]), lambda i: i if i != at else None, lambda literal: literal.dims)


@means("repeat_interleave")
def _interleaved(m: Meanings, n: fx.Node) -> Meaning | None:
    at = dim_of(n)
    return remapped(m.of(n.args[0]), lambda i: i if i != at else None, lambda literal: literal.dims)


@means("select")
def _select(m: Meanings, n: fx.Node) -> Meaning | None:
    at = dim_of(n)
    return remapped(m.of(n.args[0]), lambda i: None if i == at else i - (i > at))


@means("index")
def _indexed(m: Meanings, n: fx.Node) -> Meaning | None:
    """mask[arange(B)[:, None], arange(N)] is a view of the mask."""
    source, indices = n.args[0], n.args[1]
    found, rank = m.of(source), rank_of(n)
    if found is None or len(indices) != rank_of(source):  # type: ignore[arg-type]
        return None
    at = []
    for index in indices:  # type: ignore[union-attr]
        counted = m.of(index) if index is not None else None
        if not isinstance(counted, Iota) or counted.offset != 0:
            return None
        at.append(counted.dim + rank - rank_of(index))
    return remapped(found, lambda d: at[d])


@means("index_put")
def _one_hot_put(m: Meanings, n: fx.Node) -> Meaning | None:
    indices = n.args[1]
    zero = m.constant(n.args[0]) == 0 and len(indices) == 2 and not arg(n, "accumulate")  # type: ignore[arg-type]
    if not zero or not isinstance(m.of(indices[0]), Iota) or m.constant(_spread(n.args[2])) != 1:  # type: ignore[index]
        return None
    return OneHot(1, indices[1])  # type: ignore[arg-type,index]


def _spread(value: Any) -> Any:
    while op(value) in ("expand", "lift_fresh_copy", "clone"):
        value = value.args[0]
    return value


@means("one_hot")
def _one_hot(m: Meanings, n: fx.Node) -> Meaning | None:
    return OneHot(rank_of(n) - 1, n.args[0]) if n.args[0] not in m.tainted else None  # type: ignore[arg-type]


@means("where")
def _where(m: Meanings, n: fx.Node) -> Meaning | None:
    if len(n.args) < 3:
        return None
    rank = rank_of(n)
    condition = m.operand(n.args[0], rank)
    if not isinstance(condition, Two):
        return None
    yes, no = (m.constant(a) for a in n.args[1:3])
    if yes is None or no is None:
        return None
    return two(condition.literals, yes if condition.yes else no, yes if condition.no else no)


@means("masked_fill")
def _masked_fill(m: Meanings, n: fx.Node) -> Meaning | None:
    rank = rank_of(n)
    found, mask, value = m.operand(n.args[0], rank), m.operand(n.args[1], rank), m.constant(n.args[2])
    if not isinstance(mask, Two) or value is None:
        return None
    if isinstance(found, Const):
        return two(mask.literals, value if mask.yes else found.value, value if mask.no else found.value)
    if isinstance(found, Two) and found.literals == mask.literals:
        return two(mask.literals, value if mask.yes else found.yes, value if mask.no else found.no)
    kept = mask.with_yes(lambda yes, no: not yes and bool(no))
    if kept is not None and isinstance(found, Two) and found.admits() is not None and value <= MINUS_INFINITY:
        return Two(kept.literals | found.admits(), 0.0, value)  # type: ignore[operator]
    return None


# --- buffers -----------------------------------------------------------------------------------------


def _recognized(seen: torch.Tensor) -> Meaning | None:
    """A triangular mask, or positions."""
    if seen.dim() >= 1 and not seen.dtype.is_floating_point and seen.dtype != torch.bool:
        flat = seen.flatten()
        last = seen.shape[-1] == flat.numel() > 1
        start = int(flat[0]) if last else 0
        counts = last and torch.equal(flat, torch.arange(start, start + flat.numel(), dtype=flat.dtype))
        return Iota(seen.dim() - 1, start) if counts else None
    if seen.dim() < 2 or seen.shape[-1] != seen.shape[-2] or seen.numel() != seen.shape[-1] ** 2 or seen.shape[-1] < 2:
        return None
    return _triangular(seen.reshape(seen.shape[-2:]), seen.dim())


def _triangular(m: torch.Tensor, rank: int) -> Two | None:
    low, high = m[-1, 0], m[0, -1]
    if m.dtype.is_floating_point and (low.isnan() or high.isnan()):
        return None
    if torch.equal(low, high):
        return None
    diagonal = int((m[0] == low).sum()) - 1  # how far the lower part reaches in the first row
    if diagonal < 0:
        diagonal = -int((m[:, 0] == high).sum())
    lower = torch.ones_like(m, dtype=torch.bool).tril(diagonal)
    if not torch.equal(torch.where(lower, low, high), m):
        return None
    return Two(frozenset([Band(rank - 2, rank - 1, -diagonal)]), low.item(), high.item())
