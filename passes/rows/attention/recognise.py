"""The normal form of the attention whose result is a node, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ...._torch import shape_env_of
from ..calls import op, rank_of
from .calls import arguments, shape, value
from .checks import Check, OnBatch, SizeAtMost, failed
from .evaluate import Evaluator
from .facts import Facts
from .find import FUSED, Candidate, candidates
from .formula import DEPTH, KEY, QUERY, WIDTH, ZERO, Formula, Index, Size, Sizes, size_of
from .indexing import broadcast, follow, tidy
from .language import (
    Data,
    Drop,
    Leaf,
    NeedsSplit,
    Number,
    Position,
    Refused,
    Score,
    Test,
    Unknown,
    just,
    number,
    product,
)
from .normal import NormalForm, Operand
from .normalise import normalised
from .numbers import added, cast, linear
from .products import contraction, placed
from .softmax import dropped, weights
from .table import Table, combine, one

aten = torch.ops.aten
SPLITS = 6  # of axes, before giving up


def recognise(node: fx.Node, facts: Facts) -> NormalForm | Refused | None:
    """What an attention computes; Refused with the term that did not fit; None where it looks like none.

    Without speculation first. With it where that leaves tensors of pairs that are read as they are, or fails: then the
    form with fewer of those is taken.
    """
    tries = [None] if op(node) == FUSED else list(candidates(node))
    if not tries:
        return None
    best: NormalForm | None = None
    why: Refused | None = None
    for speculate in (False, True):
        if best is not None and best.opaque == 0:
            break
        for candidate in tries:
            try:
                form = _solved(node, candidate, facts, speculate)
            except Refused as refused:
                why = why or refused
                continue
            if best is None or form.opaque < best.opaque:
                best = form
            break
    return best or why


def _solved(node: fx.Node, candidate: Candidate | None, facts: Facts, speculate: bool) -> NormalForm:
    """One way to read a product; axes are split until every view of them is a change of index."""
    splits: dict[str, Size] = {}
    for _ in range(SPLITS):
        try:
            with_axes = _Fused(node, splits, facts) if candidate is None else _Product(candidate, splits, facts)
            return with_axes.solved(speculate)
        except NeedsSplit as split:
            splits[split.axis] = split.inner
        except Unknown as unknown:
            raise Refused("too much to tell apart", unknown, node) from None
    raise Refused("a view that cuts across dims", splits, node)


class _Examples(Mapping[fx.Node, Any]):
    """Values in the call that is being compiled."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def __getitem__(self, node: fx.Node) -> Any:
        found = self.facts.example(node)
        if found is None:
            raise KeyError(node)
        return found

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _broken(checks: Iterable[Check], facts: Facts) -> OnBatch | None:
    """A check that the batch at hand breaks: it would never be of use."""
    for check in checks:
        try:
            broken = None if isinstance(check, SizeAtMost) else failed([check], _Examples(facts))
        except KeyError:
            continue
        if broken is not None:
            return broken
    return None


def _chain(node: fx.Node, after: set[fx.Node]) -> tuple[fx.Node, ...]:
    """What lies between the QK product and the PV product."""
    todo, found = [node], {node}
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n in after and n not in found]
        found.update(new)
        todo += new
    return tuple(n for n in node.graph.nodes if n in found and n is not node)


class Axes:
    """Axes of weights, each dim split as far as asked for."""

    def __init__(self, node: fx.Node, splits: dict[str, Size], facts: Facts) -> None:
        self.node, self.splits, self.facts = node, splits, facts
        self.names: list[str] = []
        self.sizes = Sizes({QUERY: 1}, shape_env_of(node.graph))

    def dim(self, name: str, size: Size) -> Formula:
        """The index of one dim of weights."""
        if name in (QUERY, KEY):
            self.names.append(name)
            self.sizes.of[name] = size
            return Formula.axis(name) if size != 1 else ZERO
        parts = list(self._split(name, size))
        self.names += [axis for axis, _ in parts]
        self.sizes.of |= dict(parts)
        total, stride = ZERO, size_of(1)
        for axis, length in reversed(parts):
            total, stride = total + Formula.of({axis: stride}), size_of(stride * length)
        return total if size != 1 else ZERO

    def _split(self, name: str, size: Size) -> Iterator[tuple[str, Size]]:
        if name not in self.splits:
            yield name, size
            return
        inner = self.splits[name]
        outer = self.sizes.divides(inner, size)
        assert outer is not None
        yield from self._split(name + "o", outer)
        yield from self._split(name + "i", inner)

    def operand(self, node: fx.Node, index: Index) -> Operand:
        given = tidy(node, index)
        return Operand(*follow(self.sizes, node, given, self.names), node, given)

    def sequences(self, places: Iterable[tuple[fx.Node, Index]]) -> tuple[str, ...]:
        """Axes that make up dims which run over sequences of the batch."""
        found = {
            axis
            for node, index in places
            for d, i in enumerate(index)
            if i.coefs and self.facts.is_sequence(node, d)
            for axis in i.axes
        }
        return tuple(a for a in self.names if a in found and a not in (QUERY, KEY))

    def form(
        self, ev: Evaluator, table: Table, query: Operand, key: Operand, value: Operand, result: Index
    ) -> NormalForm:
        found = normalised(ev, table, self.node)
        checks = (*ev.checks, *found.checks)
        broken = _broken(checks, self.facts)
        if broken is not None:
            raise Refused("not so in the batch at hand", broken, self.node)
        read = [(x.node, x.index) for x in (query, key, value)]
        read += [(a.node, a.index) for a in table.atoms if isinstance(a, Test)]
        return NormalForm(
            self.node, query, key, value, result, tuple(self.names), self.sizes, self.sequences(read),
            **found.form, assumptions=tuple(ev.assumptions), checks=checks, chain=_chain(self.node, ev.after),
        )  # fmt: skip


class _Product(Axes):
    """Weights between two products."""

    def __init__(self, candidate: Candidate, splits: dict[str, Size], facts: Facts) -> None:
        super().__init__(candidate.product.node, splits, facts)
        self.candidate = candidate

    def solved(self, speculate: bool) -> NormalForm:
        c = self.candidate
        roles = {c.query: QUERY, c.key: KEY}
        index = tuple(self.dim(roles.get(d, f"b{d}"), s) for d, s in enumerate(shape(c.weights)))
        if self.sizes[KEY] == 1:
            raise Refused("one key only", "", self.node)
        ev = Evaluator(self.node.graph, c.qk, self.sizes, self.facts, speculate)
        table = ev.at(c.weights, index)
        if ev.score_index is None:
            raise Refused("no scores in the weights", table, self.node)
        query, key = self._query_and_key(c.qk, ev.score_index)
        return self.form(ev, table, query, key, *self._value(index))

    def _query_and_key(self, qk: fx.Node, at: Index) -> tuple[Operand, Operand]:
        found = contraction(qk)
        if found is None or len(found.contracted) != 1:
            raise Refused("scores that are no product of queries and keys", "", qk)
        (inner,) = found.contracted
        places = {**dict(zip(found.out_labels, at, strict=True)), inner: Formula.axis(DEPTH)}
        for node, labels, other, others in found.sides():
            mine, theirs = placed(node, labels, places), placed(other, others, places)
            if any(KEY in i.axes for i in theirs) and not any(KEY in i.axes for i in mine):
                self.sizes.of[DEPTH] = shape(node)[labels.index(inner)]
                return self.operand(node, mine), self.operand(other, theirs)
        raise Refused("scores that are no product of queries and keys", "", qk)

    def _value(self, index: Index) -> tuple[Operand, Index]:
        product, weights_ = self.candidate.product, self.candidate.weights
        sides = [s for s in product.sides() if s[0] is weights_]
        node, labels, values, others = next(
            s for s in sides if s[1].index(next(iter(product.contracted))) == self.candidate.key
        )
        places = dict(zip(labels, index, strict=True))
        for d, c in enumerate(others):
            if c not in labels or (places[c] == ZERO and shape(node)[labels.index(c)] == 1):
                if c not in product.out_labels:
                    raise Refused("values are summed over more than keys", "", self.node)
                axis = WIDTH if d == len(others) - 1 else f"{WIDTH}{d}"
                self.sizes.of[axis] = shape(values)[d]
                places[c] = Formula.axis(axis)
        result = tuple(places[c] for c in product.out_labels)
        return self.operand(values, placed(values, others, places)), tidy(self.node, result)


class _Fused(Axes):
    """`scaled_dot_product_attention`: no score of it is in the graph."""

    def solved(self, speculate: bool) -> NormalForm:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        args = arguments(self.node, names)
        q, k, v = (args[name] for name in names[:3])
        lead = rank_of(q) - 2
        if shape(q)[:lead] != shape(self.node)[:-2]:
            raise Refused("a query that is broadcast", shape(q), self.node)
        index = tuple(self.dim(f"b{d}", s) for d, s in enumerate(shape(q)[:lead]))
        index = (*index, self.dim(QUERY, shape(q)[-2]), self.dim(KEY, shape(k)[-2]))
        self.sizes.of |= {DEPTH: shape(q)[-1], WIDTH: shape(v)[-1]}
        if self.sizes[KEY] == 1:
            raise Refused("one key only", "", self.node)
        ev = Evaluator(self.node.graph, None, self.sizes, self.facts, speculate)
        ev.after.add(self.node)
        table = self._weights(ev, args, index)
        batch = index[:-2]
        shared = self._group(batch, shape(q), shape(k)) if args["enable_gqa"] else batch
        depth, width = Formula.axis(DEPTH), Formula.axis(WIDTH)
        query = self.operand(q, (*batch, index[-2], depth))
        key, values = (
            self.operand(x, (*broadcast(x, (*shared, ZERO, ZERO))[:-2], index[-1], last))
            for x, last in ((k, depth), (v, width))
        )
        return self.form(ev, table, query, key, values, (*batch, index[-2], width))

    def _group(self, batch: Index, queries: list[Size], keys: list[Size]) -> Index:
        """Heads that share keys: the outer part of the head's index."""
        if not batch or keys[-3] == 1 or self.sizes.same(queries[-3], keys[-3]):
            return batch
        members = self.sizes.divides(keys[-3], queries[-3])
        if members is None:
            raise Refused("heads do not divide among those of keys", "", self.node)
        name = f"b{len(batch) - 1}"
        if name in self.sizes.of:
            raise NeedsSplit(name, members)
        return (*batch[:-1], Formula.axis(name + "o"))

    def _weights(self, ev: Evaluator, args: dict[str, Any], index: Index) -> Table:
        dtype = value(self.node).dtype
        depth = shape(args["query"])[-1]
        if args["scale"] is None and not isinstance(depth, int):
            raise Refused("a scale of unknown size", depth, self.node)
        scale = float(args["scale"]) if args["scale"] is not None else 1 / math.sqrt(int(depth))
        table = one(linear({product(Score()): scale}, 0.0, dtype, 0.0))
        hidden = number(-math.inf, dtype)
        if args["is_causal"]:
            seen = ev.test(Formula.of({QUERY: 1, KEY: -1}))
            table = combine(lambda yes, x: x if yes.value else hidden, seen, table)
        mask = args["attn_mask"]
        if mask is not None:
            at = ev.operand(mask, index)
            if value(mask).dtype == torch.bool:
                table = combine(lambda yes, x: x if yes.value else hidden, at, table)
            else:
                table = combine(lambda m, x: self._added(ev, mask, index, m, x, dtype), at, table)
        table = weights(ev, self.node, table, dtype, safe=True)
        p = float(args["dropout_p"])
        return combine(lambda leaf: dropped(leaf, Drop(self.node, p)), table) if p else table

    def _added(self, ev: Evaluator, mask: fx.Node, index: Index, m: Leaf, x: Leaf, dtype: torch.dtype) -> Leaf:
        if isinstance(m, Position):
            m = just(Data(ev.first(mask), broadcast(mask, index)), m.dtype)
        if isinstance(x, Number):
            return x
        assert not isinstance(x, Position)
        return added(aten.add.Tensor, x, cast(ev, m, dtype), dtype)
