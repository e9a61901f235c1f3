"""Which inputs of a batch must be finite."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ....graph.nodes import tensor
from ....graph.shapes import known
from ..calls import COPIES, VIEWS, arg, op
from ..demand import DemandAnalysis
from ..meaning import Predicate, Within
from ..program import RowSet
from ..sets import Holding

_STILL_HIDES = {"unsqueeze", "expand", "slice", "_to_copy", "to", *COPIES}  # rows of keys stay rows of keys
_SOFTMAXES = ("softmax", "_softmax", "_safe_softmax")
_LEVEL = ("relu", "sigmoid", "tanh", "exp")  # of -inf: a number, with a slope of zero


class FiniteInputs:
    """Inputs that rows which are left out are computed from, unless their pads are replaced before.

    `hiding` are those that hide keys from an activation: -inf is a number behind it, as long as each query sees a key.
    """

    def __init__(self, an: DemandAnalysis) -> None:
        self.an = an
        self.inputs: dict[fx.Node, None] = {}
        self.hiding: dict[fx.Node, None] = {}
        self._readers: set[fx.Node] = set()
        self._reads_bits = bool(an.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype))

    def behind(self, padded: Iterable[fx.Node], chosen: RowSet | None) -> None:
        """Rows of padded values are left out, among which one may hold what spreads: zero times NaN is NaN in eager.

        What their pads hold comes from inputs.
        """
        for given in self._inputs_behind(padded):
            if not self._is_parameter(given) and not self._selected_away(given, chosen):
                (self.hiding if self._only_hides(given) else self.inputs)[given] = None

    def _only_hides(self, mask: fx.Node) -> bool:
        """Is it added to what a softmax over its last dim, or the like, is taken of, and nothing else?"""
        users = self._read(mask)
        return bool(users) and mask not in self.an.meanings.tainted and all(self._hides(u, mask) for u in users)

    def _hides(self, user: fx.Node, mask: fx.Node) -> bool:
        value, before = tensor(user), tensor(mask)
        if value is None or before is None or value.dim() < before.dim() or not value.is_floating_point():
            return False
        if op(user) in _STILL_HIDES:
            kept = _same(value.shape[-1:], before.shape[-1:])
            return (kept or op(user) == "slice") and all(self._hides(u, user) for u in self._read(user))
        if op(user) == "scaled_dot_product_attention":
            return mask is arg(user, "attn_mask") and user.all_input_nodes.count(mask) == 1
        added = op(user) == "add" and arg(user, "alpha", 1) == 1 and user.args.count(mask) == 1
        return added and _same(value.shape[-1:], before.shape[-1:]) and self._ends_level(user)

    def _ends_level(self, scores: fx.Node) -> bool:
        """Scores of -inf: other masks, and a scale, leave them what they are."""
        return all(map(partial(self._hidden_before, scores), self._read(scores)))

    def _hidden_before(self, scores: fx.Node, user: fx.Node) -> bool:
        name, value = op(user), tensor(user)
        if name in _SOFTMAXES:
            return value is not None and arg(user, "dim") in (-1, value.dim() - 1)
        if name in _LEVEL or (name == "clamp" and isinstance(arg(user, "min"), (int, float))):
            return True
        scaled = name in ("mul", "div") and isinstance(by := arg(user, "other"), (int, float)) and by > 0
        masked = name in ("masked_fill", "clone") or (name == "add" and arg(user, "alpha", 1) == 1)
        plain = arg(user, "rounding_mode") is None and user.all_input_nodes.count(scores) == 1
        return plain and (scaled or masked) and self._ends_level(user)

    def _read(self, x: fx.Node) -> list[fx.Node]:
        """Users in the packed graph; an attention that is packed has checks of its own."""
        return [u for u in x.users if u in self.an.wanted]

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


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(known(x == y) for x, y in zip(a, b, strict=True))


def _spreads(value: torch.Tensor) -> bool:
    """May it hold what is not finite?"""
    return value.is_floating_point() or value.is_complex()
