"""Where looked-up rows lie, as lookup.h wants to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .call import TYPES, address, fields
from .rows import along_first

if TYPE_CHECKING:
    from ..lookup import Source

LOOKUP = fields("rows places scales", "entries depth stride block type", "eps")


class Lookup:
    """The first fields of some structs, and the tensors that they point into."""

    def __init__(self, source: Source, ids: Tensor, eps: float) -> None:
        self.ids = ids.contiguous()
        self.places = source.at(self.ids).contiguous()
        self.scales = None if source.scales is None else source.scales.contiguous()
        rows = along_first(source.rows)
        self.rows = rows.tensor
        numbers = self.ids.numel(), rows.width, rows.stride, source.block, TYPES[rows.tensor.dtype]
        self.fields: tuple[Any, ...] = (rows.start, address(self.places), address(self.scales), *numbers, eps)
