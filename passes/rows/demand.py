"""Which rows of a value can influence a result.

One sweep from the outputs back. A value is dead, or demanded on a set of rows (a union of terms), or entirely. Demand
shrinks where an op reads few rows (a gather, `ignore_index`, keys under a mask, a product with zeros) and passes
through row-wise ops unchanged. An op without a rule demands everything of its operands: too much is only slow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import fx

from ...graph.nodes import tensor
from .axes import Typing, einsum_labels, reduced_dims
from .meaning import Holds, Meanings, OneHot, Predicate, Two, Within
from .moves import RESIZING, Move, Moves
from .ops import LIKE, SPLITS, arg, dim_of, is_tensor, op, rank_of, shape, size_symbols
from .peeling import Attention, Recognizer, Refused
from .rowwise import Rowwise
from .sets import Holding, Read, SeenThrough, Terms, seen
from .spaces import Projected, Space
from .zeros import Support, Zeros


class Demand(Enum):
    ALL = "all rows"


ALL = Demand.ALL
Wanted = Demand | Terms


@dataclass(frozen=True)
class Missed:
    """A place where rows could have been left out and were not."""

    node: fx.Node
    id: str
    text: str
    hint: str = ""


@dataclass(frozen=True)
class Pooled:
    """A product that contracts the columns of two values, one of which is zero on pads."""

    space: Space
    left: fx.Node
    right: fx.Node
    equation: tuple[str, str, str]  # letters of the operands and of the result
    support: Support


@dataclass
class DemandAnalysis:
    graph: fx.Graph
    typing: Typing
    meanings: Meanings
    zeros: Zeros
    unspecified_outputs: bool = False
    refused: frozenset[fx.Node] = frozenset()  # attentions that are better left padded
    alike: frozenset[Terms] = frozenset()  # sets that are as large as the keys they are among, in the batch seen
    missed: list[Missed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._spaces: dict[fx.Node, Space | None] = {}
        self._moves: dict[fx.Node, Move | None] = {}
        self._mixed: dict[tuple[fx.Node, Space], str | None] = {}
        self._called_valid: dict[Space, Terms] = {}
        self._symbols = set(size_symbols(self.graph.find_nodes(op="placeholder")))
        self.spaces = self._find_spaces()
        self.rowwise = Rowwise(self.typing, self.space_of)
        self.moves = Moves(self.typing, self.meanings, self.space_of)
        self.attentions: dict[fx.Node, Attention] = {}
        self.pooled: dict[fx.Node, Pooled] = {}
        self.softmaxes: dict[fx.Node, Support] = {}
        self._recognize()
        self.wanted: dict[fx.Node, Wanted] = {}
        self._key_terms: set[Any] = set()
        self._merged: dict[Space, Terms] = {}
        self._body_keys: set[Any] = set()  # key terms of the sweep before
        self._keys_of: dict[fx.Node, Terms] = {}
        self._settle()
        self.attentions = {n: a for n, a in self.attentions.items() if n in self._keys_of}  # others stay as they are

    # --- row spaces --------------------------------------------------------------------------------

    def _find_spaces(self) -> list[Space]:
        pairs: set[int] = set()
        seeds: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        for node in self.graph.nodes:
            if is_tensor(node):
                flat = self.typing.flat(node)
                pairs |= {a for a in flat if flat.count(a) > 1}
                seeds += self._seeds(node)
        for sequence, column, _ in self.typing.jagged.values():
            seeds.append((tuple(self.typing.axes.atoms(sequence)), tuple(self.typing.axes.atoms(column))))
        found: dict[frozenset[int], Space] = {}
        for first, second in seeds:
            axes = (*first, *second)
            if not first or len(set(axes)) != len(axes) or not all(self._sized(a) for a in axes):
                continue
            turned = set(first) & pairs and not set(second) & pairs and second
            space = Space(second, first) if turned else Space(first, second)
            found.setdefault(frozenset(axes), space)
        self._split_columns(found)
        self._follow_moves(found)
        return list(found.values())

    def _split_columns(self, found: dict[frozenset[int], Space]) -> None:
        """Where each row became several (item and action, one after the other), pairs show what a column is."""
        for node in self.graph.nodes:
            dims = [tuple(d) for d in self.typing.atoms(node) if len(d) > 1] if is_tensor(node) else []
            for column in {d for d in dims if dims.count(d) > 1}:
                for space in list(found.values()):
                    if set(space.column) < set(column) and space.column and not set(space.sequence) & set(column):
                        finer = Space(space.sequence, column)
                        found.setdefault(frozenset(finer.axes), finer)

    def _sized(self, axis: int) -> bool:
        """Is the size known before the graph runs?"""
        value = self.typing.axes.size(axis)
        return value > 0 if isinstance(value, int) else value.free_symbols <= self._symbols

    def _seeds(self, node: fx.Node) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Whatever can narrow demand says which dims are rows."""
        meaning = self.meanings.of(node)
        if isinstance(meaning, Two):
            for literal in meaning.literals:
                if isinstance(literal, Holds):
                    yield from self._plane(literal.predicate.node)
        name = op(node)
        if name in ("cross_entropy_loss", "nll_loss", "nll_loss_nd"):
            if not tensor(node.args[1]).dtype.is_floating_point:  # type: ignore[union-attr]
                yield from self._plane(node.args[1], single=self._ignores(node))
        elif name in ("gather", "select", "index", "take_along_dim") and rank_of(node.args[0]) > 2:
            at = dim_of(node) if name != "index" else 1
            if at == 1:
                atoms = self.typing.atoms(node.args[0])  # type: ignore[arg-type]
                yield tuple(atoms[0]), tuple(atoms[1])
        elif name in ("index_select", "index") and len(self.typing.atoms(node.args[0])[0]) > 1:  # type: ignore[arg-type]
            atoms = tuple(self.typing.atoms(node.args[0])[0])  # type: ignore[arg-type,assignment]
            yield atoms[:1], atoms[1:]  # type: ignore[misc]
        elif name in ("bmm", "matmul") and isinstance(self.meanings.of(node.args[0]), OneHot):
            atoms = self.typing.atoms(node.args[1])  # type: ignore[arg-type]
            yield tuple(atoms[-3]) if len(atoms) > 2 else (), tuple(atoms[-2])
        elif name in ("mul", "multiply"):
            for factor in node.args[:2]:
                weight = self.zeros.weight(factor)
                if weight is not None:
                    yield from self._plane(weight)

    def _ignores(self, loss: fx.Node) -> bool:
        """Did the loss ignore a row of the batch seen? Without padding it rarely does."""
        target: Any = loss.args[1]
        seen = self.meanings.example(target) if target not in self.meanings.tainted else None
        return seen is not None and bool((seen == arg(loss, "ignore_index")).any())

    def _plane(self, node: Any, single: bool = False) -> Iterable[tuple[tuple[int, ...], tuple[int, ...]]]:
        dims = [tuple(d) for d in self.typing.atoms(node) if d]
        if len(dims) == 2:
            yield dims[0], dims[1]
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
                if tuple(mine) == space.column and shared and not set(theirs) & set(space.axes):
                    new = Space(space.sequence, tuple(theirs))
                    found.setdefault(frozenset(new.axes), new)

    def space_of(self, node: Any) -> Space | None:
        """The one row space a value lies in; the finest where spaces are nested."""
        if not is_tensor(node):
            return None
        if node not in self._spaces:
            flat = self.typing.flat(node)
            hits = [s for s in self.spaces if all(flat.count(a) == 1 for a in s.axes)]
            finest = [s for s in hits if not any(o is not s and o.includes(s) for o in hits)]
            self._spaces[node] = finest[0] if len(finest) == 1 else None
        return self._spaces[node]

    def move_of(self, node: fx.Node) -> Move | None:
        if node not in self._moves:
            self._moves[node] = self.moves.of(node)
        return self._moves[node]

    def why_mixed(self, node: fx.Node, space: Space) -> str | None:
        key = (node, space)
        if key not in self._mixed:
            self._mixed[key] = self.rowwise.why_mixed(node, space)
        return self._mixed[key]

    # --- attention and pooling ---------------------------------------------------------------------

    def _recognize(self) -> None:
        recognizer = Recognizer(self.typing, self.meanings, self.space_of)
        for node in self.graph.nodes:
            if is_tensor(node) and op(node) in ("softmax", "_softmax", "_safe_softmax"):
                self._pooling_softmax(node)
        if self.softmaxes:
            self.zeros.propagate()
        for node in self.graph.nodes:
            if not is_tensor(node):
                continue
            try:
                found = recognizer.recognize(node)
            except Refused as why:
                self.missed.append(Missed(why.node, "attention-kept", f"attention stays padded: {why.text}", why.hint))
                continue
            if node in self.refused:
                self._miss(node, "pads-attended", "causal attention without a key mask reads the rows before each row "
                           "that matters, and in the batch seen pads are among them: they influence the result",
                           "mask the padded keys (key_padding_mask), or pad on the right")  # fmt: skip
            elif found is not None and self._in_heads(found):
                self.attentions[node] = found
            elif op(node) in ("matmul", "bmm", "einsum"):
                self._pooling_product(node)

    def _in_heads(self, a: Attention) -> bool:
        """Are queries, keys and values rows of heads, and nothing else?"""
        for x, space, depth in (
            (a.query, a.queries, a.depth),
            (a.key, a.keys, a.depth),
            (a.value, a.keys, a.value_depth),
        ):
            rest = [z for z in self.typing.flat(x) if z not in space.axes]
            if sorted(rest) != sorted([z for z in a.heads if z in rest] + list(depth)):
                self._miss(
                    a.node, "attention-kept", f"attention stays padded: %{x} has dims beside rows, heads and depth"
                )
                return False
        return True

    def _pooling_softmax(self, n: fx.Node) -> None:
        """A softmax over the columns of a masked score."""
        space = self.space_of(n)
        at = arg(n, "dim") % rank_of(n)
        if space is None or not space.column or tuple(self.typing.atoms(n)[at]) != space.column:
            return
        support = self._inside(self.zeros.floor(n.args[0]), space)
        if support:
            self.softmaxes[n] = support
            self.zeros.declare(n, support)

    def _pooling_product(self, n: fx.Node) -> None:
        labels = self._labels(n)
        if labels is None:
            return
        left, right, (p, v, out) = labels
        for x in (left, right):
            space = self.space_of(x)
            support = self._inside(self.zeros.factor(left) | self.zeros.factor(right), space) if space else frozenset()
            if space is None or not space.column or not support:
                continue
            letters = dict(zip(p, self.typing.atoms(left), strict=True)) | dict(
                zip(v, self.typing.atoms(right), strict=True)
            )
            gone = [c for c in dict.fromkeys(p + v) if c not in out]
            if len(gone) != 1 or tuple(letters[gone[0]]) != space.column or gone[0] not in p or gone[0] not in v:
                continue
            both = self.space_of(left) == self.space_of(right) == space
            whole = all(set(d) <= set(space.axes) or not set(d) & set(space.axes) for d in letters.values())
            if both and whole:
                self.pooled[n] = Pooled(space, left, right, (p, v, out), support)
                return

    def _labels(self, n: fx.Node) -> tuple[fx.Node, fx.Node, tuple[str, str, str]] | None:
        """A product as an einsum."""
        if op(n) == "einsum":
            labels = einsum_labels(n)
            if labels is None or len(n.args[1]) != 2:  # type: ignore[arg-type]
                return None
            left, right = n.args[1]  # type: ignore[misc,str-unpack]
            return left, right, (*labels[0], labels[1])  # type: ignore[return-value]
        left, right = n.args[:2]
        if rank_of(left) != rank_of(right) or rank_of(left) < 3:
            return None
        batch = "abcdefgh"[: rank_of(left) - 2]
        return left, right, (f"{batch}xy", f"{batch}yz", f"{batch}xz")  # type: ignore[return-value]

    # --- the sweep ---------------------------------------------------------------------------------

    def _inside(self, support: Support, space: Space) -> Support:
        return frozenset(p for p in support if self._axes(p) <= set(space.axes))

    def _axes(self, predicate: Predicate | Within) -> set[int]:
        return self.zeros.axes(predicate)

    def _support(self, node: fx.Node) -> Support:
        space = self.space_of(node)
        return self._inside(self.zeros.support(node), space) if space is not None else frozenset()

    def rows_where(self, space: Space, predicates: Iterable[Predicate | Within]) -> Terms:
        return frozenset([Holding(space, frozenset(predicates))])

    def give(self, node: Any, wanted: Wanted) -> None:
        """Add to what is wanted of a value."""
        if not isinstance(node, fx.Node):
            return
        if self.space_of(node) is None:
            wanted = ALL
        elif wanted is ALL and node in self.meanings.tainted and self._support(node):  # index arithmetic is cheap
            space = self.space_of(node)
            assert space is not None
            wanted = self.rows_where(space, self._support(node))
        have = self.wanted.get(node)
        if have is not None:
            wanted = ALL if ALL in (have, wanted) else have | wanted  # type: ignore[operator]
        self.wanted[node] = self._with_body(node, wanted)

    def keys_of(self, attention: Attention) -> Terms:
        """Rows that an attention reads as keys."""
        terms = self._keys_of[attention.node]
        body = self._merged.get(attention.keys, frozenset())
        return terms | body if terms & body & self._body_keys else terms

    def _with_body(self, node: fx.Node, wanted: Wanted) -> Wanted:
        """Who wants some of the body gets all of it."""
        if wanted is ALL or node.op != "call_function":
            return wanted
        space = self.space_of(node)
        body = self._merged.get(space, frozenset()) if space is not None else frozenset()
        return wanted | body if wanted & body & self._body_keys or wanted in self.alike else wanted

    def _settle(self) -> None:
        """Sets that contain keys are merged, per space, into one: few sets, and maps between nested ones only.

        What is merged is wanted, so everything before it wants more; where that does not come to rest (rows that are
        shifted in every layer), nothing is merged.
        """
        recognized = list(self.missed)
        for merging in (True, True, True, False):
            self.missed[:] = recognized
            self.wanted, self._key_terms, self._keys_of = {}, set(), {}
            self._sweep()
            merged = self._bodies()
            if merged == self._merged:
                return
            self._merged, self._body_keys = merged if merging else {}, set(self._key_terms)
        self.missed[:] = recognized
        self.wanted, self._key_terms, self._keys_of, self._merged = {}, set(), {}, {}
        self._sweep()

    def _bodies(self) -> dict[Space, Terms]:
        out: dict[Space, Terms] = {}
        for node, wanted in self.wanted.items():
            space = self.space_of(node)
            if node.op != "call_function" or wanted is ALL or space is None:
                continue  # an input is read where it is needed, and computed nowhere
            if wanted & self._key_terms:
                out[space] = out.get(space, frozenset()) | wanted
        return out

    def bodies(self) -> dict[Space, Terms]:
        """The rows that layers share, per space."""
        return dict(self._merged)

    def _sweep(self) -> None:
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                self._outputs(node)
            elif node.op == "call_function" and (node in self.wanted or _has_effect(node)):
                self._propagate(node, self.wanted.get(node, ALL))

    def _outputs(self, node: fx.Node) -> None:
        for x in node.all_input_nodes:
            valid = self._valid(x)
            if valid and not self.unspecified_outputs and x in self.meanings.tainted and not self._support(x):
                text = f"%{x} is returned with its padded rows, which must hold what eager puts there"
                hint = "compile the loss too, or say that nobody reads them: options={'padded_outputs': 'unspecified'}"
                self._miss(x, "padded-output", text, hint)
            self.give(x, valid if valid and self.unspecified_outputs else ALL)

    def _valid(self, x: fx.Node) -> Terms | None:
        """Rows of a value that its author calls valid: keys that count, and rows that a product keeps."""
        space = self.space_of(x)
        if space is None:
            return None
        if space not in self._called_valid:
            known = [a.predicates for a in self.attentions.values() if a.keys == space and a.predicates]
            supports = {self._support(n) for n in self.graph.nodes if is_tensor(n) and self.space_of(n) == space}
            chosen = {p for p in (*known, *supports) if p and {a for q in p for a in self._axes(q)} == set(space.axes)}
            self._called_valid[space] = frozenset(Holding(space, frozenset(p)) for p in chosen)
        return self._called_valid[space] or None

    def _propagate(self, u: fx.Node, d: Wanted) -> None:
        for rule in (self._attention, self._loss, self._kept, self._jagged, self._softmax, self._pool, self._move):
            if rule(u, d):
                return
        space = self.space_of(u)
        if self.needs_shape_only(u):
            return
        if op(u) in SPLITS:
            self._split(u)
            return
        if op(u) == "getitem":
            if space is not None and op(u.args[0]) in SPLITS and self.why_mixed(u, space) is None:
                self.wanted[u.args[0]] = ALL  # type: ignore[index]  # to be visited: it asks for what its pieces want
                return
            self._everything(u)
            return
        if space is None or d is ALL:
            self._everything(u)
            return
        why = self.why_mixed(u, space)
        if why is not None:
            if not any(m.node is u for m in self.missed):
                self._miss(u, "mixes-rows", f"rows stay padded up to here: {why}")
            self._everything(u)
            return
        for x in u.all_input_nodes:
            self.give(x, self.projected(d, space, self.space_of(x)))

    def needs_shape_only(self, u: fx.Node) -> bool:
        """A constant in the shape of a computed value, where that shape is known before the graph runs."""
        if op(u) not in LIKE or u.args[0] not in self.meanings.tainted:
            return False
        return all(isinstance(s, int) or s.free_symbols <= self._symbols for s in shape(u))

    def projected(self, d: Wanted, space: Space, into: Space | None) -> Wanted:
        """Demand on an operand whose rows are those of the result, or coarser."""
        if d is ALL or into is None or into == space:
            return d if into == space else ALL
        if not space.includes(into):
            return ALL
        return frozenset(Read(Projected(space, into), t) for t in d)

    def _everything(self, u: fx.Node) -> None:
        for x in u.all_input_nodes:
            self._blame(u, x)
            self.give(x, ALL)

    def _blame(self, u: fx.Node, x: fx.Node) -> None:
        """Say where rows that the model masks elsewhere are all read."""
        space = self.space_of(x)
        if space is None or x not in self.meanings.tainted or self.wanted.get(x) is ALL or not self._valid(x):
            return
        if self._support(x) or op(u).startswith("sym_") or any(m.node is u for m in self.missed):
            return
        flat = self.typing.flat(u) if is_tensor(u) else []
        if self.space_of(u) is None and len(set(flat)) == len(flat):
            self._miss(u, "mixes-rows", f"{op(u)} reads every row of %{x}, pads included",
                       "if pads should not count, mask them before")  # fmt: skip

    def _miss(self, node: fx.Node, id: str, text: str, hint: str = "") -> None:
        self.missed.append(Missed(node, id, text, hint))

    def _split(self, u: fx.Node) -> None:
        """Pieces are row-wise or columns; each asks for itself."""
        x: Any = u.args[0]
        for piece in u.users:
            wanted, space = self.wanted.get(piece), self.space_of(piece)
            if wanted is None:
                continue
            if wanted is not ALL and space is not None and self.why_mixed(piece, space) is None:
                self.give(x, self.projected(wanted, space, self.space_of(x)))
            elif self.move_of(piece) is None:
                self.give(x, ALL)

    def _attention(self, u: fx.Node, d: Wanted) -> bool:
        a = self.attentions.get(u)
        if a is None:
            return False
        if self.space_of(u) != a.queries:
            d = ALL  # several queries of a sequence, whose result is wanted as a whole
        if d is ALL and a.self_attention:
            return False  # every row is wanted anyway
        keys = self._keys(a, d)
        if keys is None and d is ALL and self.space_of(u) is not None:
            return False
        if keys is None:
            del self.attentions[u]
            text = "attention reads every key: no mask removes padded keys, and they influence the result"
            hint = "mask the padded keys (key_padding_mask, or an additive mask made from the ids)"
            self._miss(u, "pads-attended", text, hint)
            return False
        self._key_terms |= keys
        self._keys_of[u] = keys
        self.give(a.query, d)
        self.give(a.key, keys)
        self.give(a.value, keys)
        for pair in (*a.masks, *a.biases):
            self.give(pair.node, ALL)
        return True

    def _keys(self, a: Attention, d: Wanted) -> Terms | None:
        """Rows that queries in `d` read as keys."""
        predicates: frozenset[Predicate | Within] = a.predicates
        if a.activation == "silu":
            predicates = predicates | self._inside(self.zeros.support(a.value), a.keys)  # zeros add nothing
        if predicates:
            return self.rows_where(a.keys, predicates)
        if a.bounded and a.self_attention and d is not ALL:
            return frozenset(seen(t, a.least, a.most) for t in d)
        if a.masks:
            pair = a.masks[0]
            roles = self.pair_roles(a, pair)
            if roles is not None:
                terms: Iterable[Any] = [None] if d is ALL else d
                return frozenset(SeenThrough(a.keys, pair.node, roles, pair.keeps, a.queries, t) for t in terms)
        return None

    def pair_roles(self, a: Attention, pair: Any) -> str | None:
        """s(equence), h(ead), q(uery), k(ey) or 1 for each dim of a tensor of pairs."""
        roles = ""
        for i, dim in enumerate(self.typing.atoms(pair.node)):
            if i == pair.query:
                roles += "q"
            elif i == pair.key:
                roles += "k"
            elif not dim:
                roles += "1"
            elif tuple(dim) == a.keys.sequence:
                roles += "s"
            elif tuple(dim) == a.heads:
                roles += "h"
            else:
                return None
        return roles

    def _loss(self, u: fx.Node, d: Wanted) -> bool:
        """cross_entropy reads the rows it does not ignore."""
        if op(u) not in ("cross_entropy_loss", "nll_loss", "nll_loss_nd") or rank_of(u) != 0:
            return False
        scores, target = u.args[:2]
        space = self.space_of(scores)
        if space is None or self.space_of(target) != space or not self.meanings.describes_rows(target):  # type: ignore[arg-type]
            return False
        if tensor(target).dtype.is_floating_point or set(self.typing.flat(target)) != set(space.axes):  # type: ignore[union-attr,arg-type]
            return False
        rows = self.rows_where(space, [Predicate(self.meanings.root(target), arg(u, "ignore_index"), False)])  # type: ignore[arg-type]
        self.give(scores, rows)
        self.give(target, rows)
        self.give(arg(u, "weight"), ALL)
        return True

    def loss_rows(self, u: fx.Node) -> Terms | None:
        """Rows that a scalar cross entropy reads, where that is known."""
        if op(u) not in ("cross_entropy_loss", "nll_loss", "nll_loss_nd") or rank_of(u) != 0:
            return None
        wanted = self.wanted.get(u.args[0])  # type: ignore[arg-type]
        space = self.space_of(u.args[0])
        if wanted in (None, ALL) or space is None or space != self.space_of(u.args[1]):
            return None
        return self.rows_where(space, [Predicate(self.meanings.root(u.args[1]), arg(u, "ignore_index"), False)])  # type: ignore[arg-type]

    def _kept(self, u: fx.Node, d: Wanted) -> bool:
        """x[mask] reads the rows of the mask."""
        if op(u) not in ("index", "index_select"):
            return False
        predicate = self.moves.kept_rows(u)
        if predicate is None:
            return False
        space = self.space_of(u.args[0])
        assert space is not None
        self.give(u.args[0], self.rows_where(space, [predicate]))
        return True

    def _jagged(self, u: fx.Node, d: Wanted) -> bool:
        """Hand-packed rows."""
        if op(u) == "getitem" and op(u.args[0]) == "fbgemm::dense_to_jagged" and u.args[1] == 0:
            source: Any = u.args[0]
            offsets = self.typing.offsets(source.args[1][0])
            space = self.space_of(source.args[0])
            if not self.is_jagged(space, offsets):
                return False
            assert space is not None
            self.give(source.args[0], self.rows_where(space, [Within(offsets)]))
            return True
        if op(u) == "fbgemm::jagged_to_padded_dense" and d is not ALL:
            self.give(u.args[0], ALL)
            self.give(arg(u, "offsets")[0], ALL)
            return True
        return False

    def is_jagged(self, space: Space | None, offsets: fx.Node) -> bool:
        if space is None or offsets not in self.typing.jagged or offsets in self.meanings.tainted:
            return False
        sequence, column, _ = self.typing.jagged[offsets]
        atoms = tuple(self.typing.axes.atoms(sequence)), tuple(self.typing.axes.atoms(column))
        return (space.sequence, space.column) == atoms

    def _softmax(self, u: fx.Node, d: Wanted) -> bool:
        support = self.softmaxes.get(u)
        space = self.space_of(u)
        if support is None or d is ALL or space is None:
            return False
        self.give(u.args[0], self.rows_where(space, support))
        return True

    def _pool(self, u: fx.Node, d: Wanted) -> bool:
        """Contraction of columns; or a sum over them, which `give` narrows to where the operand is not zero."""
        pool = self.pooled.get(u)
        if pool is None:
            return False
        rows = self.rows_where(pool.space, pool.support)
        self.give(pool.left, rows)
        self.give(pool.right, rows)
        return True

    def sums_columns(self, u: fx.Node) -> bool:
        """A sum or mean over columns of rows that are demanded only where they are not zero."""
        if op(u) not in ("sum", "mean") or not is_tensor(u.args[0]):
            return False
        space = self.space_of(u.args[0])
        if space is None or self.wanted.get(u.args[0]) in (None, ALL):  # type: ignore[arg-type,operator]
            return False
        gone = {a for d in reduced_dims(u) for a in self.typing.atoms(u.args[0])[d]}  # type: ignore[arg-type]
        left = [a for a in space.axes if a not in gone]
        return set(space.column) <= gone and (not left or tuple(left) == space.sequence)

    def _move(self, u: fx.Node, d: Wanted) -> bool:
        move = self.move_of(u)
        if move is None:
            return False
        if d is ALL and not move.narrows:
            return False
        terms: Iterable[Any] = [None] if d is ALL else d
        for x, relation in move.parts:
            self.give(x, frozenset(Read(relation, t) for t in terms) if self.space_of(x) == relation.into else ALL)
        for x in u.all_input_nodes:
            if x not in [p for p, _ in move.parts]:
                self.give(x, ALL)
        return True


def _has_effect(node: fx.Node) -> bool:
    return node.is_impure()


def named(wanted: Wanted) -> str:
    """Demand as text."""
    return wanted.value if isinstance(wanted, Demand) else " | ".join(sorted(map(str, wanted)))
