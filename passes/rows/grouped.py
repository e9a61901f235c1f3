"""Rows sorted by group, computed group by group and put back: the same without the sorting.

A mixture of experts sorts (row, expert) pairs by expert, multiplies each run of them by its expert's matrix, and undoes
the sorting. A value z in sorted order is some u in the order of rows, z = u[order]: ops that keep rows apart commute
with the order, a product by runs is a product of each row with the matrix of its own group, and putting back gives u.
Each row of u is made from its own row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ... import _torch
from ...check.stand_ins import only_computes
from ...graph.nodes import tensor
from .apart import Apart
from .attention.numbers import exact_up_to
from .calls import (
    COPIES,
    arg,
    counts_from_zero,
    dims_of,
    is_tensor,
    op,
    operand,
    piece_of,
    product,
    quotient,
    rank_of,
    shape,
)
from .declaration import EVERY, row_op
from .spaces import Space

if TYPE_CHECKING:
    from .analysis import RowAnalysis
    from .axes import Dims, Typing
    from .emit import Emitter
    from .program import RowSet
    from .rowwise import Rowwise

aten = torch.ops.aten
PRODUCTS = ("_grouped_mm", "transformers::grouped_mm_fallback")  # (rows in order, matrices, ends of runs)
_MOVES = COPIES | {"reshape", "view", "flatten", "_to_copy"}


class Unknown(Exception):
    """Not a value in sorted order, or not one that is understood."""


def take_apart_sorted(graph: fx.Graph, analysis: RowAnalysis) -> list[Apart]:
    """What is put back after sorting, as values that were never sorted."""
    if not any(op(n) in PRODUCTS for n in graph.nodes):
        return []
    found = [_unsorted(node, analysis) for node in list(graph.nodes) if op(node) == "index"]
    return [apart for apart in found if apart is not None]


def _unsorted(node: fx.Node, analysis: RowAnalysis) -> Apart | None:
    indices, z = arg(node, "indices"), operand(node)
    order = _undone(indices[0]) if len(indices) == 1 else None
    if order is None:
        return None
    sorting = Sorting(order, analysis)
    try:
        sorting.check(z)
    except Unknown:
        return None
    with node.graph.inserting_before(node):
        result = sorting.build(z)
    node.replace_all_uses_with(result)
    return Apart(node, tuple(sorting.parts), {node: result}, by_identity=True)


def _undone(index: Any) -> fx.Node | None:
    """The order that an index undoes: inverse[order] = arange, argsort(order)."""
    if op(index) == "index_put" and not arg(index, "accumulate"):
        places, values = arg(index, "indices"), arg(index, "values")
        whole = len(places) == 1 and _is_order(places[0]) and counts_from_zero(values)
        return places[0] if whole and shape(values) == shape(index) == shape(places[0]) else None
    if op(index) == "argsort" or (op(index) == "getitem" and op(index.args[0]) == "sort" and piece_of(index) == 1):
        order = index.args[0] if op(index) == "argsort" else index.args[0].args[0]
        return order if _is_order(order) and _ascends(index) else None
    return None


def _is_order(node: Any) -> bool:
    """Numbers of rows in the order of their groups."""
    found = op(node) == "argsort" or (op(node) == "getitem" and op(node.args[0]) == "sort" and piece_of(node) == 1)
    return found and rank_of(node) == 1 and _ascends(node)


def _ascends(node: Any) -> bool:
    call = node.args[0] if op(node) == "getitem" else node
    return not arg(call, "descending")


class Sorting:
    """Values in one sorted order, and what they are in the order of rows."""

    def __init__(self, order: fx.Node, analysis: RowAnalysis) -> None:
        call: Any = order.args[0] if op(order) == "getitem" else order
        self.order, self.call, self.groups = order, call, call.args[0]
        self.typing, self.rowwise = analysis.demand.typing, analysis.demand.rowwise
        self.space = Space(tuple(self.typing.atoms(order)[0]))
        self.parts: list[fx.Node] = []
        self._built: dict[fx.Node, fx.Node] = {}

    # --- what is understood ------------------------------------------------------------------------

    def check(self, z: Any) -> None:
        if self._entry(z) is not None:
            return
        if not self._is_sorted(z):
            raise Unknown
        if op(z) in PRODUCTS:
            rows, weights, ends = z.args[:3]
            if self._runs(ends, shape(weights)[0]) and rank_of(rows) == 2 and len(z.args) == 3 and not z.kwargs:
                self.check(rows)
                return
            raise Unknown
        if self.rowwise.why_mixed(z, self.space) is not None or _torch.is_random(z) or z.is_impure():
            raise Unknown
        for x in self._inputs(z):
            if self._is_sorted(x):
                self.check(x)

    def _is_sorted(self, x: Any) -> bool:
        return is_tensor(x) and bool(set(self.space.axes) & set(self.typing.flat(x)))

    def _inputs(self, z: fx.Node) -> Iterator[fx.Node]:
        source: Any = z.args[0] if op(z) == "getitem" else z
        return iter(source.all_input_nodes)

    def _entry(self, z: Any) -> tuple[fx.Node, int] | None:
        """A value of which z has rows in sorted order, and how often each of its rows occurs there."""
        if op(z) == "getitem" and z.args[0] is self.call and piece_of(z) == 0:
            return self.groups, 1
        if op(z) != "index" or len(arg(z, "indices")) != 1:
            return None
        (index,), source = arg(z, "indices"), z.args[0]
        times = 1
        if op(index) == "floor_divide" or (op(index) == "div" and arg(index, "rounding_mode") == "floor"):
            index, times = index.args
        if index is not self.order or not isinstance(times, int) or times < 1:
            return None
        whole = quotient(product([shape(source)[0], times]), shape(self.order)[0]) == 1
        return (source, times) if whole else None

    def _runs(self, ends: Any, count: Any) -> bool:
        """Are these the ends of the runs of all groups, and is every row in one?"""
        while op(ends) == "_to_copy":
            ends = ends.args[0]
        if op(ends) != "cumsum" or not isinstance(count, int) or count < 2 or not _below(self.groups, count):
            return False
        counts: Any = ends.args[0]
        while op(counts) == "_to_copy":
            counts = counts.args[0]
        if op(counts) == "histc":
            fits = (arg(counts, "bins"), arg(counts, "min"), arg(counts, "max")) == (count, 0, count - 1)
            return fits and self._are_groups(counts.args[0], count)
        if op(counts) == "bincount":
            fits = arg(counts, "weights") is None and arg(counts, "minlength") == count
            return fits and self._are_groups(counts.args[0], count)
        return False

    def _are_groups(self, x: Any, count: int) -> bool:
        """The numbers of groups, in types that tell so many apart."""
        while op(x) == "_to_copy":
            value = tensor(x)
            if value is None or value.dtype == torch.bool or exact_up_to(value.dtype) < count - 1:
                return False
            x = x.args[0]
        return x is self.groups or (self._entry(x) or (None,))[0] is self.groups

    # --- the same in the order of rows -------------------------------------------------------------

    def build(self, z: fx.Node) -> fx.Node:
        if z not in self._built:
            self._built[z] = self._made(z)
        return self._built[z]

    def _made(self, z: fx.Node) -> fx.Node:
        entry = self._entry(z)
        if entry is not None:
            source, times = entry
            return source if times == 1 else self._repeated(source, times, z)
        if op(z) in PRODUCTS:
            rows, weights, _ = z.args[:3]
            assert isinstance(rows, fx.Node)
            target: Any = z.target
            marker = torch.ops.turbogr.grouped_mm.default
            return self._add(z, marker, self.build(rows), weights, self.groups, target._schema.name)
        if op(z) == "getitem":
            source_node: Any = z.args[0]
            if source_node not in self._built:
                self._built[source_node] = self._copied(source_node)
        return self._copied(z)

    def _copied(self, z: fx.Node) -> fx.Node:
        def mine(x: fx.Node) -> fx.Node:
            return self._built[x] if x in self._built else self.build(x) if self._is_sorted(x) else x

        made = z.graph.node_copy(z, mine)
        self.parts.append(made)
        return made

    def _repeated(self, source: fx.Node, times: int, z: fx.Node) -> fx.Node:
        rest = [*source.meta["val"].shape[1:]]
        apart = self._add(z, aten.unsqueeze.default, source, 1)
        wide = self._add(z, aten.expand.default, apart, [-1, times, *[-1] * len(rest)])
        return self._add(z, aten.flatten.using_ints, wide, 0, 1)

    def _add(self, z: fx.Node, target: Any, *args: Any) -> fx.Node:
        """A call whose value is described at once."""
        node = z.graph.call_function(target, args)
        mode = _torch.fake_mode_of(z.graph)
        assert mode is not None
        with mode, torch.no_grad(), _torch.without_autocast():
            node.meta["val"] = target(*[a.meta["val"] if isinstance(a, fx.Node) else a for a in args])
        self.parts.append(node)
        return node


def _below(groups: Any, count: int) -> bool:
    """Numbers along a dim of so many: none is beyond the last group."""
    while op(groups) in _MOVES:
        value = tensor(groups)
        if value is None or value.dtype not in (torch.int64, torch.int32):
            return False
        groups = groups.args[0]
    if op(groups) in ("argmax", "argmin", "argsort"):
        dims = dims_of(groups)
        return dims is not None and shape(groups.args[0])[dims[0]] == count
    call: Any = groups.args[0] if op(groups) == "getitem" and piece_of(groups) == 1 else None
    if op(call) not in ("topk", "sort", "max", "min"):
        return False
    dims = dims_of(call)
    return dims is not None and shape(call.args[0])[dims[0]] == count


# --- a product of each row with the matrix of its group ------------------------------------------------


def _by_runs(t: Typing, n: fx.Node) -> Dims | None:
    x, weights = t.dims(n.args[0]), t.dims(n.args[1])
    if len(x) != 2 or len(weights) != 3:
        return None
    t.join(x[1], weights[1])
    return [x[0], weights[2]]


def _axes(t: Typing, n: fx.Node) -> Dims:
    x, weights, groups = (t.dims(a) for a in n.args[:3])
    t.join(x[1], weights[1])
    return [t.join(x[0], groups[0]), weights[2]]


def _mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    x, weights, groups = n.args[:3]
    if not r.covers(x, s) or not r.covers(groups, s) or not r.free(weights, s):
        return "a product by groups of values with other rows"
    return "a product by groups over rows" if r.on_rows(x, 1, s) else None


def _packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """Sorted again, as the op wants rows: so many fewer of them."""
    x: Any = n.args[0]
    weights: Any = n.args[1]
    groups: Any = n.args[2]
    numbers = e.reshape(e.packed(groups, chosen), [-1])
    rows = e.reshape(e.packed(x, chosen), [-1, shape(x)[1]])
    order = e.call(aten.argsort.default, numbers)
    runs = e.call(aten.index.Tensor, numbers, [order])
    last = e.call(aten.arange.default, shape(weights)[0], device=e.dense(weights).meta["val"].device)
    ends = e.call(aten.searchsorted.Tensor, runs, last, out_int32=True, right=True)
    namespace, name = str(n.args[3]).split("::")
    by = getattr(getattr(torch.ops, namespace), name).default
    multiplied = e.call(by, e.call(aten.index.Tensor, rows, [order]), e.dense(weights), ends)
    back = e.call(aten.index.Tensor, multiplied, [e.call(aten.argsort.default, order)])
    return e.reshape(back, [-1, *e.kept_sizes(n, chosen.space.axes)])


row_op(*PRODUCTS, models=EVERY, axes=_by_runs)
only_computes(*PRODUCTS)
row_op("turbogr::grouped_mm", models=("x", "weights", "groups", "by"), axes=_axes, mixes=_mixes, packed=_packed)
