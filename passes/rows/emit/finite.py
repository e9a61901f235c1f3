"""Which inputs of a batch must be finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx

from ....graph.nodes import tensor
from ..calls import COPIES, VIEWS, arg, op
from ..demand import DemandAnalysis
from ..meaning import Predicate, Within
from ..program import RowSet
from ..sets import Holding
from .masks import Masks


class FiniteInputs:
    """Inputs that rows which are left out are computed from, unless their pads are replaced before.

    `hiding` are those that hide keys from an activation: -inf is a number behind it, as long as each query sees a key.
    """

    def __init__(self, an: DemandAnalysis) -> None:
        self.an = an
        self.inputs: dict[fx.Node, None] = {}
        self.hiding: dict[fx.Node, None] = {}
        self._masks = Masks(an)
        self._readers: set[fx.Node] = set()
        self._reads_bits = bool(an.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype))

    def behind(self, padded: Iterable[fx.Node], chosen: RowSet | None) -> None:
        """Rows of padded values are left out, among which one may hold what spreads: zero times NaN is NaN in eager.

        What their pads hold comes from inputs.
        """
        for given in self._inputs_behind(padded):
            if not self._is_parameter(given) and not self._selected_away(given, chosen):
                (self.hiding if self._masks.only_hides(given) else self.inputs)[given] = None

    def _is_parameter(self, given: fx.Node) -> bool:
        """What gets gradients is an input all the same where it has sequences, or where it is no model's parameter."""
        if given not in self.an.meanings.tainted or any(
            set(s.sequence) <= set(self.an.typing.flat(given)) for s in self.an.spaces
        ):
            return False
        return self.an.meanings.known.is_parameter(given)

    def beside(self, x: fx.Node, chosen: RowSet) -> None:
        """Padded values are computed from rows of which some are left out, and send gradients back to all of them.

        Those of the rows left out are nothing times what readers multiply with, which NaN in eager would spread.
        """
        todo, beside = list(x.users), set[fx.Node]()
        while todo:
            user = todo.pop()
            if user in self._readers or user in self.an.decisions or user not in self.an.meanings.tainted:
                continue
            self._readers.add(user)
            todo += user.users
            beside.update(user.all_input_nodes)
        self.behind(beside - self._readers - self.an.decisions.keys(), chosen)

    def _inputs_behind(self, padded: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """Floating-point inputs that padded values are computed from; packed ones have been asked for on their own.

        Whole numbers and truth values are finite, whatever they were made of, where nobody reads their bits as floats.
        """
        todo, done = list(padded), set(padded)
        while todo:
            node = todo.pop()
            value = tensor(node)
            if value is not None and not _spreads(value) and not self._reads_bits:
                continue
            if node.op == "placeholder" and value is not None and _spreads(value):
                yield node
            table = arg(node, "weight") if op(node) == "embedding" else None  # rows nobody looks up spread nothing
            todo += [n for n in node.all_input_nodes if n not in done and n not in self.an.decisions and n is not table]
            done.update(todo)

    def _selected_away(self, x: fx.Node, chosen: RowSet | None) -> bool:
        """Are the rows that a set leaves out replaced by zeros before anything is computed from them?"""
        if chosen is None or chosen.terms is None:
            return False
        kept = [t.predicates for t in chosen.terms if isinstance(t, Holding) and t.space == chosen.space]
        return self._only_selected(x, kept)

    def _only_selected(self, x: fx.Node, kept: list[frozenset[Predicate | Within]]) -> bool:
        inside = {n for a in self.an.attentions.values() for n in a.form.chain}
        return all(self._selects(u, x, kept) for u in x.users if u in self.an.wanted or u in inside)

    def _selects(self, user: fx.Node, x: fx.Node, kept: list[frozenset[Predicate | Within]]) -> bool:
        """Does a user of a value read it only where one of these sets of predicates holds?"""
        value = tensor(user)
        if op(user) in VIEWS | COPIES:
            return self._only_selected(user, kept)
        if value is not None and not _spreads(value):
            return True
        mine = {"where": (arg(user, "self"), arg(user, "other")), "masked_fill": (arg(user, "self"),)}.get(op(user), ())
        return x in mine and any(predicates <= self.an.zeros.support(user) for predicates in kept)


def _spreads(value: torch.Tensor) -> bool:
    """May it hold what is not finite?"""
    return value.is_floating_point() or value.is_complex()
