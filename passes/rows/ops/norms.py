"""Normalisation of features."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from ..calls import arg, op, operand, rank_of
from ..declaration import EVERY, row_op
from .packing import first_packed, same_dims

if TYPE_CHECKING:
    from ..rowwise import Rowwise
    from ..spaces import Space


def _over_rows(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    count = len(arg(n, "normalized_shape"))
    return "normalises over rows" if any(r.on_rows(n.args[0], -1 - i, s) for i in range(count)) else None


def _channels(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    """(rows, channels, ...): packed, the channels must still come right after the rows."""
    first = r.typing.atoms(operand(n))[0]
    if not r.covers(n.args[0], s) or not first or not set(first) <= set(s.axes):
        return f"{op(n)} of values whose first dim is not rows"
    return "normalises over rows" if r.on_rows(n.args[0], 1, s) else None


def _group_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    why = _channels(r, n, s)
    rest = any(r.on_rows(n.args[0], d, s) for d in range(1, rank_of(n)))
    return "normalises over rows" if why is None and rest else why


def _batch_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return "normalises over the batch" if arg(n, "training") else _channels(r, n, s)


def _instance_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    """Without running statistics: those would be written for every row."""
    if arg(n, "running_mean") is not None or arg(n, "running_var") is not None:
        return "instance_norm with running statistics"
    return _group_mixes(r, n, s)


row_op("layer_norm", "rms_norm", models=("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable"),
       axes=same_dims, mixes=_over_rows, packed=first_packed)  # fmt: skip
row_op("group_norm", models=("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled"),
       axes=same_dims, mixes=_group_mixes, packed=first_packed)  # fmt: skip
row_op("batch_norm", models=EVERY, axes=same_dims, mixes=_batch_mixes, packed=first_packed)
row_op("instance_norm", models=EVERY, axes=same_dims, mixes=_instance_mixes, packed=first_packed)
row_op("normalize", models=EVERY, axes=same_dims)
