"""Writing scores: lookup and product in one op, or a matrix product where rows are shared."""

from __future__ import annotations

import operator
import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...graph.costs import at_hints
from ...graph.nodes import tensor
from ...graph.shapes import same_size
from ...kernels.half_rows import BLOCK
from ..common.cross_entropy import value_of
from .drawing import drawing_of
from .kept import keeps_copy, kept_copy
from .plans import Plan, Writer
from .products import SUMMED, Labels
from .scoring import Scoring
from .tables import EMBEDDINGS, Rows

aten, ops = torch.ops.aten, torch.ops.turbogr
_SAME_ORDER = (aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim)
_DRAWN = ("uniform", "popularity", "permutation")


class Emitter:
    """Nodes of one scoring, where the graph is being written to."""

    def __init__(self, s: Scoring) -> None:
        self.s, self.w = s, Writer(s.product.node.graph)
        self._places: dict[str, tuple[Any, fx.Node, int]] = {}  # of each label: size, and who has it at which dim

    @property
    def rows(self) -> Rows:
        assert self.s.rows is not None
        return self.s.rows

    # --- pieces, with one line for each position -----------------------------------------------------

    def query(self) -> fx.Node:
        """(T, D), with everything that multiplies all rows of a position alike."""
        flat = self.w.number(self.plain_query(), self.rows.scale)
        for factor in self.rows.learned:
            flat = self.w.call(aten.mul.Tensor, flat, factor)
        return flat

    def plain_query(self) -> fx.Node:
        s, w = self.s, self.w
        x = s.query.build(w)
        self._remember(x, s.of_query, value_of(s.product.operands[0]).shape)
        flat = self._matrix(x, s.of_query, s.positions, (SUMMED,))
        return normalise(w, flat, s.product.eps) if s.product.eps >= 0 else flat

    def ids(self) -> fx.Node:
        """int64 (T, K), or (T,) where there is one row for each position."""
        return whole_ids(self.w, self.rows, self.like_ids(self.rows.ids))

    def like_ids(self, plan: Plan) -> fx.Node:
        s = self.s
        x = plan.real().build(self.w)
        shape = value_of(s.product.operands[1]).shape
        self._remember(
            x, s.of_rows, [n for n, label in zip(shape, s.product.labels[1], strict=True) if label != SUMMED]
        )
        return self._matrix(x, s.of_rows, s.positions, s.negatives)

    def operand(self) -> fx.Node:
        """Rows as they were computed, one below the other."""
        s = self.s
        x, labels = s.product.operands[1], s.product.labels[1]
        self._remember(x, labels, value_of(x).shape)
        return self._matrix(x, labels, (*s.positions, *s.negatives), (SUMMED,))

    def table(self) -> fx.Node:
        table = self.rows.table
        return self.w.call(aten.detach.default, table.node) if table.detached else table.node

    def halves(self, ids: fx.Node, each: Any) -> tuple[Any, ...]:
        """Rows of negatives in FP16, where each of `ids` (T, each) finds its own, and scales: for `half` of an op."""
        w, table = self.w, self.table()
        if keeps_copy(self.rows.table.node):
            half, scales = kept_copy(w, self.rows.table.node)
            return half, None, scales
        if copies_table(self.s):
            both = w.call(ops.half_rows.default, table, BLOCK)
            return w.call(operator.getitem, both, 0), None, w.call(operator.getitem, both, 1)
        positions = self.count(self.s.positions)
        device = value_of(self.s.product.node).device
        offsets = w.call(aten.mul.Tensor, w.range(w.plus(positions, 1), device), each)
        both = w.call(ops.quantize_rows.default, table, w.call(aten.reshape.default, ids, [-1]), offsets)
        places = w.call(aten.reshape.default, w.range(w.times(positions, each), device), [-1, each])
        return w.call(operator.getitem, both, 0), places, w.call(operator.getitem, both, 1)

    # --- whole scores --------------------------------------------------------------------------------

    def scores(self, half: bool = False) -> fx.Node:
        """By `lookup_dot`, in the dims of the product."""
        query, ids, table = self.query(), self.ids(), self.rows.table
        narrow = self.halves(ids, self.count(self.s.negatives)) if half else ()
        found = self.w.call(ops.lookup_dot.default, query, self.table(), ids, table.eps, *narrow)
        if may_pad(self.rows):
            found = self._keep_padding(found, query, ids)
        for factor in self.rows.factors:
            found = self.w.call(aten.mul.Tensor, found, self.like_ids(factor))
        return self._as_product(found, (*self.s.positions, *self.s.negatives), 2)

    def _keep_padding(self, scores: fx.Node, query: fx.Node, ids: fx.Node) -> fx.Node:
        """Entries of the padding row score as they do, and leave that row without a gradient."""
        w, table = self.w, self.rows.table
        row = w.call(aten.detach.default, w.call(aten.slice.Tensor, table.node, 0, table.padding, table.padding + 1))
        if table.eps >= 0:
            row = normalise(w, row, table.eps)
        constant = w.call(aten.linear.default, query, row)
        return w.call(aten.where.self, w.call(aten.eq.Scalar, ids, table.padding), constant, scores)

    def product(self) -> fx.Node:
        """By a matrix product of queries and the rows they share."""
        s, w = self.s, self.w
        query = s.query.build(w)
        self._remember(query, s.of_query, value_of(s.product.operands[0]).shape)
        if s.rows is None:
            rows, of_rows = s.other.build(w), s.of_rows
        else:
            rows, of_rows = self._looked_up(), (*s.of_rows, SUMMED)
        shape = dict(zip(s.product.labels[1], value_of(s.product.operands[1]).shape, strict=True))
        self._remember(rows, of_rows, [shape[n] if n else 1 for n in of_rows])
        letters = iter(string.ascii_lowercase)
        named: dict[str, str] = {}
        equation = []
        for labels in (s.of_query, of_rows):
            equation.append("".join(named.setdefault(n, next(letters)) if n else next(letters) for n in labels))
        order = (*s.positions, *s.sharing, *s.negatives)
        text = f"{equation[0]},{equation[1]}->{''.join(named[n] for n in order)}"
        found = w.call(aten.einsum.default, text, [query, rows])
        return self._as_product(found, order, len(order))

    def _looked_up(self) -> fx.Node:
        """Rows once for all that share them; the last dim is that of a row."""
        w, rows, s = self.w, self.rows, self.s
        lookup, ids = rows.lookups[0], rows.ids.build(w)
        if lookup.target in EMBEDDINGS:
            found = w.call(lookup.target, self.table(), ids, rows.table.padding)
        else:
            found = w.call(aten.index.Tensor, self.table(), [ids])
        if rows.table.eps >= 0:
            found = normalise(w, found, rows.table.eps, len(s.of_rows))
        for factor in rows.learned:
            found = w.call(aten.mul.Tensor, found, factor)
        return w.number(found, rows.scale)

    # --- dims ----------------------------------------------------------------------------------------

    def _remember(self, x: fx.Node, labels: Labels, shape: Sequence[Any]) -> None:
        for dim, (name, size) in enumerate(zip(labels, shape, strict=True)):
            if name:
                self._places.setdefault(name, (size, x, dim))

    def known(self, name: str) -> Any:
        return self._places[name][0]

    def size(self, name: str) -> Any:
        size, x, dim = self._places[name]
        return size if isinstance(size, int) else self.w.call(aten.sym_size.int, x, dim)

    def count(self, names: Labels) -> Any:
        """Product of sizes."""
        found = self.size(names[0])
        for name in names[1:]:
            found = self.w.times(found, self.size(name))
        return found

    def _matrix(self, x: fx.Node, labels: Labels, rows: Labels, columns: Labels) -> fx.Node:
        """One line for each position; dims of one may stand anywhere."""
        order = [labels.index(n) for n in (*rows, *columns)]
        if order != sorted(order):
            x = self.w.call(aten.permute.default, x, [*(i for i, n in enumerate(labels) if not n), *order])
        elif len(labels) == len(order) and len(rows) == 1 and len(columns) < 2:
            return x
        if not columns:
            return self.w.call(aten.reshape.default, x, [-1])
        width = self.count(columns)
        return plain(x, width) or self.w.call(aten.reshape.default, x, [-1, width])

    def _as_product(self, found: fx.Node, order: Labels, rank: int) -> fx.Node:
        """From dims in `order`, of which the first may be one, to those of the product."""
        w, result = self.w, self.s.product.result
        if result == order and len(order) == rank:
            return found
        wanted = tuple(n for n in result if n)
        if wanted == order:
            return w.call(aten.reshape.default, found, [self.size(n) if n else 1 for n in result])
        if len(order) != rank:
            found = w.call(aten.reshape.default, found, [self.size(n) for n in order])
        found = w.call(aten.permute.default, found, [order.index(n) for n in wanted])
        for dim, name in enumerate(result):
            found = found if name else w.call(aten.unsqueeze.default, found, dim)
        return found


def copies_table(s: Scoring) -> bool:
    """Is a copy of the whole table in FP16 smaller than one of all rows that are looked up?"""
    assert s.rows is not None
    queries, each, _ = s.counts
    looked_up, rows = at_hints(queries * each, s.product.node.graph), value_of(s.rows.table.node).shape[0]
    return isinstance(rows, int) and looked_up is not None and rows <= int(looked_up)


def plain(x: fx.Node, width: Any) -> fx.Node | None:
    """The matrix of that width that `x` is a view of."""
    while x.target in _SAME_ORDER and isinstance(x.args[0], fx.Node):
        x = x.args[0]
        value = tensor(x)
        if value is None:
            return None
        if value.dim() == 2 and isinstance(width, int) and same_size(value.shape[1], width):
            return x
    return None


def normalise(w: Writer, x: fx.Node, eps: float, axis: int = 1) -> fx.Node:
    norm = w.call(aten.linalg_vector_norm.default, x, 2.0, [axis], True)
    return w.call(aten.div.Tensor, x, w.call(aten.clamp.default, norm, eps))


def leaf_ids(rows: Rows) -> list[fx.Node]:
    """The tensors of ids that rows are looked up by."""
    found: list[Any] = []
    for lookup in rows.lookups:
        index: Any = lookup.args[2] if lookup.target is aten.index_select.default else lookup.args[1]
        found.append(index[0] if isinstance(index, (list, tuple)) else index)
    return found


def whole_ids(w: Writer, rows: Rows, ids: fx.Node) -> fx.Node:
    """As the kernels want them: int64, from the start of the table."""
    leaves = leaf_ids(rows)
    if any(value_of(x).dtype != torch.int64 for x in leaves):
        ids = w.call(aten._to_copy.default, ids, dtype=torch.int64)
    drawn = [drawing_of(x) for x in leaves]
    if rows.table.wraps and not all(d.kind in _DRAWN and not d.changed and not d.from_list for d in drawn):
        turned = w.call(aten.add.Tensor, ids, w.size(rows.table.node, 0))
        ids = w.call(aten.where.self, w.call(aten.lt.Scalar, ids, 0), turned, ids)
    return ids


def may_pad(rows: Rows) -> bool:
    """May ids name the row that gets no gradient?"""
    padding = rows.table.padding
    if padding < 0 or rows.table.detached:
        return False
    return not all(drawing_of(x).never(padding) for x in leaf_ids(rows))
