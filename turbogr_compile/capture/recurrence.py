"""Recurrent layers as one op per layer and direction: `turbogr::recurrence`.

Torch's own ops for them are loops over columns that a trace would unroll.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout

from .. import kernels  # noqa: F401  (defines the op)

KINDS = {torch.gru: "gru", torch.lstm: "lstm", torch.rnn_tanh: "tanh", torch.rnn_relu: "relu"}


def why_not(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
    """None where `layers` takes the call."""
    if kwargs or len(args) != 9 or not isinstance(args[2], (list, tuple)):
        return "a recurrent layer over rows that the model packs itself"
    if _low(args[0]) is not None and args[0].device.type != "cpu":
        return "a recurrent layer under autocast, which casts inside of its loop"
    weights = 4 if args[3] else 2
    if len(args[2]) != args[4] * (2 if args[7] else 1) * weights:
        return "a recurrent layer whose states are projected"
    return None


def layers(
    target: Any, x: Tensor, first: Any, weights: Sequence[Tensor], biased: bool, count: int, p: float, train: bool,
    both_ways: bool, batch_first: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What torch.gru and its kin compute.

    Under autocast they cast in each column. Here all columns are computed in the precision of the weights, and results
    are of the type that eager's are.
    """
    kind, ways, each = KINDS[target], 2 if both_ways else 1, 4 if biased else 2
    states = first if kind == "lstm" else (first,)
    low, made = _low(x), x.dtype
    if low is not None:
        made = torch.promote_types(states[0].dtype, low) if kind == "gru" else low
        x, *states = (t.to(weights[0].dtype) for t in (x, *states))
    x = x if batch_first else x.transpose(0, 1)
    ends: list[list[Tensor]] = [[] for _ in states]
    for layer in range(count):
        outs = []
        for way in range(ways):
            at = layer * ways + way
            mine = list(weights[at * each : (at + 1) * each])
            turned = x.flip(1) if way else x
            hidden, cell, *_ = [*(s[at] for s in states), None]
            biases = mine[2:] or (None, None)
            found = torch.ops.turbogr.recurrence(turned, hidden, cell, *mine[:2], *biases, None, kind)
            for end, states_of_rows in zip(ends, found, strict=False):
                end.append(states_of_rows[:, -1])
            outs.append(found[0].flip(1) if way else found[0])
        x = torch.cat(outs, -1) if both_ways else outs[0]
        if p and train and layer + 1 < count:
            x = dropout(x.transpose(0, 1).contiguous(), p).transpose(0, 1)  # as eager draws: column by column
    found = (x if batch_first else x.transpose(0, 1), *(torch.stack(end) for end in ends))
    return tuple(t.to(made) for t in found)


def _low(x: Tensor) -> torch.dtype | None:
    """What autocast casts to, where it is on."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
