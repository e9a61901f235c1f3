"""Biases of attention scores: by position, by bucketed time, or per pair as a last resort."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

import torch

from .attention import Attention

if TYPE_CHECKING:
    from .emit import Emitter
    from .program import RowSet

aten = torch.ops.aten
# bias, position_bias, time_bias, time_bounds, query_times, key_times
Arguments = tuple[Any, Any, Any, Any, Any, Any]


class Biases:
    def __init__(self, emitter: Emitter) -> None:
        self.e = emitter

    def of(self, a: Attention, queries: RowSet, keys: RowSet) -> Arguments:
        out: fx.Node | None = None
        for pair in a.biases:
            x = self.e.four_dims(a, pair)
            if pair.multiplier != 1:
                x = self.e.call(aten.mul.Tensor, x, pair.multiplier)
            out = x if out is None else self.e.call(aten.add.Tensor, out, x)
        return out, None, None, None, None, None
