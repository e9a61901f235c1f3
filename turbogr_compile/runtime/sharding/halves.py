"""A table's copy in FP16, kept from step to step.

The row optimizer changes it along, or says which rows it has changed. In a compiled step the copy is an input, and
`half_of_table` brings it up to date where the scales are asked for. It looks at versions: a table that was written to
by anything but its row optimizer is narrowed as a whole. Writes that torch does not see (`weight.data`, through NumPy)
go unnoticed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import _torch
from ...kernels.contract import Array, Contract
from ...kernels.declare import declare
from ...kernels.half_copy import HalfCopy
from ...kernels.half_rows import BLOCK
from .table import table_of


class KeptHalf:
    """A copy, and what it is a copy of."""

    def __init__(self, table: Tensor) -> None:
        self.copy = HalfCopy(table)
        self._state: tuple[Any, ...] | None = None  # of the table, when the rows below are all that has changed since
        self._changed: list[Tensor] = []

    def note(self, table: Tensor, rows: Tensor, before: int | None) -> None:
        """An update has changed these rows, each named once, of a table that had the version `before`."""
        if before is None or self._state != (*_place(table), before) or self._more_than(table, rows):
            self._state, self._changed = None, []
            return
        self._state = (*_place(table), _torch.version_of(table))
        self._changed.append(rows)

    def current(self, table: Tensor) -> HalfCopy | None:
        """The copy, where it is that of the table as it is; who changes rows may change it along."""
        state = (*_place(table), _torch.version_of(table))
        return self.copy if state[-1] is not None and state == self._state and not self._changed else None

    def followed(self, table: Tensor) -> None:
        """Whoever changed the table has changed the copy along."""
        self._state = (*_place(table), _torch.version_of(table))

    def refresh(self, table: Tensor) -> None:
        """Make it a copy of the table as it is."""
        state = (*_place(table), _torch.version_of(table))
        changed, self._changed = self._changed, []
        if state[-1] is None or self._state != state:
            self.copy.follow(table)
        elif changed:
            self.copy.follow(table, changed[0] if len(changed) == 1 else torch.cat(changed).unique())
        self._state = state

    def _more_than(self, table: Tensor, rows: Tensor) -> bool:
        """Updates that nobody reads in FP16 must not gather for ever."""
        return len(rows) + sum(map(len, self._changed)) > table.shape[0]


def _place(table: Tensor) -> tuple[Any, ...]:
    return table.data_ptr(), tuple(table.shape), table.stride()


def half_of_table(table: Tensor, half: Tensor, number: int) -> Tensor:
    """Bring the copy `half` of a table up to date; the scales of its blocks."""
    kept = table_of(number).half
    assert kept is not None and kept.copy.half.data_ptr() == half.data_ptr(), "the copy of this table is another one"
    kept.refresh(table.detach())
    return kept.copy.scales.clone()


def _fake(table: Tensor, half: Tensor, number: int) -> Tensor:
    return table.new_empty(-(-table.shape[0] // BLOCK), dtype=torch.float32)


def _forget(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.mark_non_differentiable(output)


declare(
    "half_of_table(Tensor table, Tensor half, int number) -> Tensor",
    Contract(table=Array("V D", (torch.float32,)), half=Array("V D", (torch.float16,))),
    reference=half_of_table,
    fake=_fake,
    backward=lambda ctx, grad: (None, None, None),
    save=_forget,
)
