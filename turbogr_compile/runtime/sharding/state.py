"""Shards in checkpoints: the whole table under its own name, so that another number of ranks can load it.

Rows and columns that are spread become DTensors, which `torch.distributed.checkpoint` cuts anew for whoever loads them;
a table that one rank has is that rank's ordinary tensor. What is loaded may also be the whole table. Rows that are
spread by hash are stored in the order of their addresses, which an extra entry says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .placements import ColumnWise, Hierarchical, TableWise
from .table import Table

ORDER = ".order"


def saved(table: Table, mesh: Any, shard: Tensor, key: str) -> dict[str, Any]:
    """Entries of a state_dict for one tensor with the layout of a table: as wide as its pieces, or a number per row."""
    layout, found = table.layout, {}
    if layout.held(table.rank) or not isinstance(layout.placement, TableWise):
        found[key] = _global(table, mesh, shard)
    if layout.factor != 1:
        found[key + ORDER] = torch.tensor(layout.factor)
    return found


def _global(table: Table, mesh: Any, shard: Tensor) -> Tensor:
    layout, valid = table.layout, _valid(table, shard)
    if isinstance(layout.placement, TableWise) or table.group is None:
        return valid
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dim = 1 if isinstance(layout.placement, ColumnWise) else 0
    replicated = [Replicate()] if isinstance(layout.placement, Hierarchical) else []
    shape = torch.Size((layout.rows, layout.width)[: shard.ndim])
    stride = (layout.width, 1)[-shard.ndim :]
    return DTensor.from_local(valid, mesh, [*replicated, Shard(dim)], run_check=False, shape=shape, stride=stride)


def find(table: Table, entries: dict[str, Any], key: str, errors: list[str]) -> Tensor | None:
    """What is stored for this rank; None where nothing is."""
    found, order = entries.get(key), entries.get(key + ORDER)
    if found is None:
        return None
    spread = hasattr(found, "to_local")
    stored = 1 if order is None else int(order)
    # A whole table without a word about its order is in the order of ids, and every plan can take it.
    if (spread and stored != table.layout.factor) or (not spread and stored != 1):
        errors.append(
            f"{key} was stored in another order of rows than {table.layout.placement.spec} has: load it into a plan "
            "with the order it was saved with"
        )
        return None
    return found


def load(table: Table, shard: Tensor, found: Tensor, key: str, errors: list[str]) -> None:
    """Copy into the shard what a checkpoint has: this rank's part, or the whole table."""
    layout, valid = table.layout, _valid(table, shard)
    whole = (layout.rows, layout.width)[: shard.ndim]
    if hasattr(found, "to_local"):
        found = found.to_local()
    elif tuple(found.shape) == whole and shard.ndim == 2:
        found = _valid(table, layout.cut(found.to(shard.device), table.rank))
    if found.shape != valid.shape:
        errors.append(f"{key}: the shard here is {tuple(valid.shape)}, and {tuple(found.shape)} is stored")
        return
    valid.copy_(found)


def _valid(table: Table, shard: Tensor) -> Tensor:
    """Without the padding."""
    rows, columns = table.layout.valid(table.rank)
    return shard[:rows] if shard.ndim == 1 else shard[:rows, :columns]
