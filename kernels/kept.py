"""Rows that a step has computed anyway, kept for whoever reads them after it.

`leave_rows` marks a value in a step: of its rows are returned those that the step computes for its own sake. Packing
carries it out; where nothing is packed, these are all rows. `left_rows` is the value again, as far as it is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .contract import INT64, Array, Contract
from .declare import declare


class RowsMissing(RuntimeError):
    """A row is asked for that was not kept."""


def keep(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, and for each row of x where it is among them; -1 where it is not."""
    rows = x.detach().reshape(-1, x.shape[-1]).clone()
    return rows, torch.arange(rows.shape[0], device=x.device).view(x.shape[:-1])


def _keep_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = x.new_empty(torch.library.get_ctx().new_dynamic_size(), x.shape[-1])
    return rows, x.new_empty(x.shape[:-1], dtype=torch.int64)


def _no_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output)


def _keep_backward(ctx: Any, *grads: Any) -> None:
    return None


def kept(rows: Tensor, where: Tensor) -> Tensor:
    """rows[where]."""
    if where.numel() and int(where.min()) < 0:
        raise RowsMissing("a row is asked for that the step did not compute")
    return rows[where]


def _kept_fake(rows: Tensor, where: Tensor) -> Tensor:
    return rows.new_empty((*where.shape, *rows.shape[1:]))


declare(
    "leave_rows(Tensor x) -> (Tensor, Tensor)",
    Contract(x=Array("R ...S F", None)),
    reference=keep,
    fake=_keep_fake,
    backward=_keep_backward,
    save=_no_gradient,
)
declare(
    "left_rows(Tensor rows, Tensor where) -> Tensor",
    Contract(rows=Array("R ...F", None), where=Array("...S", INT64)),
    reference=kept,
    fake=_kept_fake,
)
