"""What is known of a graph before anything is asked of it: computed once, whatever is decided later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .attending import Attention, Attentions
from .attention.language import Refused
from .axes import Typing
from .calls import is_tensor, op
from .hiding import shown
from .meanings import Meanings
from .missed import Missed
from .moves import Move, Moves
from .pooling import SOFTMAXES, MaskedSoftmax, Pooled, masked_softmax, pooling_product
from .rowspaces import RowSpaces
from .rowwise import Rowwise
from .signs import Signs
from .spaces import Space
from .spans import Span
from .telling import Telling
from .zeros import Support, Zeros

FROM_TABLES = ("embedding", "linear")


class Facts:
    """Axes, meanings, zeros, row spaces, attentions and pooling of one graph.

    `example` gives the value of a node that only data determines, on the inputs seen at compile time, or None.
    """

    def __init__(self, graph: fx.Graph, example: Callable[[fx.Node], torch.Tensor | None]) -> None:
        self.graph = graph
        self.typing = Typing(graph)
        self.meanings = Meanings(graph, self.typing, example)
        self.zeros = Zeros(graph, self.typing, self.meanings)
        self.signs = Signs(self.meanings)
        self.rows = RowSpaces(graph, self.typing, self.meanings, self.zeros)
        self._spaces: dict[Any, Space | None] = {}
        self.rowwise = Rowwise(self.typing, self.space_of)
        self.moves = Moves(self.typing, self.meanings, self.space_of, self.rows.is_sized)
        self.attentions: dict[fx.Node, Attention] = {}
        self.softmaxes: dict[fx.Node, MaskedSoftmax] = {}
        self.pooled: dict[fx.Node, Pooled] = {}
        self.missed: list[Missed] = []
        self._moves: dict[fx.Node, Move | None] = {}
        self._spans: dict[fx.Node, Span | None] = {}
        self._mixed: dict[tuple[fx.Node, Space], str | None] = {}
        self._recognise()
        for node, why in self.typing.failures.items():
            text = f"{op(node)} stays padded, because its row rule failed: {why}"
            hint = "this is a fault of turbogr, or of the package that declares the op: please report it"
            self.missed.append(Missed(node, "rule-failed", text, hint))

    def space_of(self, node: Any) -> Space | None:
        if node not in self._spaces:
            self._spaces[node] = self._space_of(node)
        return self._spaces[node]

    def _space_of(self, node: Any) -> Space | None:
        """Where features are rows of a finer space (a mask says so further down), their table makes all of them."""
        finest = self.rows.of(node)
        if finest is None or op(node) not in FROM_TABLES or self.rowwise.why_mixed(node, finest) is None:
            return finest
        coarser = [s for s in self.rows.around(node) if s != finest and finest.includes(s)]
        apart = [s for s in coarser if self.rowwise.why_mixed(node, s) is None]
        return max(apart, key=lambda s: len(s.axes), default=finest)

    def crossing(self) -> frozenset[fx.Node]:
        """Ops whose operands have rows in different orders, and what they return."""
        axes = {a for space in self.rows.found for a in space.axes}
        found = [n for n in self.graph.nodes if self.typing.crossed(n) & axes]
        pieces = [u for n in found for u in n.users if op(u) == "getitem"]
        return frozenset([*found, *pieces])

    def move_of(self, node: fx.Node) -> Move | None:
        if node not in self._moves:
            self._moves[node] = self.moves.of(node)
        return self._moves[node]

    def span_of(self, node: fx.Node) -> Span | None:
        if node not in self._spans:
            space = self.space_of(node)
            self._spans[node] = self.moves.span_of(node, space) if space is not None else None
        return self._spans[node]

    def why_mixed(self, node: fx.Node, space: Space) -> str | None:
        key = (node, space)
        if key not in self._mixed:
            self._mixed[key] = self.rowwise.why_mixed(node, space)
        return self._mixed[key]

    def shown(self, u: fx.Node) -> dict[fx.Node, Support]:
        """Operands of a choice that are chosen in some rows only, and predicates of those rows."""
        space, choices = self.space_of(u), shown(u, self.meanings)
        if space is None or u not in self.meanings.tainted or len({x for x, _ in choices}) != len(choices):
            return {}
        found = {x: self.zeros.inside(predicates, space.axes) for x, predicates in choices if self.space_of(x) == space}
        return {x: predicates for x, predicates in found.items() if predicates and x in self.meanings.tainted}

    def _recognise(self) -> None:
        telling = Telling(self.meanings.known.with_rows(self.rows.found), self.meanings)
        attentions = Attentions(telling, self.space_of)
        values = [n for n in self.graph.nodes if is_tensor(n)]
        for node in values:
            space = self.space_of(node) if op(node) in SOFTMAXES else None
            found = masked_softmax(node, space, telling) if space is not None and space.column else None
            if found is not None:
                self.softmaxes[node] = found
                self.zeros.declare(node, frozenset(found.predicates))
        if self.softmaxes:
            self.zeros.propagate()
        for node in values:
            attention = None
            try:
                attention = attentions.of(node)
            except Refused as why:  # then its weights are numbers like others
                self.missed.append(Missed(why.node or node, "attention-kept", f"attention stays padded: {why}"))
            if attention is not None:
                self.attentions[node] = attention
            elif op(node) in ("matmul", "bmm", "einsum"):
                pooled = pooling_product(node, self.typing, self.zeros, self.space_of)
                if pooled is not None:
                    self.pooled[node] = pooled
                elif self.move_of(node) is None and (weighing := attentions.weighing(node)) is not None:
                    self.attentions[node] = weighing
