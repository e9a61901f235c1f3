"""Rows times the matrix of their group: what sorting rows by group, multiplying and putting them back comes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contract import Array, As, Contract
from .declare import compose

SCHEMA = "grouped_mm(Tensor x, Tensor weights, Tensor groups, str by) -> Tensor"


def multiply(x: Tensor, weights: Tensor, groups: Tensor, by: str) -> Tensor:
    """x[r] @ weights[groups[r]], by torch's own ops: passes that find it put the op that `by` names in its place."""
    result = x.new_zeros(x.shape[0], weights.shape[2])
    for group in range(weights.shape[0]):
        result = torch.where((groups == group).unsqueeze(-1), x @ weights[group], result)
    return result


def _flops(x: Tensor, weights: Tensor, *rest: Any, out_val: Any = None) -> Any:
    return 2 * x.shape[0] * x.shape[1] * weights.shape[2]


compose(
    SCHEMA, Contract(x=Array("N K", None), weights=Array("G K M", As("x")), groups=Array("N", None)), multiply, _flops
)
