"""Which rows of a value can influence a result.

One sweep from the outputs back. A value is dead, or demanded on a set of rows (a union of terms), or entirely. Demand
shrinks where an op reads few rows (a gather, `ignore_index`, keys under a mask, a product with zeros) and passes
through row-wise ops unchanged. An op without a rule demands everything of its operands: too much is only slow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from ...graph.nodes import tensor
from .asking import RULES, asks_by_move, is_jagged
from .attending import Attention
from .calls import LIKE, arg, is_tensor, is_void, op, operand, rank_of, reduced_dims, shape
from .deciding import Keeps, decided
from .declaration import what_it_takes
from .facts import Facts
from .meaning import Predicate, Within
from .missed import Missed
from .moves import Move
from .rowspaces import LOSSES
from .sets import ALL, Demand, Holding, Read, Terms, Wanted, united
from .spaces import Projected, Space
from .spans import Span
from .thinned import at_odds
from .zeros import Support

MOST_TERMS = 12  # of a union: each is evaluated on every batch, and residual layers that shift rows double them


class DemandAnalysis:
    """One answer to what is asked of a graph.

    refused   attentions that are better left padded
    alike     sets that are as large as the keys they are among, in the batch seen
    barriers  nodes whose rule failed: they are computed as captured, as is what lines up rows in different orders
    """

    def __init__(
        self, facts: Facts, unspecified_outputs: bool = False, refused: frozenset[fx.Node] = frozenset(),
        alike: frozenset[Terms] = frozenset(), barriers: frozenset[fx.Node] = frozenset(),
    ) -> None:  # fmt: skip
        self.facts, self.graph, self.typing, self.meanings = facts, facts.graph, facts.typing, facts.meanings
        self.zeros, self.spaces, self.space_of = facts.zeros, facts.rows.found, facts.space_of
        self.moves, self.rowwise = facts.moves, facts.rowwise
        barriers = barriers | facts.crossing()
        self.unspecified_outputs, self.refused, self.alike, self.barriers = (
            unspecified_outputs,
            refused,
            alike,
            barriers,
        )
        self.softmaxes = {n: x for n, x in facts.softmaxes.items() if n not in barriers}
        self.pooled = {n: x for n, x in facts.pooled.items() if n not in barriers}
        self.attentions = {n: x for n, x in facts.attentions.items() if n not in barriers | refused}
        self.missed = list(facts.missed)
        self._called_valid: dict[Space, Terms] = {}
        for node in refused:
            self.miss(node, "pads-attended", "causal attention without a key mask reads the rows before each row "
                       "that matters, and in the batch seen pads are among them: they influence the result",
                       "mask the padded keys (key_padding_mask), or pad on the right")  # fmt: skip
        self.wanted: dict[fx.Node, Wanted] = {}
        self.key_terms: set[Any] = set()
        self._merged: dict[Space, Terms] = {}
        self._body_keys: set[Any] = set()  # key terms of the sweep before
        self.keys_read: dict[fx.Node, Terms] = {}
        self.living: dict[fx.Node, Terms] = {}
        self.gathered: dict[fx.Node, list[tuple[fx.Node, Wanted, Space]]] = {}
        known = list(self.missed)
        self._settle()
        while odd := at_odds({n: self.attentions[n] for n in self.keys_read}, self._runs):
            text = "attention stays padded: the weights that its dropout leaves are read elsewhere, too"
            known += [Missed(node, "attention-kept", text) for node in self.graph.nodes if node in odd]
            self.missed = list(known)
            self.attentions = {n: a for n, a in self.attentions.items() if n not in odd}
            self._settle()
        self.attentions = {n: a for n, a in self.attentions.items() if n in self.keys_read}  # others stay as they are
        self.decisions = decided(self)

    def move_of(self, node: fx.Node) -> Move | None:
        return self.facts.move_of(node) if node not in self.barriers else None

    def span_of(self, node: fx.Node) -> Span | None:
        barred = node in self.barriers or (op(node) == "getitem" and node.args[0] in self.barriers)
        return self.facts.span_of(node) if not barred else None

    def why_mixed(self, node: fx.Node, space: Space) -> str | None:
        why = self.facts.why_mixed(node, space)
        return "its row rule failed" if why is None and node in self.barriers else why

    # --- the sweep ---------------------------------------------------------------------------------

    def support(self, node: fx.Node) -> Support:
        """Predicates of a value's rows outside of which it is zero."""
        space = self.space_of(node)
        return self.zeros.inside(self.zeros.support(node), space.axes) if space is not None else frozenset()

    def rows_where(self, space: Space, predicates: Iterable[Predicate | Within]) -> Terms:
        return frozenset([Holding(space, frozenset(predicates))])

    def give(self, node: Any, wanted: Wanted) -> None:
        """Add to what is wanted of a value."""
        if not isinstance(node, fx.Node):
            return
        self.gathered.pop(node, None)  # more is wanted of it than pairs
        if self.space_of(node) is None:
            wanted = ALL
        elif wanted is ALL and self._is_zero_elsewhere(node):
            space = self.space_of(node)
            assert space is not None
            wanted = self.rows_where(space, self.support(node))
        have = self.wanted.get(node)
        if have is not None:
            wanted = ALL if isinstance(have, Demand) or isinstance(wanted, Demand) else self._united(have | wanted)
        if wanted is not ALL and len(wanted) > MOST_TERMS:
            text = f"rows stay padded up to here: each layer after it asks for other rows, {len(wanted)} sets by now"
            self.miss(node, "rows-scattered", text)
            wanted = ALL
        self.wanted[node] = self._with_body(node, wanted)

    def _united(self, terms: Terms) -> Terms:
        """In fewer terms; those that took keys in have keys."""
        found = united(terms)
        if found != terms and (terms - found) & self.key_terms:
            self.key_terms |= found - terms
        return found

    def _is_zero_elsewhere(self, node: fx.Node) -> bool:
        """Need the value be computed only where it is not zero? Index arithmetic, being cheap, is not left out."""
        return node in self.meanings.tainted and bool(self.support(node)) and not self.facts.signs.matter(node)

    def keys_of(self, attention: Attention) -> Terms:
        """Rows that an attention reads as keys."""
        terms = self.keys_read[attention.node]
        body = self._merged.get(attention.keys, frozenset())
        return self._united(terms | body) if terms & body & self._body_keys else terms

    def _with_body(self, node: fx.Node, wanted: Wanted) -> Wanted:
        """Who wants some of the body gets all of it."""
        if wanted is ALL or node.op != "call_function":
            return wanted
        space = self.space_of(node)
        body = self._merged.get(space, frozenset()) if space is not None else frozenset()
        return self._united(wanted | body) if wanted & body & self._body_keys or wanted in self.alike else wanted

    def _settle(self) -> None:
        """Sets that contain keys are merged, per space, into one: few sets, and maps between nested ones only.

        What is merged is wanted, so everything before it wants more; where that does not come to rest (rows that are
        shifted in every layer), nothing is merged.
        """
        recognized = list(self.missed)
        for merging in (True, True, True, False):
            self.missed[:] = recognized
            self.wanted, self.key_terms, self.keys_read, self.living, self.gathered = {}, set(), {}, {}, {}
            self._sweep()
            merged = self._bodies()
            if merged == self._merged:
                return
            self._merged, self._body_keys = merged if merging else {}, set(self.key_terms)
        self.missed[:] = recognized
        self.wanted, self.key_terms, self.keys_read, self.living, self._merged = {}, set(), {}, {}, {}
        self.gathered = {}
        self._sweep()

    def _bodies(self) -> dict[Space, Terms]:
        out: dict[Space, Terms] = {}
        for node, wanted in self.wanted.items():
            space = self.space_of(node)
            if node.op != "call_function" or wanted is ALL or space is None:
                continue  # an input is read where it is needed, and computed nowhere
            if wanted & self.key_terms:
                out[space] = out.get(space, frozenset()) | wanted
        return out

    def bodies(self) -> dict[Space, Terms]:
        """The rows that layers share, per space."""
        return dict(self._merged)

    def _sweep(self) -> None:
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                self._outputs(node)
            elif node.op == "call_function" and self._runs(node):
                self._propagate(node, self.wanted.get(node, ALL))

    def _runs(self, node: fx.Node) -> bool:
        return node in self.wanted or node.op == "output" or self._must_run(node)

    def _must_run(self, node: fx.Node) -> bool:
        """Has it an effect, though nobody reads it? Not where an attention draws what it would have drawn."""
        return _has_effect(node) and not any(node in self.attentions[a].form.chain for a in self.keys_read)

    def _outputs(self, node: fx.Node) -> None:
        for x in node.all_input_nodes:
            valid = self._valid(x)
            if valid and not self.unspecified_outputs and x in self.meanings.tainted and not self.support(x):
                text = f"%{x} is returned with its padded rows, which must hold what eager puts there"
                hint = "compile the loss too, or say that nobody reads them: options={'padded_outputs': 'unspecified'}"
                self.miss(x, "padded-output", text, hint)
            self.give(x, valid if valid and self.unspecified_outputs else ALL)

    def _valid(self, x: fx.Node) -> Terms | None:
        """Rows of a value that its author calls valid: keys that count, and rows that a product keeps."""
        space = self.space_of(x)
        if space is None:
            return None
        if space not in self._called_valid:
            known = [a.predicates for a in self.attentions.values() if a.keys == space and a.predicates]
            supports = {self.support(n) for n in self.graph.nodes if is_tensor(n) and self.space_of(n) == space}
            chosen = {
                p for p in (*known, *supports) if p and {a for q in p for a in self.zeros.axes(q)} == set(space.axes)
            }
            self._called_valid[space] = frozenset(Holding(space, frozenset(p)) for p in chosen)
        return self._called_valid[space] or None

    def _propagate(self, u: fx.Node, d: Wanted) -> None:
        if u in self.barriers:
            self._everything(u)
            return
        if any(rule(self, u, d) for rule in RULES):
            return
        space = self.space_of(u)
        if self.needs_shape_only(u):
            return
        if isinstance(u.meta.get("val"), (list, tuple)):
            self._split(u)
            return
        if op(u) == "getitem":
            (source,) = u.all_input_nodes
            if space is not None and self.why_mixed(u, space) is None:
                self.wanted[source] = ALL  # to be visited: it asks for what its pieces want
            else:
                self._everything(u)
            return
        if space is None or d is ALL:
            self._everything(u)
            return
        why = self.why_mixed(u, space)
        if why is not None:
            if u in self.meanings.tainted and not any(m.node is u for m in self.missed):
                self.miss(u, "mixes-rows", f"rows stay padded up to here: {why}", what_it_takes(u))
            self._everything(u)
            return
        for x in u.all_input_nodes:
            self.give(x, self.projected(d, space, self.space_of(x)))

    def needs_shape_only(self, u: fx.Node) -> bool:
        """A constant in the shape of a computed value, or a value without elements, where that shape is known before
        the graph runs."""
        if not (op(u) in LIKE and u.args[0] in self.meanings.tainted) and not is_void(u):
            return False
        return all(isinstance(s, int) or s.free_symbols <= self.facts.rows.symbols for s in shape(u))

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
        if self.support(x) or self.facts.shown(x) or op(u).startswith("sym_") or any(m.node is u for m in self.missed):
            return
        flat = self.typing.flat(u) if is_tensor(u) else []
        if self.space_of(u) is None and len(set(flat)) == len(flat):
            self.miss(u, "mixes-rows", f"{op(u)} reads every row of %{x}, pads included",
                       "if pads should not count, mask them before")  # fmt: skip

    def miss(self, node: fx.Node, id: str, text: str, hint: str = "") -> None:
        self.missed.append(Missed(node, id, text, hint))

    def _split(self, u: fx.Node) -> None:
        """Pieces are row-wise or columns; each asks for itself."""
        x, *others = u.all_input_nodes
        for piece in u.users:
            wanted, space = self.wanted.get(piece), self.space_of(piece)
            if wanted is None:
                continue
            if wanted is not ALL and space is not None and self.why_mixed(piece, space) is None:
                for given in (x, *others):
                    self.give(given, self.projected(wanted, space, self.space_of(given)))
                continue
            if not asks_by_move(self, piece, wanted):
                self.give(x, ALL)
            for other in others:
                self.give(other, ALL)

    def rows_of_loss(self, u: fx.Node) -> Terms | None:
        """Rows that a scalar cross entropy reads, where its targets tell."""
        if op(u) not in LOSSES or rank_of(u) != 0:
            return None
        scores, target = u.all_input_nodes[:2]
        space, value = self.space_of(scores), tensor(target)
        if space is None or self.space_of(target) != space or not self.meanings.describes_rows(target):
            return None
        assert value is not None
        if value.dtype.is_floating_point or set(self.typing.flat(target)) != set(space.axes):
            return None
        return self.rows_where(space, [Predicate(self.meanings.root(target), arg(u, "ignore_index"), False)])

    def kept_rows(self, u: fx.Node) -> Keeps | None:
        """Rows of a value that become a tensor of their own."""
        if op(u) in ("index", "index_select"):
            source, predicate = u.all_input_nodes[0], self.moves.kept_rows(u)
            space = self.space_of(source)
            if predicate is None or space is None:
                return None
            return Keeps(source, space, self.rows_where(space, [predicate]))
        if op(u) == "getitem" and op(u.args[0]) == "fbgemm::dense_to_jagged" and u.args[1] == 0:
            packing: Any = u.args[0]
            source, offsets = packing.args[0], self.typing.offsets(packing.args[1][0])
            space = self.space_of(source)
            if space is None or not is_jagged(self, space, offsets):
                return None
            return Keeps(source, space, self.rows_where(space, [Within(offsets)]))
        return None

    def sums_columns(self, u: fx.Node) -> bool:
        """A sum or mean over columns of rows that are demanded only where they are not zero."""
        if op(u) not in ("sum", "mean") or not is_tensor(u.args[0]):
            return False
        space = self.space_of(u.args[0])
        if space is None or self.wanted.get(operand(u)) in (None, ALL):
            return False
        gone = {a for d in reduced_dims(u) for a in self.typing.atoms(operand(u))[d]}
        left = [a for a in space.axes if a not in gone]
        return set(space.column) <= gone and (not left or tuple(left) == space.sequence)

    def lives_on(self, node: fx.Node) -> Terms | None:
        """Rows that an op along rows, or one with results that are, computes."""
        return self.living.get(operand(node) if op(node) == "getitem" else node)


def _has_effect(node: fx.Node) -> bool:
    return node.is_impure()


def named(wanted: Wanted) -> str:
    """Demand as text."""
    return wanted.value if isinstance(wanted, Demand) else " | ".join(sorted(map(str, wanted)))
