"""Cross-entropy of a tile of logits in C++: one sweep to measure it, one to turn it into gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .call import Arguments, address, call, fields

if TYPE_CHECKING:
    from ..linear_cross_entropy import Rows, Step


class LossTileArguments(Arguments):
    _fields_ = fields(
        "logits bias target sum total top picked log_sum loss grad",
        "rows columns stride first classes measure slopes threads",
        "smoothing",
    )


def tile(library: Any, logits: Tensor, bias: Tensor | None, rows: Rows, step: Step) -> None:
    """Twin of `tile` in kernels/linear_cross_entropy.py."""
    arguments = LossTileArguments(
        address(logits),
        address(bias),
        *(address(x) for x in rows),
        *logits.shape,
        logits.stride(0),
        step.first,
        step.classes,
        step.measure,
        step.slopes,
        torch.get_num_threads(),
        step.smoothing,
    )
    call(library.turbogr_loss_tile, arguments)
