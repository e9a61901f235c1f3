"""What the packed graph of an attention is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from .formula import Formula, Index, Size
from .table import Table

DISTANCE, BUCKET = "distance", "bucket"  # axes of the op's tables


@dataclass(frozen=True)
class Packed:
    """A dim of packed rows, of queries or of keys."""

    side: str


Layout = tuple["tuple[str, ...] | Packed", ...]  # of each dim: packed rows, or axes that it runs over, outermost first


class Builder(Protocol):
    """What the packed graph is made with. Where nothing of a dim of a layout occurs in an index, its size is one."""

    query_offsets: Any
    key_offsets: Any
    query_columns: Any
    key_columns: Any

    def read(self, node: fx.Node, index: Index, layout: Layout, sizes: dict[str, Size]) -> Any:
        """A captured tensor in a layout; `sizes` are of axes that no dim of the graph has."""

    def truth(self, table: Table, layout: Layout) -> Any:
        """Where a table holds, if that is known before the graph runs; True: for all rows; None: compute it."""

    def positions(self, formula: Formula, layout: Layout, sizes: dict[str, Size]) -> Any:
        """A formula in a layout, as whole numbers."""

    def constant(self, tensor: torch.Tensor) -> Any:
        """Numbers that are known now."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """An op of the packed graph."""

    def seed(self) -> Any:
        """For dropout."""
