"""Biases of attention scores: by position, by bucketed time, or per pair as a last resort.

A bias is split into a sum of terms. A term is a *position* bias where it moves elements of one table, and which of them
a pair reads depends on query column - key column alone; it is found by moving labels instead of elements, so that
spelling does not matter. A term is a *time* bias where a table is looked up by a non-decreasing function of
|query time - key time|; the bounds of its buckets are found by evaluating that very function. Neither ever makes a
tensor of pairs. What is left of the sum goes to the kernel as such a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ... import _torch
from ...graph.nodes import tensor
from .axes import Axis
from .ops import COPIES, SPLITS, VIEWS, arg, dim_of, is_tensor, op, product, rank_of, shape
from .peeling import Attention, Pairs
from .spaces import Space

if TYPE_CHECKING:
    from .emit import Emitter
    from .program import RowSet

aten = torch.ops.aten
# bias, position_bias, time_bias, time_bounds, query_times, key_times
Arguments = tuple[Any, Any, Any, Any, Any, Any]
# What the axes of each dim run over: s(equences), h(eads), q(ueries), k(eys).
Roles = tuple[tuple[tuple[str, Axis], ...], ...]

_SAME = COPIES - {"detach"}  # a term may not pass on gradients that eager stops
_REORDERING = {"permute", "transpose", "t", "swapaxes", "expand", "broadcast_to", "expand_as", "repeat", "tile"}
_REGROUPING = {"reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as"}


@dataclass(frozen=True)
class Term:
    node: fx.Node
    roles: Roles
    multiplier: float
    dtype: torch.dtype  # of the bias it is a part of
    shown: Term | None = None  # the same with a dim for queries and one for keys, where it has none of its own

    def times(self, factor: float) -> Term:
        return replace(self, multiplier=self.multiplier * float(factor))

    def along(self, role: str) -> tuple[Axis, ...]:
        return tuple(axis for dim in self.roles for r, axis in dim if r == role)

    def dim(self, role: str) -> int | None:
        """The one dim that runs over queries or over keys."""
        found = [i for i, dim in enumerate(self.roles) if any(r == role for r, _ in dim)]
        assert len(found) <= 1, self
        return found[0] if found else None

    @property
    def is_pair(self) -> bool:
        """Do queries and keys have a dim of their own each?"""
        for role in "qk":
            holders = [dim for dim in self.roles if any(r == role for r, _ in dim)]
            if len(holders) > 1 or any(r != role for dim in holders for r, _ in dim):
                return False
        return True

    @property
    def lies_dense(self) -> bool:
        """Can the kernel take it as a tensor of pairs?"""
        return self.is_pair or self.shown is not None


@dataclass(frozen=True)
class ByPosition:
    """`entries[h, distance + M - 1]`: the value itself, or the number of an element of the table, from 1; 0 is zero."""

    term: Term
    table: fx.Node | None
    entries: torch.Tensor


@dataclass(frozen=True)
class ByTime:
    """`table[first + number of bounds <= |query time - key time|]`."""

    term: Term
    table: fx.Node
    first: int
    bounds: tuple[int, ...]
    query: fx.Node
    key: fx.Node


@dataclass
class Found:
    """The biases of one attention."""

    by_position: list[ByPosition] = field(default_factory=list)
    by_time: ByTime | None = None
    pairs: list[Pairs] = field(default_factory=list)


class Biases:
    def __init__(self, emitter: Emitter) -> None:
        self.e, self.typing, self.meanings = emitter, emitter.typing, emitter.an.meanings
        self._constant: dict[fx.Node, bool] = {}
        self._entries: dict[str, torch.Tensor | None] = {}
        self._times: dict[tuple[fx.Node, RowSet], fx.Node] = {}
        # Emitting rewrites the graph: look at biases while they are as they were captured.
        self._found = {node: self._recognized(a) for node, a in emitter.an.attentions.items()}

    def of(self, a: Attention, queries: RowSet, keys: RowSet) -> Arguments:
        found = self._found[a.node]
        pairs = self._sum([self._scaled(self.e.four_dims(a, p), p.multiplier) for p in found.pairs])
        position = self._sum([self._position_table(x) for x in found.by_position])
        time = found.by_time
        if time is None:
            return pairs, position, None, None, None, None
        values = torch.tensor(time.bounds)
        bounds = self.e.input("time_bounds", ("time bounds", time.bounds), [len(values)], lambda r: values)
        query, key = self._packed_times(time.query, queries), self._packed_times(time.key, keys)
        return pairs, position, self._time_table(time), bounds, query, key

    # --- the sum -----------------------------------------------------------------------------------

    def _recognized(self, a: Attention) -> Found:
        out = Found()
        for pair in a.biases:
            value = tensor(pair.node)
            assert value is not None
            terms = self._terms(Term(pair.node, self._roles(a, pair), pair.multiplier, value.dtype))
            rest = [t.shown or t for t in terms if not self._lies_in(a, pair) or not self._place(t, a, out)]
            some = len(rest) < len(terms)
            out.pairs += [Pairs(t.node, t.dim("q"), t.dim("k"), t.multiplier) for t in rest] if some else [pair]
        return out

    def _place(self, term: Term, a: Attention, out: Found) -> bool:
        """Find a place for a term other than a tensor of pairs."""
        position = self._by_position(term, a)
        if position is not None:
            out.by_position.append(position)
            return True
        time = self._by_time(term, a) if out.by_time is None else None
        out.by_time = out.by_time or time
        return time is not None

    def _lies_in(self, a: Attention, pair: Pairs) -> bool:
        """Is an index along its dims a column, as the kernel is told them?"""
        if pair.query is None or pair.key is None:
            return False
        atoms = self.typing.atoms(pair.node)
        return (tuple(atoms[pair.query]), tuple(atoms[pair.key])) == (a.queries.column, a.keys.column)

    def _roles(self, a: Attention, pair: Pairs) -> Roles:
        def role(dim: int, axis: Axis) -> str:
            return "q" if dim == pair.query else "k" if dim == pair.key else "s" if axis in a.keys.sequence else "h"

        atoms = self.typing.atoms(pair.node)
        return tuple(tuple((role(i, axis), axis) for axis in dim) for i, dim in enumerate(atoms))

    def _terms(self, term: Term) -> list[Term]:
        """The sum that a term is, looked at through views and products with numbers."""
        node, name = term.node, op(term.node)
        if name in _SAME | VIEWS or self._is_float_cast(node):
            source = self._source(term)
            parts = self._terms(source) if source is not None else [term]
            if len(parts) == 1 and term.is_pair:
                return [parts[0] if parts[0].lies_dense else replace(parts[0], shown=term)]
            return parts if len(parts) == 1 or all(t.lies_dense for t in parts) else [term]
        if name in ("add", "sub"):
            left, right = (self._operand(term, x) for x in node.args[:2])
            if left is not None and right is not None:
                sign = float(arg(node, "alpha", 1)) * (-1 if name == "sub" else 1)
                return [*self._terms(left), *self._terms(right.times(sign))]
        if name in ("mul", "div"):
            inner, factor = self._operand(term, node.args[0]), self.meanings.constant(node.args[1])
            if inner is not None and factor and arg(node, "rounding_mode") is None:
                return self._terms(inner.times(1 / factor if name == "div" else factor))
        return [term]

    def _is_float_cast(self, node: Any) -> bool:
        values = [tensor(node), tensor(node.args[0])] if op(node) in ("_to_copy", "to") else []
        return bool(values) and all(v is not None and v.is_floating_point() for v in values)

    def _operand(self, term: Term, operand: Any) -> Term | None:
        """A floating-point operand of a broadcasting op, in the dtype of its result."""
        if not is_tensor(operand) or tensor(operand).dtype != tensor(term.node).dtype:  # type: ignore[union-attr]
            return None
        return self._along(term, operand)

    def _along(self, term: Term, operand: fx.Node) -> Term | None:
        offset = rank_of(term.node) - rank_of(operand)
        return self._followed(term, operand, [i + offset for i in range(rank_of(operand))])

    def _followed(self, term: Term, source: fx.Node, places: list[int | None]) -> Term | None:
        """What a term is made from, given the dim where each dim of the source ends up."""
        roles = []
        for dim, place in zip(self.typing.atoms(source), places, strict=True):
            mine = term.roles[place] if dim and place is not None else ()
            if [axis for _, axis in mine] != dim:
                return None
            roles.append(mine)
        return replace(term, node=source, roles=tuple(roles))

    def _source(self, term: Term) -> Term | None:
        """What a view or a copy shows; None where its dims cannot be followed."""
        node, source = term.node, term.node.args[0]
        assert isinstance(source, fx.Node)
        if op(node) in _REGROUPING:
            flat = [x for dim in term.roles for x in dim]
            if [axis for _, axis in flat] != self.typing.flat(source):
                return None
            at = iter(flat)
            regrouped = tuple(tuple(next(at) for _ in dim) for dim in self.typing.atoms(source))
            return replace(term, node=source, roles=regrouped)
        if op(node) not in _REORDERING:
            return self._along(term, source) if op(node) not in VIEWS else None
        to = self.meanings.view(node)
        return self._followed(term, source, [to(i) for i in range(rank_of(source))])

    def _sum(self, parts: list[fx.Node]) -> fx.Node | None:
        out: fx.Node | None = None
        for x in parts:
            out = x if out is None else self.e.call(aten.add.Tensor, out, x)
        return out

    def _scaled(self, x: fx.Node, multiplier: float) -> fx.Node:
        return x if multiplier == 1 else self.e.call(aten.mul.Tensor, x, multiplier)

    def _finished(self, x: fx.Node, term: Term, dtype: torch.dtype) -> fx.Node:
        """In the dtype that the bias has in eager, and scaled."""
        x = x if dtype == term.dtype else self.e.call(aten._to_copy.default, x, dtype=term.dtype)
        return self._scaled(x, term.multiplier)

    # --- by position -------------------------------------------------------------------------------

    def _by_position(self, term: Term, a: Attention) -> ByPosition | None:
        columns = (term.along("q"), term.along("k")) == (a.queries.column, a.keys.column)
        if not columns or term.along("s") or term.along("h") not in ((), a.heads) or not _is_static(term.node):
            return None
        moves = self._moves(term.node)
        if moves is None or moves.table is term.node:
            return None
        layout = [(role, self.typing.axes.size(axis)) for dim in term.roles for role, axis in dim]
        key = f"{layout} {moves}"
        if key not in self._entries:
            self._entries[key] = self._moved_labels(term, moves)
        entries = self._entries[key]
        return ByPosition(term, moves.table, entries) if entries is not None else None

    def _moves(self, node: fx.Node) -> Moves | None:
        """How a term comes from one table; None where it is more than moving elements."""
        found = Moves(node.graph)
        todo = [node]
        while todo:
            at = todo[-1]
            if at in found.steps or at is found.table:
                todo.pop()
                continue
            sources = list(at.all_input_nodes) if self._is_constant(at) else self._moved_from(at)
            if sources is None:
                if found.table is not None or not is_tensor(at) or not _is_static(at):
                    return None
                found.table = at
                continue
            waiting = [n for n in sources if n not in found.steps and n is not found.table]
            if waiting:
                todo += waiting
            else:
                found.steps[at] = len(found.steps)
        return found

    def _moved_from(self, n: fx.Node) -> list[fx.Node] | None:
        """Operands of an op that only moves elements of one of them, in ways known now; zeros may be added."""
        data: Any = n.args[0] if n.args else None
        parts = list(data) if isinstance(data, (list, tuple)) else [data]
        others = [x for x in n.all_input_nodes if x not in parts]
        if not moves_elements(n) or not all(self._is_constant(x) for x in others):
            return None
        if len(parts) > 1 and any(self._is_constant(p) and self.meanings.constant(p) != 0 for p in parts):
            return None  # its numbers would be taken for labels
        return list(n.all_input_nodes)

    def _is_constant(self, node: fx.Node) -> bool:
        """Made from nothing but numbers."""
        todo = [node]
        while todo:
            at = todo[-1]
            waiting = [n for n in at.all_input_nodes if n not in self._constant] if at not in self._constant else []
            if waiting:
                todo += waiting
                continue
            todo.pop()
            made = at.op in ("get_attr", "call_function") and at not in self.meanings.tainted
            self._constant[at] = made and all(self._constant[n] for n in at.all_input_nodes)
        return self._constant[node]

    def _moved_labels(self, term: Term, moves: Moves) -> torch.Tensor | None:
        """Which element each distance reads, (H or 1, 2M - 1); None where it is not distance alone that matters."""
        try:
            with _torch.outside_compilation(), torch.no_grad():
                labels = moves.run(term.node)
        except Exception:
            return None  # an op that does not run on labels: nothing is known
        axes = [x for dim in term.roles for x in dim]
        order = [i for role in "hqk" for i, (r, _) in enumerate(axes) if r == role]
        labels = labels.reshape([int(self.typing.axes.size(axis)) for _, axis in axes]).permute(order)
        queries, keys = (int(self.typing.size_of(term.along(role))) for role in "qk")
        return by_distance(labels.reshape(-1, queries, keys))

    def _position_table(self, found: ByPosition) -> fx.Node:
        """(H or 1, 2M - 1)."""
        entries, table = found.entries, found.table
        if table is None:
            values = entries.to(found.term.dtype)
            key = ("position", values.dtype, values.shape, tuple(values.flatten().tolist()))
            x = self.e.input("position_bias", key, values.shape, lambda r: values, values.dtype)
            return self._finished(x, found.term, values.dtype)
        x = self.e.reshape(self.e.dense(table), [-1])
        if bool((entries == 0).any()):
            x = self.e.call(aten.constant_pad_nd.default, x, [0, 1])
        index = torch.where(entries == 0, int(product(shape(table))), entries - 1).flatten().long()
        at = self.e.input("distances", ("distances", tuple(index.tolist())), [len(index)], lambda r: index)
        x = self.e.reshape(self.e.call(aten.index_select.default, x, 0, at), entries.shape)
        return self._finished(x, found.term, tensor(table).dtype)  # type: ignore[union-attr]

    # --- by time -----------------------------------------------------------------------------------

    def _by_time(self, term: Term, a: Attention) -> ByTime | None:
        looked_up = self._lookup(term.node)
        if looked_up is None:
            return None
        table, index = looked_up
        heads = tuple(axis for dim in term.roles[rank_of(index) :] for _, axis in dim)
        if heads not in ((), a.heads):
            return None
        chain = self._gap(replace(term, node=index, roles=term.roles[: rank_of(index)]))
        if chain is None:
            return None
        gap, steps = chain
        sides = [self._one_side(s) for x in gap.node.args[:2] if (s := self._along(gap, x)) is not None]  # type: ignore[arg-type]
        query = [s.node for s in sides if self._are_times(s, "q", a.queries)]
        key = [s.node for s in sides if self._are_times(s, "k", a.keys)]
        if len(query) != 1 or len(key) != 1:
            return None
        buckets = self._buckets(steps, int(shape(table)[0]))
        return ByTime(term, table, *buckets, query[0], key[0]) if buckets is not None else None

    def _lookup(self, n: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """A table of numbers or of one number per head, and the bucket that is looked up in it."""
        table: Any = n.args[0] if n.args else None
        index: Any
        if op(n) == "index_select" and dim_of(n) == 0:
            index = arg(n, "index")
        elif op(n) == "index" and len(n.args[1]) == 1:  # type: ignore[arg-type]
            index = n.args[1][0]  # type: ignore[index]
        elif op(n) == "embedding" and passes_all_gradients(n):
            index = n.args[1]
        else:
            return None
        if not is_tensor(table) or not is_tensor(index) or rank_of(table) > 2 or not isinstance(shape(table)[0], int):
            return None
        integer = tensor(index).dtype in (torch.int64, torch.int32)  # type: ignore[union-attr]
        return (table, index) if integer and index not in self.meanings.tainted else None

    def _gap(self, term: Term) -> tuple[Term, list[fx.Node]] | None:
        """The difference of times that a bucket is made from, and the steps from its absolute value to the bucket."""
        steps: list[fx.Node] = []
        inner: Term | None = term
        while inner is not None:
            n = inner.node
            if op(n) in VIEWS | COPIES:
                inner = self._source(inner)
            elif op(n) == "abs":
                gap = self._along(inner, n.args[0])  # type: ignore[arg-type]
                return (gap, steps[::-1]) if gap is not None and is_difference(gap.node) else None
            elif never_decreases(n):
                steps.append(n)
                inner = self._along(inner, n.args[0])  # type: ignore[arg-type]
            else:
                return None
        return None

    def _one_side(self, term: Term) -> Term:
        """Times before they were laid out against each other."""
        while op(term.node) in VIEWS | COPIES and (inner := self._source(term)) is not None:
            term = inner
        return term

    def _are_times(self, side: Term, role: str, space: Space) -> bool:
        flat = self.typing.flat(side.node)
        mine = {r for dim in side.roles for r, _ in dim} <= {role, "s"} and side.along(role) == space.column
        known = len(set(flat)) == len(flat) and set(side.along("s")) in (set(), set(space.sequence))
        integer = tensor(side.node).dtype == torch.int64  # type: ignore[union-attr]
        return mine and known and integer and side.node not in self.meanings.tainted

    def _buckets(self, steps: list[fx.Node], entries: int) -> tuple[int, tuple[int, ...]] | None:
        """The bucket of equal times, and the smallest gaps that belong to the next ones."""

        def bucket(gaps: torch.Tensor) -> torch.Tensor:
            for step in steps:
                gaps = step.target(gaps, *step.args[1:], **step.kwargs)  # type: ignore[operator]
            return gaps

        try:
            with _torch.outside_compilation(), torch.no_grad():
                return bucket_bounds(bucket, entries)
        except Exception:
            return None  # a step that does not run on gaps: nothing is known

    def _time_table(self, found: ByTime) -> fx.Node:
        """(H or 1, K + 1)."""
        table, count = found.table, len(found.bounds) + 1
        x = self.e.dense(table)
        if count != shape(table)[0]:
            x = self.e.call(aten.slice.Tensor, x, 0, found.first, found.first + count)
        by_head = rank_of(table) == 2
        x = self.e.call(aten.transpose.int, x, 0, 1) if by_head else self.e.call(aten.unsqueeze.default, x, 0)
        return self._finished(x, found.term, tensor(table).dtype)  # type: ignore[union-attr]

    def _packed_times(self, node: fx.Node, chosen: RowSet) -> fx.Node:
        if (node, chosen) not in self._times:
            axes = tuple(a for a in chosen.space.axes if a in self.typing.flat(node))
            every = self.e.flat_rows(node, axes)  # padded: where times live packed, other rows may hold the queries
            x = self.e.call(torch.ops.turbogr.gather_rows.default, every, self.e.row_index(chosen, axes))
            self._times[node, chosen] = self.e.reshape(x, [-1]) if self.e.kept(node, axes) else x
        return self._times[node, chosen]


# --- moving labels -----------------------------------------------------------------------------------


class Moves:
    """Ops that make a term out of a table, in order; its text tells whether two terms are made alike."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.table: fx.Node | None = None
        self.steps: dict[fx.Node, int] = {}

    def __str__(self) -> str:
        def place(n: fx.Node) -> str:
            return "table" if n is self.table else f"#{self.steps[n]}"

        lines = [f"{n.target} {fx.map_arg((n.args, n.kwargs), place)}" for n in self.steps]
        return "\n".join([str(shape(self.table)) if self.table is not None else "", *lines])

    def run(self, result: fx.Node) -> torch.Tensor:
        """The term, made from a table that holds 1, 2, 3…"""
        values: dict[fx.Node, Any] = {}
        if self.table is not None:
            device = tensor(self.table).device  # type: ignore[union-attr]
            count = int(product(shape(self.table)))
            labels = torch.arange(1, count + 1, dtype=torch.int32, device=device)
            values[self.table] = labels.reshape([int(s) for s in shape(self.table)])
        for n in self.steps:
            values[n] = self._step(n, values)
        return values[result].cpu()

    def _step(self, n: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if n.op == "get_attr":
            return getattr(self.graph.owning_module, str(n.target))
        args, kwargs = fx.map_arg((n.args, n.kwargs), lambda x: values[x])
        return n.target(*args, **kwargs)  # type: ignore[operator]


_MOVES_ELEMENTS = {
    *_SAME, *VIEWS, *SPLITS, "getitem", "slice", "narrow", "select", "index_select", "index", "gather",
    "take_along_dim", "flip", "roll", "cat", "concat", "stack", "unfold", "tril", "triu", "diagonal",
}  # fmt: skip


def moves_elements(n: fx.Node) -> bool:
    """Is every element of the result an element of the first argument, or zero?"""
    if op(n) == "embedding":
        return passes_all_gradients(n)
    if op(n) in ("pad", "constant_pad_nd"):
        return arg(n, "mode", "constant") == "constant" and arg(n, "value") in (None, 0)
    return op(n) in _MOVES_ELEMENTS


def passes_all_gradients(n: fx.Node) -> bool:
    """An embedding that is an index_select in the backward too."""
    padding, by_frequency, sparse = (arg(n, name) for name in ("padding_idx", "scale_grad_by_freq", "sparse"))
    return padding in (None, -1) and not by_frequency and not sparse


def by_distance(labels: torch.Tensor) -> torch.Tensor | None:
    """(H, Nq, Nk) as (H, 2M - 1), entry i - j + M - 1 for query i and key j; None where i - j does not tell."""
    if not torch.equal(labels[:, 1:, 1:], labels[:, :-1, :-1]):
        return None
    heads, queries, keys = labels.shape
    most = max(queries, keys)
    entries = labels.new_zeros(heads, 2 * most - 1)
    entries[:, most - 1 : most - 1 + queries] = labels[:, :, 0]
    entries[:, most - keys : most - 1] = labels[:, 0, 1:].flip(-1)
    return entries


def _is_static(node: fx.Node) -> bool:
    return all(isinstance(s, int) for s in shape(node))


# --- buckets of time ---------------------------------------------------------------------------------

_FARTHEST = (2**63 - 1, 2**62)  # adding 1 to the former overflows, which no clock has reached
_NEVER_DECREASES = {"log", "log1p", "log2", "log10", "sqrt", "floor", "ceil", "round", "trunc", "relu"}
_INTEGERS_OF_TIME = (torch.int64, torch.int32)


def is_difference(n: fx.Node) -> bool:
    """Of two tensors of whole numbers."""
    whole = op(n) == "sub" and tensor(n).dtype == torch.int64  # type: ignore[union-attr]
    return whole and arg(n, "alpha", 1) == 1 and all(is_tensor(x) for x in n.args[:2])


def never_decreases(n: fx.Node) -> bool:
    """A step of numbers alone that keeps the order of numbers that are not negative."""
    name, others = op(n), [*n.args[1:], *n.kwargs.values()]
    if len(n.all_input_nodes) != 1 or any(isinstance(x, fx.Node) for x in others):
        return False
    if name in ("_to_copy", "to"):
        dtype = tensor(n).dtype  # type: ignore[union-attr]
        return dtype.is_floating_point or dtype in _INTEGERS_OF_TIME
    if name in ("mul", "div", "floor_divide"):
        return isinstance(n.args[1], (int, float)) and n.args[1] > 0
    if name in ("add", "sub"):
        return isinstance(n.args[1], (int, float)) and arg(n, "alpha", 1) > 0
    return name in _NEVER_DECREASES or name in ("clamp", "clamp_min", "clamp_max", "clip")


def bucket_bounds(bucket: Callable[[torch.Tensor], torch.Tensor], entries: int) -> tuple[int, tuple[int, ...]] | None:
    """The bucket of gap 0, and the smallest gap of each later one, up to the last that some gap reaches.

    `bucket` must not decrease; `entries` is the number of buckets there may be.
    """
    for farthest in _FARTHEST:
        seen = bucket(_samples(farthest)).long()
        if bool((seen[1:] >= seen[:-1]).all()):
            break
    else:
        return None
    first, last = int(seen[0]), min(int(seen[-1]), entries - 1)
    if first < 0 or last <= first:
        return None
    wanted = torch.arange(first + 1, last + 1)
    below, reached = torch.zeros_like(wanted), torch.full_like(wanted, farthest)
    while bool((reached - below > 1).any()):
        middle = below + (reached - below) // 2
        far_enough = bucket(middle).long() >= wanted
        below, reached = torch.where(far_enough, below, middle), torch.where(far_enough, middle, reached)
    return first, tuple(reached.tolist())


def _samples(farthest: int) -> torch.Tensor:
    """Gaps of all magnitudes, ascending."""
    powers = 2 ** torch.arange(59)
    return torch.cat([torch.arange(1024), *(powers * k // 7 for k in range(7, 15)), torch.tensor([farthest])]).unique()
