"""The packed graph: every value that is demanded on a set of rows lives as (rows, features).

Nodes get a packed twin, in graph order; whoever needs the other form of a value gets a conversion, made once. The
packed layout is canonical: row axes are deleted from every dim and rows come first, so (B, N, D), (N, B, D), (B*N, D)
and (B, h, N, d) are all (T, ...), and transposes around attention vanish.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ... import _torch
from ... import kernels as _kernels  # noqa: F401  (defines the ops)
from ...errors import PassError
from ...graph.costs import PAIRS
from ...graph.nodes import tensor
from ...graph.provenance import line_of
from ...pipeline.capacity import Capacity
from ...runtime.prologue import add_input
from ...runtime.specialize import ROUNDED
from .axes import dim_of_cat, einsum_labels, reduced_dims, swapped
from .bias import Biases
from .demand import ALL, DemandAnalysis
from .meaning import MINUS_INFINITY, Predicate, Within
from .moves import Move
from .ops import (
    LIKE,
    SPLITS,
    VIEWS,
    Size,
    arg,
    dim_of,
    is_pointwise,
    is_tensor,
    op,
    product,
    rank_of,
    shape,
    size,
    size_symbols,
    tensors,
)
from .peeling import Attention, Pairs
from .program import HasRow, Program, Recipe, Rows, RowSet, SeesKey, subgraph
from .sets import Holding, Terms
from .spaces import Projected, Relation, Space

aten = torch.ops.aten


class Emitter:
    def __init__(
        self, graph: fx.Graph, analysis: DemandAnalysis, parity: bool = False, capacity: Capacity | None = None
    ) -> None:
        self.graph, self.an, self.typing = graph, analysis, analysis.typing
        self.capacity = capacity  # packed rows come in these sizes
        self.parity = parity  # draw dropout masks for padded values, and pack them
        self.placeholders = graph.find_nodes(op="placeholder")
        self._sets: dict[tuple[Space, Terms | None, bool], RowSet] = {}
        self.seen_sizes: list[fx.Node] = []  # whose number of rows the model sees, so that it is not rounded
        self._counts: dict[RowSet, Any] = {}
        self._twins: dict[tuple[fx.Node, RowSet], fx.Node] = {}
        self._home: dict[fx.Node, RowSet] = {}  # of values that live packed
        self._dense: dict[fx.Node, fx.Node] = {}
        self._reads_padded: list[tuple[fx.Node, fx.Node, fx.Node]] = []  # node, packed operand, its padded form
        self._inputs: dict[Any, fx.Node] = {}
        self._recipes: dict[str, Recipe] = {}
        self._checks: list[SeesKey | HasRow] = []
        self._needed: dict[fx.Node, None] = {}
        self._replaced: dict[fx.Node, fx.Node] = {}
        self._entries: dict[int, str] = {}
        self._axis_sources: dict[int, tuple[fx.Node, int]] = {}
        self.kept_attentions: list[fx.Node] = []
        self.pair_counts: dict[sympy.Symbol, tuple[RowSet, RowSet]] = {}
        self.origin: dict[fx.Node, fx.Node] = {}  # new node -> the captured node it stands for
        self._at: fx.Node | None = None
        self.biases = Biases(self)
        mode = _torch.fake_mode_of(graph)
        assert mode is not None
        self.mode = mode

    # --- row sets ----------------------------------------------------------------------------------

    def set_of(self, space: Space, terms: Terms | None, *, exact: bool = False) -> RowSet:
        """`exact`: the number of rows may not be rounded."""
        rounded = self.capacity is not None and not exact and self._known_count(space, terms) is None
        key = (space, terms, rounded)
        if key not in self._sets:
            self._sets[key] = RowSet(len(self._sets), space, terms, rounded)
        return self._sets[key]

    def home(self, node: fx.Node) -> RowSet:
        wanted, space = self.an.wanted[node], self.an.space_of(node)
        assert wanted is not ALL and space is not None
        return self.set_of(space, wanted)

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
                    return tensor(node).shape[at[0]]  # type: ignore[union-attr]
        return None

    # --- inputs from the prologue ------------------------------------------------------------------

    def need(self, *nodes: fx.Node) -> None:
        self._needed.update(dict.fromkeys(nodes))

    def _needs(self, chosen: RowSet) -> None:
        for term in chosen.terms or ():
            self._needs_term(term)

    def _needs_term(self, term: Any) -> None:
        for predicate in getattr(term, "predicates", ()):
            self.need(predicate.node)
        relation = getattr(term, "relation", None)
        if relation is not None:
            self._needs_relation(relation)
        if getattr(term, "mask", None) is not None:
            self.need(term.mask)
        if getattr(term, "of", None) is not None:
            self._needs_term(term.of)

    def _needs_relation(self, relation: Relation) -> None:
        if isinstance(getattr(relation, "column", None), fx.Node):
            self.need(relation.column)  # type: ignore[union-attr,arg-type]

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

    def fake_size(self, value: Size) -> Any:
        """A size of fake tensors for an expression."""
        if isinstance(value, int):
            return value
        if isinstance(value, sympy.Symbol):
            index, dim = size_symbols(self.placeholders)[value]
            found = self.placeholders[index].meta["val"]
            return found if dim is None else found.shape[dim]
        parts = [self.fake_size(int(a) if a.is_Integer else a) for a in value.args]
        out = parts[0]
        for part in parts[1:]:
            out = out * part if isinstance(value, sympy.Mul) else out + part
        return out

    # --- building ----------------------------------------------------------------------------------

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        assert self._at is not None
        self.origin[node] = self._at
        return node

    def reshape(self, x: fx.Node, sizes: Sequence[Any]) -> fx.Node:
        return self.call(aten.reshape.default, x, [self.size(s) for s in sizes])

    def size(self, value: Size) -> Any:
        """A size as an argument: a number, or a node that reads it from an input."""
        if isinstance(value, int):
            return value
        if isinstance(value, sympy.Symbol):
            return self._symbol(value)
        if isinstance(value, sympy.Mul):
            out: Any = 1
            for factor in value.args:
                other = self.size(int(factor) if factor.is_Integer else factor)
                out = other if isinstance(out, int) and out == 1 else self.call(operator.mul, out, other)
            return out
        if isinstance(value, sympy.Add):
            out = 0
            for part in value.args:
                other = self.size(int(part) if part.is_Integer else part)
                out = other if isinstance(out, int) and out == 0 else self.call(operator.add, out, other)
            return out
        raise PassError(f"cannot write the size {value} with the sizes of the inputs")

    def _symbol(self, symbol: sympy.Symbol) -> fx.Node:
        index, dim = size_symbols(self.placeholders)[symbol]
        node = self.placeholders[index]
        return node if dim is None else self.call(aten.sym_size.int, node, dim)

    def kept(self, node: fx.Node, axes: Sequence[int]) -> list[tuple[int, Size]]:
        """Dims that survive the deletion of row axes, with their sizes."""
        out = []
        for i, dim in enumerate(self.typing.atoms(node)):
            rest = [a for a in dim if a not in axes]
            if rest or not dim:
                out.append((i, self.typing.size_of(rest)))
        return out

    def kept_sizes(self, node: fx.Node, axes: Sequence[int]) -> list[Size]:
        return [s for _, s in self.kept(node, axes)]

    def position(self, node: fx.Node, dim: int, chosen: RowSet) -> int:
        """A dim of the padded value in its packed twin."""
        return 1 + [i for i, _ in self.kept(node, chosen.space.axes)].index(dim % rank_of(node))

    # --- conversions -------------------------------------------------------------------------------

    def flat_rows(self, node: fx.Node, axes: Sequence[int]) -> fx.Node:
        """A padded value as (all rows over the axes, kept dims)."""
        flat = self.typing.flat(node)
        rest = [a for a in flat if a not in axes]
        x = self.dense(node)
        order = [a for a in axes if a in flat] + rest
        if flat != order:
            x = self.reshape(x, [self.typing.axes.size(a) for a in flat])
            x = self.call(aten.permute.default, x, [flat.index(a) for a in order])
        return self.reshape(x, [-1, *self.kept_sizes(node, axes)])

    def packed(self, node: fx.Node, chosen: RowSet) -> fx.Node:
        """The value on the rows of a set."""
        key = (node, chosen)
        if key not in self._twins:
            self._twins[key] = self._convert(node, chosen)
        return self._twins[key]

    def _convert(self, node: fx.Node, chosen: RowSet) -> fx.Node:
        if node in self._home and chosen.space.includes(self._home[node].space):
            source = self._home[node]
            twin = self._twins[node, source]
            if op(node) == "fbgemm::jagged_to_padded_dense":
                zero = self.call(
                    aten.new_zeros.default, twin, [1, *[self.size(s) for s in self.kept_sizes(node, chosen.space.axes)]]
                )
                twin = self.call(aten.cat.default, [twin, zero])
                return self.call(GATHER, twin, self.map_to(source, chosen, zero_outside=True))
            return self.call(GATHER, twin, self.map_to(source, chosen))
        flat = self.typing.flat(node)
        axes = tuple(a for a in chosen.space.axes if a in flat)
        if not axes:
            x = self.dense(node)
            sizes = self.kept_sizes(node, ())
            return self.call(
                aten.expand.default,
                self.reshape(x, [1, *sizes]),
                [self._count_node(chosen), *[self.size(s) for s in sizes]],
            )
        if node.op == "placeholder" and tensor(node).is_floating_point() and node not in self.an.meanings.tainted:  # type: ignore[union-attr]
            self._entries[self.placeholders.index(node)] = node.name
        return self.call(GATHER, self.flat_rows(node, axes), self.row_index(chosen, axes))

    def _count_node(self, chosen: RowSet) -> Any:
        count = self.count(chosen)
        return count if isinstance(count, int) else self.call(aten.sym_size.int, self.rows(chosen), 0)

    def row_index(self, chosen: RowSet, axes: tuple[int, ...]) -> fx.Node:
        """Rows of a set as rows over some of its axes."""
        space = chosen.space
        if axes == space.axes:
            return self.rows(chosen)
        if axes == space.column:
            return self.columns(chosen)
        if axes == space.sequence:
            return self.sequences(chosen)
        relation = Projected(space, Space(axes))
        return self.per_row("part", ("part", chosen, axes), chosen, lambda r: relation.index(r.batch)[r.rows(chosen)])

    def dense(self, node: fx.Node) -> fx.Node:
        """The padded value; rows that are not demanded are zero."""
        if node not in self._home:
            return node
        if node not in self._dense:
            source = self._home[node]
            twin = self._twins[node, source]
            self._dense[node] = self.padded(self._scattered(twin, source, source.space.axes), node, source.space)
        return self._dense[node]

    def _scattered(self, x: fx.Node, chosen: RowSet, axes: Sequence[int]) -> fx.Node:
        """Rows of a set added up as rows over some of its axes; dummies go to one row more, which is cut off."""
        by_sequence = tuple(axes) == chosen.space.sequence
        total = product(self.typing.axes.size(a) for a in axes)
        if not chosen.rounded:
            index = self.sequences(chosen) if by_sequence else self.rows(chosen)
            return self.call(SCATTER, x, index, self.size(total))

        def rest(r: Rows) -> int:
            sequences, columns = r.batch.extent(chosen.space)
            return sequences if by_sequence else sequences * columns

        real: Recipe = (lambda r: r.sequences(chosen)) if by_sequence else (lambda r: r.rows(chosen))
        index = self.per_row("out", ("out", chosen, by_sequence), chosen, real, dummy=rest)
        every = self.call(SCATTER, x, index, self.size(total + 1))
        return self.call(aten.slice.Tensor, every, 0, 0, self.size(total))

    def _without_dummies(self, x: fx.Node, chosen: RowSet, value: Any, dims: int) -> fx.Node:
        """A packed value with another value on dummy rows; `dims` follow the rows."""
        if not chosen.rounded:
            return x
        dummies = self.dummies(chosen)
        dummies = self.reshape(dummies, [-1, *[1] * dims]) if dims else dummies
        return self.call(aten.masked_fill.Scalar, x, dummies, value)

    def padded(self, x: fx.Node, node: fx.Node, space: Space) -> fx.Node:
        """(all rows of a space, kept dims) in the layout of a padded value."""
        flat = self.typing.flat(node)
        order = [*space.axes, *[a for a in flat if a not in space.axes]]
        if order != flat:
            x = self.reshape(x, [self.typing.axes.size(a) for a in order])
            x = self.call(aten.permute.default, x, [order.index(a) for a in flat])
        return self.reshape(x, shape(node))

    def operand(self, x: Any, n: fx.Node, chosen: RowSet) -> Any:
        """An operand of a pointwise op as a tensor that broadcasts against the packed result."""
        if not isinstance(x, fx.Node) or not is_tensor(x) or rank_of(x) == 0:
            return x
        axes = chosen.space.axes
        offset = rank_of(n) - rank_of(x)
        mine = dict(self.kept(x, axes))
        want = [mine.get(d - offset, 1) for d, _ in self.kept(n, axes)]
        if any(a in axes for a in self.typing.flat(x)):
            y = self.packed(x, chosen)
            return y if self.kept_sizes(x, axes) == want else self.reshape(y, [-1, *want])
        y = self.dense(x)
        have = shape(x)
        while want and want[0] == 1 and len(want) > len(have):
            want = want[1:]
        return y if have == want else self.reshape(y, want)

    @property
    def homes(self) -> dict[fx.Node, RowSet]:
        """Captured values that live packed, and where."""
        return self._home

    @property
    def added(self) -> list[fx.Node]:
        """Inputs that the prologue provides."""
        return list(self._inputs.values())

    def recipe(self, node: fx.Node) -> Recipe:
        return self._recipes[node.name]

    @property
    def superseded(self) -> set[fx.Node]:
        """Captured nodes whose work is done by packed ones."""
        inside = {n for a in self.an.attentions.values() if a.node in self.kept_attentions for n in a.chain}
        return {*self._home, *self._replaced, *inside}

    # --- the walk ----------------------------------------------------------------------------------

    def run(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "placeholder" or node in self._inputs.values():
                continue
            self._at = node
            with self.graph.inserting_before(node):
                self._visit(node)
        for node, x, padded in self._reads_padded:  # only now: until here the captured graph is what it was
            node.replace_input_with(x, padded)
        for old, new in self._replaced.items():
            old.replace_all_uses_with(new)

    def _visit(self, node: fx.Node) -> None:
        if node.op != "output" and node not in self.an.wanted and not node.is_impure():
            return
        if self.lives_packed(node):
            chosen = self.home(node)
            twin = self._emit(node, chosen)
            if op(node) == "fbgemm::jagged_to_padded_dense":
                chosen = self._jagged_home(node, chosen)
            self._home[node] = chosen
            self._twins[node, chosen] = twin
            return
        new = self._exit(node)
        if new is not None:
            self._replaced[node] = new
            return
        for x in node.all_input_nodes:
            if x in self._home:
                self._reads_padded.append((node, x, self.dense(x)))

    def lives_packed(self, node: fx.Node) -> bool:
        wanted, space = self.an.wanted.get(node), self.an.space_of(node)
        if wanted is None or wanted is ALL or space is None or node.op != "call_function":
            return False
        if node in self.an.attentions:
            return self.an.attentions[node].queries == space
        if node in self.an.softmaxes or op(node) == "fbgemm::jagged_to_padded_dense":
            return True
        if self.an.needs_shape_only(node):
            return False  # made without the tensor whose shape it has
        if node in self.an.pooled or self.an.sums_columns(node):
            return False  # made from packed rows, one per sequence
        return self.an.move_of(node) is not None or self.an.why_mixed(node, space) is None

    def _jagged_home(self, node: fx.Node, chosen: RowSet) -> RowSet:
        offsets = self.typing.offsets(arg(node, "offsets")[0])
        return self.set_of(chosen.space, self.an.rows_where(chosen.space, [Within(offsets)]), exact=True)

    def _emit(self, n: fx.Node, chosen: RowSet) -> fx.Node:
        name = op(n)
        if n in self.an.attentions:
            return self.attention(self.an.attentions[n], chosen)
        if n in self.an.softmaxes:
            x: Any = n.args[0]
            scores = self.packed(x, chosen)
            if tensor(x).dtype != tensor(n).dtype:  # type: ignore[union-attr]
                scores = self.call(aten._to_copy.default, scores, dtype=tensor(n).dtype)  # type: ignore[union-attr]
            weights = self.call(torch.ops.turbogr.segment_softmax.default, scores, self.offsets(chosen))
            return self.call(GATHER, weights, self._again(chosen)) if chosen.rounded else weights
        if name == "fbgemm::jagged_to_padded_dense":
            return self.dense(n.args[0])  # type: ignore[arg-type]
        move = self.an.move_of(n)
        if move is not None:
            return self.moved(n, move, chosen)
        if name == "getitem":
            return self._piece(n, chosen)
        rule = _RULES.get(name)
        if rule is not None:
            return rule(self, n, chosen)
        assert is_pointwise(n), name
        return self.pointwise(n, chosen)

    def _again(self, chosen: RowSet) -> fx.Node:
        """Each row's own place, and the last row's for dummies."""
        return self.per_row("again", ("again", chosen), chosen, lambda r: torch.arange(len(r.rows(chosen))))

    def pointwise(self, n: fx.Node, chosen: RowSet) -> fx.Node:
        if op(n) == "dropout" and self.parity and arg(n, "train") and arg(n, "p"):
            return self._padded_dropout(n, chosen)
        args = fx.map_arg(n.args, lambda x: self.operand(x, n, chosen))
        kwargs = fx.map_arg(n.kwargs, lambda x: self.operand(x, n, chosen))
        kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}  # strides of the padded value
        twin = self.call(n.target, *args, **kwargs)
        if not any(any(a in chosen.space.axes for a in self.typing.flat(x)) for x in tensors(n)):
            sizes = self.kept_sizes(n, chosen.space.axes)
            twin = self.call(aten.expand.default, twin, [self._count_node(chosen), *[self.size(s) for s in sizes]])
        return twin

    def _padded_dropout(self, n: fx.Node, chosen: RowSet) -> fx.Node:
        """Draw what eager draws, for every row, and use what belongs to ours."""
        x: Any = n.args[0]
        twin = self.packed(x, chosen)
        ones = self.call(aten.new_ones.default, twin, [self.size(s) for s in shape(n)])
        drawn = self.call(n.target, ones, *n.args[1:], **n.kwargs)
        flat, axes = self.typing.flat(n), chosen.space.axes
        order = [*axes, *[a for a in flat if a not in axes]]
        if flat != order:
            drawn = self.reshape(drawn, [self.typing.axes.size(a) for a in flat])
            drawn = self.call(aten.permute.default, drawn, [flat.index(a) for a in order])
        drawn = self.reshape(drawn, [-1, *self.kept_sizes(n, axes)])
        return self.call(aten.mul.Tensor, twin, self.call(GATHER, drawn, self.rows(chosen)))

    def _piece(self, n: fx.Node, chosen: RowSet) -> fx.Node:
        source, index = n.args
        assert isinstance(source, fx.Node)
        x: Any = source.args[0]
        if op(source) in SPLITS and op(source) != "unbind":
            at = dim_of(source)
            if any(a in chosen.space.axes for a in self.typing.atoms(x)[at]):  # blocks of a flattened stack
                return self.call(aten.select.int, self.packed(x, chosen), self.position(x, at, chosen), index)
        key = (source, chosen)
        if key not in self._twins:
            args = list(source.args)
            place = list(source.target._schema.arguments)  # type: ignore[union-attr]
            names = [a.name for a in place]
            at = self.position(x, dim_of(source) if arg(source, "dim") is not None else 0, chosen)
            args[0] = self.packed(x, chosen)
            kwargs = {k: v for k, v in source.kwargs.items() if k != "dim"}
            where = names.index("dim")
            while len(args) < where:
                args.append(place[len(args)].default_value)
            args[where : where + 1] = [at]
            self._twins[key] = self.call(source.target, *args, **kwargs)
        return self.call(operator.getitem, self._twins[key], index)

    # --- rows that move ----------------------------------------------------------------------------

    def moved(self, n: fx.Node, move: Move, chosen: RowSet) -> fx.Node:
        """Gather the rows of a result from its parts."""
        axes = move.out.axes
        sizes = self.kept_sizes(n, axes)
        arrays, homes = [], []
        for x, relation in move.parts:
            home = self._home.get(x)
            if home is not None and home.space == relation.into:
                twin = self._twins[x, home]
            else:
                home, twin = None, self.flat_rows(x, relation.into.axes)
                self._note_entry(x)
            arrays.append(self.reshape(twin, [-1, *sizes]) if self.kept_sizes(x, relation.into.axes) != sizes else twin)
            homes.append(home)
            self._needs_relation(relation)
            if home is not None:
                self._needs(home)
        relations = [r for _, r in move.parts]

        def recipe(r: Rows) -> torch.Tensor:
            rows = r.rows(chosen)
            out, start = torch.full_like(rows, -1), 0
            for relation, home in zip(relations, homes, strict=True):
                there = relation.index(r.batch)[rows]
                hit = there >= 0
                local = there[hit]
                out[hit] = start + (local if home is None else r.found(home, local))
                total, columns = r.batch.extent(relation.into)
                start += total * columns if home is None else r.size(home)
            return out.where(out >= 0, start)

        if op(n) in ("constant_pad_nd", "pad"):
            arrays.append(self.call(aten.new_full.default, arrays[0], [1, *[self.size(s) for s in sizes]], move.fill))
        source = arrays[0] if len(arrays) == 1 else self.call(aten.cat.default, arrays)
        index = self.per_row("moved", ("moved", n, chosen), chosen, recipe)
        return self.call(GATHER, source, index)

    def _note_entry(self, x: fx.Node) -> None:
        if x.op == "placeholder" and tensor(x).is_floating_point() and x not in self.an.meanings.tainted:  # type: ignore[union-attr]
            self._entries[self.placeholders.index(x)] = x.name

    # --- exits -------------------------------------------------------------------------------------

    def _exit(self, n: fx.Node) -> fx.Node | None:
        """Dense results of ops that read packed rows."""
        if n.op != "call_function":
            return None
        an = self.an
        if an.needs_shape_only(n):
            value: Any = tensor(n)
            sizes = [self.size(s) for s in shape(n)]
            return self.call(aten.full.default, sizes, LIKE[op(n)], dtype=value.dtype, device=value.device)
        if n in an.attentions:
            a = an.attentions[n]
            everything = self.set_of(a.queries, None)
            return self.padded(self.attention(a, everything), n, a.queries)
        rows = an.loss_rows(n)
        if rows is not None:
            return self._loss(n, rows)
        if op(n) in ("index", "index_select"):
            predicate = an.moves.kept_rows(n)
            if predicate is not None:
                space = an.space_of(n.args[0])
                assert space is not None
                return self._counted(n, n.args[0], space, an.rows_where(space, [predicate]))  # type: ignore[arg-type]
        if op(n) == "getitem" and op(n.args[0]) == "fbgemm::dense_to_jagged" and n.args[1] == 0:
            return self._jagged(n)
        if n in an.pooled:
            return self._pooled(n)
        if an.sums_columns(n):
            return self._summed(n)
        move = an.move_of(n)
        if move is not None and move.narrows and any(x in self._home for x, _ in move.parts):
            return self.padded(self.moved(n, move, self.set_of(move.out, None)), n, move.out)
        return None

    def _counted(self, n: fx.Node, x: fx.Node, space: Space, terms: Terms) -> fx.Node:
        """Rows of a value as the model's own tensor, whose size is their number."""
        self.seen_sizes.append(n)
        return self.packed(x, self.set_of(space, terms, exact=True))

    def _loss(self, n: fx.Node, rows: Terms) -> fx.Node:
        space = self.an.space_of(n.args[0])
        assert space is not None
        chosen = self.set_of(space, rows)
        scores, target = (self.packed(x, chosen) for x in n.args[:2])  # type: ignore[arg-type]
        dims = len(self.kept(n.args[1], space.axes))  # type: ignore[arg-type]
        target = self._without_dummies(target, chosen, arg(n, "ignore_index"), dims)
        return self.call(n.target, scores, target, *n.args[2:], **n.kwargs)

    def _jagged(self, n: fx.Node) -> fx.Node | None:
        source: Any = n.args[0]
        x, offsets = source.args[0], self.typing.offsets(source.args[1][0])
        space = self.an.space_of(x)
        if space is None or not self.an.is_jagged(space, offsets):
            return None
        return self._counted(n, x, space, self.an.rows_where(space, [Within(offsets)]))

    def _summed(self, n: fx.Node) -> fx.Node:
        """A sum or mean over columns of a value that is zero on the rows that were left out."""
        x: Any = n.args[0]
        chosen = self._home[x] if x in self._home else self.home(x)
        axes, gone = chosen.space.axes, reduced_dims(n)
        lost = {a for d in gone for a in self.typing.atoms(x)[d]}
        whole = set(chosen.space.sequence) <= lost
        y = self._silenced(x, chosen) if whole and chosen.rounded else self.packed(x, chosen)
        others = [self.position(x, d, chosen) for d, _ in self.kept(x, axes) if d in gone]
        dtype = {"dtype": arg(n, "dtype")} if arg(n, "dtype") is not None else {}
        if others:
            y = self.call(aten.sum.dim_IntList, y, others, **dtype)
        if whole:
            y = self.call(aten.sum.dim_IntList, y, [0], **dtype)
        else:
            y = self.call(aten.to.dtype, y, dtype["dtype"]) if dtype else y
            y = self._scattered(y, chosen, chosen.space.sequence)
        if op(n) == "mean":
            y = self.call(aten.div.Tensor, y, self.size(product(shape(x)[d] for d in gone)))
        if whole:
            return self.reshape(y, shape(n))
        return self.padded(y, n, Space(chosen.space.sequence))

    def _silenced(self, x: fx.Node, chosen: RowSet) -> fx.Node:
        """A value that is zero on dummy rows. Of a loss times its weight the weight is: `fuse-loss` knows such sums."""
        dims = len(self.kept(x, chosen.space.axes))
        sides: list[Any] = [a for a in x.args[:2] if is_tensor(a)] if op(x) == "mul" else []
        weights = [a for a in sides if a not in self.an.meanings.tainted and self._one_per_row(a, x, chosen)]
        if len(sides) == 2 and len(weights) == 1:
            other = sides[1 - sides.index(weights[0])]
            share = self._without_dummies(self.packed(weights[0], chosen), chosen, 0, 0)
            share = self.reshape(share, [-1, *[1] * dims]) if dims else share
            return self.call(x.target, self.operand(other, x, chosen), share)
        if dims or not tensor(x).is_floating_point():  # type: ignore[union-attr]
            return self._without_dummies(self.packed(x, chosen), chosen, 0, dims)
        return self.call(
            aten.mul.Tensor, self.packed(x, chosen), self.call(aten.logical_not.default, self.dummies(chosen))
        )

    def _one_per_row(self, x: fx.Node, like: fx.Node, chosen: RowSet) -> bool:
        axes = chosen.space.axes
        return not self.kept(x, axes) and any(a in axes for a in self.typing.flat(x)) and rank_of(x) == rank_of(like)

    def _pooled(self, n: fx.Node) -> fx.Node:
        pool = self.an.pooled[n]
        left, right = pool.left, pool.right
        chosen = self.set_of(pool.space, self.an.rows_where(pool.space, pool.support))
        axes = pool.space.axes
        p, v, out = pool.equation

        def letters(label: str, x: fx.Node) -> str:
            return "T" + "".join(label[d] for d, _ in self.kept(x, axes))

        row = "".join(c for c, d in zip(out, self.typing.atoms(n), strict=True) if not set(d) & set(axes))
        equation = f"{letters(p, left)},{letters(v, right)}->T{row}"
        y = self.call(aten.einsum.default, equation, [self.packed(left, chosen), self.packed(right, chosen)])
        return self.padded(self._scattered(y, chosen, pool.space.sequence), n, Space(pool.space.sequence))

    # --- attention ---------------------------------------------------------------------------------

    def attention(self, a: Attention, queries: RowSet) -> fx.Node:
        keys = self._keys(a)
        q = self._heads(a.query, queries, a.heads, a.depth)
        k = self._heads(a.key, keys, a.heads, a.depth)
        v = self._heads(a.value, keys, a.heads, a.value_depth)
        q, k, v = self._one_dtype(a, q, k, v)
        valid = self._key_valid(a, keys)
        mask = self._pair_mask(a)
        bias = self.biases.of(a, queries, keys)
        if a.activation == "softmax" and not a.zero_when_blind and (a.predicates or a.bounded or a.masks or a.required):
            roles = tuple(self.an.pair_roles(a, m) or "" for m in a.masks)
            self._checks.append(SeesKey(a, queries, keys, roles, str(line_of(a.node) or "")))
            self.need(*(p.node for p in (*a.predicates, *a.required)), *(m.node for m in a.masks))
        seed = (
            self.call(aten.randint.low, 0, 2**31 - 1, [1], dtype=torch.int64, device=torch.device("cpu"))
            if a.dropout
            else None
        )
        pair = self.call(
            torch.ops.turbogr.jagged_attention.default, q, k, v, self.query_offsets(queries), self.offsets(keys),
            self.columns(queries), self.columns(keys), valid, mask, *bias, seed,
            a.activation, a.scale, a.post_scale, a.least, a.most, a.dropout,
        )  # fmt: skip
        pair.meta[PAIRS] = (self.pairs(queries, keys), None)
        out = self.call(operator.getitem, pair, 0)
        if self._dtype(a) != tensor(a.node).dtype:  # type: ignore[union-attr]
            out = self.call(aten._to_copy.default, out, dtype=tensor(a.node).dtype)  # type: ignore[union-attr]
        out = self._from_heads(out, a, queries)
        for divisor in a.divisors:
            out = self.call(aten.div.Tensor, out, divisor)
        if a.query_predicates:
            shown = self.holding(queries, a.query_predicates)
            shown = self.reshape(shown, [-1, *[1] * len(self.kept(a.node, queries.space.axes))])
            out = self.call(aten.mul.Tensor, out, shown)
        self.kept_attentions.append(a.node)
        return out

    def _dtype(self, a: Attention) -> torch.dtype:
        """The widest of the operands: the kernel takes one type, and casts in between are for precision."""
        found = [tensor(x).dtype for x in (a.query, a.key, a.value)]  # type: ignore[union-attr]
        return torch.promote_types(torch.promote_types(found[0], found[1]), found[2])

    def _one_dtype(self, a: Attention, *packed: fx.Node) -> list[fx.Node]:
        wide = self._dtype(a)
        cast = [tensor(x).dtype != wide for x in (a.query, a.key, a.value)]  # type: ignore[union-attr]
        return [self.call(aten._to_copy.default, x, dtype=wide) if c else x for x, c in zip(packed, cast, strict=True)]

    def pairs(self, queries: RowSet, keys: RowSet) -> sympy.Symbol:
        """The number of pairs of query and key, which only a batch knows."""
        symbol = sympy.Symbol(f"pairs_{queries.number}_{keys.number}", positive=True, integer=True)
        self.pair_counts[symbol] = (queries, keys)
        return symbol

    def _keys(self, a: Attention) -> RowSet:
        return self.set_of(a.keys, self.an.keys_of(a))

    def _key_valid(self, a: Attention, keys: RowSet) -> fx.Node | None:
        """Needed only where the kept keys may hold one that the mask removes."""
        if not a.predicates or keys.terms == self.an.rows_where(a.keys, a.predicates):
            return None
        return self.holding(keys, a.predicates)

    def _heads(self, x: fx.Node, chosen: RowSet, heads: tuple[int, ...], depth: tuple[int, ...]) -> fx.Node:
        """(rows, heads, depth)."""
        axes = chosen.space.axes
        y = self.packed(x, chosen)
        rest = [z for z in self.typing.flat(x) if z not in axes]
        mine = [z for z in heads if z in rest]
        order = [*mine, *depth]
        if sorted(rest) != sorted(order):
            raise PassError(f"cannot lay out %{x} as rows, heads and depth", node=x.name)
        if rest != order:
            y = self.reshape(y, [-1, *[self.typing.axes.size(z) for z in rest]])
            y = self.call(aten.permute.default, y, [0, *[1 + rest.index(z) for z in order]])
        if mine and len(mine) != len(heads):
            full = [self.typing.axes.size(z) if z in mine else 1 for z in heads]
            wide = [self.typing.axes.size(z) for z in heads]
            tail = [self.typing.axes.size(z) for z in depth]
            y = self.call(
                aten.expand.default,
                self.reshape(y, [-1, *full, *tail]),
                [-1, *map(self.size, wide), *map(self.size, tail)],
            )
            mine = list(heads)
        return self.reshape(y, [-1, self.typing.size_of(mine), self.typing.size_of(depth)])

    def _from_heads(self, out: fx.Node, a: Attention, queries: RowSet) -> fx.Node:
        axes = queries.space.axes
        rest = [z for z in self.typing.flat(a.node) if z not in axes]
        order = [*a.heads, *a.value_depth]
        if rest != order:
            out = self.reshape(out, [-1, *[self.typing.axes.size(z) for z in order]])
            out = self.call(aten.permute.default, out, [0, *[1 + order.index(z) for z in rest]])
        return self.reshape(out, [-1, *self.kept_sizes(a.node, axes)])

    def four_dims(self, a: Attention, pair: Pairs) -> fx.Node:
        """A tensor of pairs as (sequences or 1, heads or 1, queries or 1, keys or 1)."""
        x, node = self.dense(pair.node), pair.node
        groups: dict[str, list[int]] = {"s": [], "h": [], "q": [], "k": []}
        axes: list[int] = []
        sizes: list[Size] = []
        at = 0
        for i, dim in enumerate(self.typing.atoms(node)):
            for axis in dim:
                role = "q" if i == pair.query else "k" if i == pair.key else "s" if axis in a.keys.sequence else "h"
                groups[role].append(at)
                axes.append(axis)
                sizes.append(self.typing.axes.size(axis))
                at += 1
        groups["h"].sort(key=lambda k: a.heads.index(axes[k]))
        order = [k for role in "shqk" for k in groups[role]]
        if order != sorted(order):
            x = self.call(aten.permute.default, self.reshape(x, sizes), order)
        whole = [product(sizes[k] for k in groups[role]) for role in "shqk"]
        return self.reshape(x, whole) if shape(node) != whole or order != sorted(order) else x

    def _pair_mask(self, a: Attention) -> fx.Node | None:
        out: fx.Node | None = None
        for pair in a.masks:
            x = self.four_dims(a, pair)
            if pair.keeps == "false":
                x = self.call(aten.logical_not.default, x)
            elif pair.keeps == "additive":
                x = self.call(aten.gt.Scalar, x, MINUS_INFINITY / 2)
            elif tensor(pair.node).dtype != torch.bool:  # type: ignore[union-attr]
                x = self.call(aten.ne.Scalar, x, 0)
            out = x if out is None else self.call(aten.logical_and.default, out, x)
        return out

    def _promised(self) -> dict[RowSet, Size]:
        """Row counts that the graph was made for: those of rows the caller has packed."""
        counts = ((s, c) for s, c in self._counts.items() if s.terms is not None)
        return {s: size(c) for s, c in counts if isinstance(c, int) or c.node.has_hint()}

    # --- the program -------------------------------------------------------------------------------

    def program(self, original: fx.Graph, copies: dict[fx.Node, fx.Node]) -> Program:
        """What the prologue runs; `copies` leads to the nodes of the graph as it was."""
        self.need(*self.an.meanings.speculations)
        for chosen in self._sets.values():
            self._needs(chosen)
        for node, support in self.an.softmaxes.items():
            space = self.an.space_of(node)
            if node in self.an.wanted and space is not None and op(node) != "_safe_softmax":
                counted = RowSet(-1, space, self.an.rows_where(space, support))
                self._needs(counted)
                self._checks.append(HasRow(counted, str(line_of(node) or "")))
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
            subgraph(original, [copies[n] for n in order]), order, self.typing, size_symbols(self.placeholders),
            self._recipes, self._checks, list(self.an.meanings.speculations.values()), list(self._sets.values()),
            list(self._entries.items()), self._promised(), self.capacity,
        )  # fmt: skip
        for node in self._inputs.values():
            node.meta["turbogr_provider"] = program.provider(node.name)
        return program


GATHER = torch.ops.turbogr.gather_rows.default
SCATTER = torch.ops.turbogr.scatter_rows.default

Rule = Callable[[Emitter, fx.Node, RowSet], fx.Node]
_RULES: dict[str, Rule] = {}


def emits(*names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


@emits("permute", "transpose", "t", "swapaxes")
def _permute(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    rank = rank_of(n)
    if op(n) == "permute":
        order = [i % rank for i in arg(n, "dims")]
    else:
        order = list(range(rank))
        i, j = swapped(n)
        order[i], order[j] = order[j], order[i]
    kept = [d for d, _ in e.kept(x, chosen.space.axes)]
    places = [kept.index(d) for d in order if d in kept]
    y = e.packed(x, chosen)
    return y if places == sorted(places) else e.call(aten.permute.default, y, [0, *[1 + p for p in places]])


@emits("expand", "broadcast_to", "expand_as", "repeat", "tile")
def _expand(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    axes = chosen.space.axes
    sizes = e.kept_sizes(n, axes)
    y = e.packed(x, chosen)
    mine = dict(e.kept(x, axes))
    offset = rank_of(n) - rank_of(x)
    want = [mine.get(d - offset, 1) for d, _ in e.kept(n, axes)]
    if e.kept_sizes(x, axes) != want:
        y = e.reshape(y, [-1, *want])
    if want == sizes:
        return y
    if all(w == s or w == 1 for w, s in zip(want, sizes, strict=True)):
        return e.call(aten.expand.default, y, [-1, *[e.size(s) for s in sizes]])
    times = [1, *[s // w if isinstance(s, int) and isinstance(w, int) else 1 for w, s in zip(want, sizes, strict=True)]]
    return e.call(aten.repeat.default, y, times)


@emits(
    *sorted(VIEWS - {"permute", "transpose", "t", "swapaxes", "expand", "broadcast_to", "expand_as", "repeat", "tile"})
)
def _view(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    y, sizes = e.packed(x, chosen), e.kept_sizes(n, chosen.space.axes)
    # Whole atoms move only in order: a reshape of the padded value is one of the rows.
    return y if sizes == e.kept_sizes(x, chosen.space.axes) else e.reshape(y, [-1, *sizes])


@emits("repeat_interleave")
def _repeat_interleave(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    return e.call(n.target, e.packed(x, chosen), arg(n, "repeats"), e.position(x, dim_of(n), chosen))


@emits("layer_norm", "rms_norm")
def _norm(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    return e.call(n.target, e.packed(n.args[0], chosen), *n.args[1:], **n.kwargs)  # type: ignore[arg-type]


@emits("softmax", "log_softmax", "_softmax", "_safe_softmax", "cumsum", "cumprod", "select", "slice", "narrow",
       "logcumsumexp", "index_select", "argsort")  # fmt: skip
def _along(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    y = e.packed(x, chosen)
    if op(n) in ("slice", "narrow") and e.typing.atoms(n) == e.typing.atoms(x):
        return y
    return e.call(n.target, y, e.position(x, dim_of(n), chosen), *n.args[2:], **n.kwargs)


@emits("sum", "mean", "amax", "amin", "any", "all", "prod", "logsumexp", "linalg_norm", "linalg_vector_norm", "norm",
       "std", "var", "argmax", "argmin")  # fmt: skip
def _reduced(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    names = [a.name for a in n.target._schema.arguments]  # type: ignore[union-attr]
    at = names.index("dim")
    where: Any = [e.position(x, d, chosen) for d in reduced_dims(n)]
    if not isinstance(arg(n, "dim"), (list, tuple)):
        where = where[0]
    args = [e.packed(x, chosen), *n.args[1:]]
    while len(args) <= at:
        args.append(arg(n, names[len(args)]))
    args[at] = where
    return e.call(n.target, *args, **{k: v for k, v in n.kwargs.items() if k != "dim"})


@emits("cat", "concat", "stack")
def _cat(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    parts: Any = n.args[0]
    at, axes = dim_of_cat(n), chosen.space.axes
    twins = [e.packed(p, chosen) for p in parts]
    if op(n) == "stack":
        place = 1 + sum(1 for d, _ in e.kept(n, axes) if d < at)
        return e.call(aten.stack.default, twins, place)
    if any(a in axes for a in e.typing.atoms(n)[at]):  # equal parts one after the other, beside rows
        place = 1 + sum(1 for d, _ in e.kept(n, axes) if d < at)
        return e.call(aten.stack.default, twins, place)
    return e.call(aten.cat.default, twins, e.position(parts[0], at, chosen))


@emits("linear")
def _linear(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    return e.call(n.target, e.packed(n.args[0], chosen), *n.args[1:], **n.kwargs)  # type: ignore[arg-type]


@emits("matmul", "mm", "bmm")
def _matmul(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x, y = n.args[:2]
    other = e.packed(y, chosen) if not e.an.rowwise.free(y, chosen.space) else y  # type: ignore[arg-type]
    return e.call(aten.matmul.default, e.packed(x, chosen), other)  # type: ignore[arg-type]


@emits("addmm")
def _addmm(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    added, x, y = n.args[:3]
    return e.call(n.target, e.operand(added, n, chosen), e.packed(x, chosen), y, **n.kwargs)  # type: ignore[arg-type]


@emits("einsum")
def _einsum(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    labels = einsum_labels(n)
    assert labels is not None
    inputs, out = labels
    axes = chosen.space.axes
    texts, values = [], []
    operands: Any = n.args[1]
    for label, x in zip(inputs, operands, strict=True):
        if e.an.rowwise.free(x, chosen.space):
            texts.append(label)
            values.append(x)
            continue
        texts.append("T" + "".join(label[d] for d, _ in e.kept(x, axes)))
        values.append(e.packed(x, chosen))
    row = "T" + "".join(c for c, d in zip(out, e.typing.atoms(n), strict=True) if not set(d) & set(axes))
    return e.call(aten.einsum.default, f"{','.join(texts)}->{row}", values)


@emits("embedding")
def _embedding(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    return e.call(n.target, n.args[0], e.packed(n.args[1], chosen), *n.args[2:], **n.kwargs)  # type: ignore[arg-type]


@emits("turbogr::sharded_lookup")
def _sharded_lookup(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    return e.call(n.target, *n.args[:2], e.packed(n.args[2], chosen), *n.args[3:])  # type: ignore[arg-type]


@emits("one_hot")
def _one_hot(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    return e.call(n.target, e.packed(n.args[0], chosen), *n.args[1:])  # type: ignore[arg-type]


@emits("gather", "take_along_dim")
def _gather(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    index = arg(n, "index") or arg(n, "indices")
    return e.call(aten.gather.default, e.packed(x, chosen), e.position(x, dim_of(n), chosen), e.packed(index, chosen))


@emits("index")
def _index(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """A table indexed by row values."""
    indices: Any = n.args[1]
    rank = max(rank_of(i) for i in indices)
    widest = next(i for i in indices if rank_of(i) == rank)
    packed = []
    for i in indices:
        packed.append(e.operand(i, widest, chosen) if i is not widest else e.packed(i, chosen))
    return e.call(n.target, n.args[0], packed)


@emits("conv1d")
def _conv1d(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    """A convolution of one column is a linear layer."""
    weight = e.call(aten.squeeze.dim, n.args[1], 2)
    bias = [arg(n, "bias")] if arg(n, "bias") is not None else []
    return e.call(aten.linear.default, e.packed(n.args[0], chosen), weight, *bias)  # type: ignore[arg-type]


@emits("cross_entropy_loss", "nll_loss", "nll_loss_nd")
def _cross_entropy(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    scores, target = (e.packed(x, chosen) for x in n.args[:2])  # type: ignore[arg-type]
    return e.call(n.target, scores, target, *n.args[2:], **n.kwargs)


@emits("binary_cross_entropy_with_logits", "binary_cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss",
       "huber_loss", "kl_div", "soft_margin_loss")  # fmt: skip
def _loss(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    return e.pointwise(n, chosen)


def emitted_ops() -> set[str]:
    return set(_RULES)
