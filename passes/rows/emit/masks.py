"""Inputs that only hide keys: what is added to scores, and is -inf where a key is not to be seen."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import fx

from ....graph.nodes import tensor
from ....graph.shapes import known
from ..calls import COPIES, arg, op
from ..demand import DemandAnalysis

_STILL_HIDES = {"unsqueeze", "expand", "slice", "_to_copy", "to", *COPIES}  # rows of keys stay rows of keys
_SOFTMAXES = ("softmax", "_softmax", "_safe_softmax")
_LEVEL = ("relu", "sigmoid", "tanh", "exp")  # of -inf: a number, with a slope of zero


class Masks:
    """Which inputs of an attention that stays padded do nothing but hide keys from its activation."""

    def __init__(self, an: DemandAnalysis) -> None:
        self.an = an

    def only_hides(self, mask: fx.Node) -> bool:
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


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return all(known(x == y) for x, y in zip(a, b, strict=True))
