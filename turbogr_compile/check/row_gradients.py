"""Gradients of rows as tensors that can be compared: two graphs may name the same rows in other lookups."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from ..runtime.sharding.table import table_of

BUCKETS = 1 << 14  # rows of a large table share these: what is compared stays small
_LOOKUPS = ("own_lookup", "own_table")


def receipts_of(graph: fx.Graph) -> dict[int, int]:
    """Tables of this process, by the number of the input that is the leaf of their gradients."""
    inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    targets = [getattr(torch.ops.turbogr, name).default for name in _LOOKUPS]
    nodes = [n for target in targets for n in graph.find_nodes(op="call_function", target=target)]
    return {inputs[n.args[1]]: n.args[-1] for n in nodes if n.args[1] in inputs}


@contextmanager
def journals_kept(tables: Collection[int]) -> Iterator[None]:
    """What is put into journals inside is forgotten: no step is to take it."""
    found = [table_of(number) for number in tables]
    before = [dict(table.journal) for table in found]
    try:
        yield
    finally:
        for table, journal in zip(found, before, strict=True):
            table.journal = journal


def gathered(number: int, receipts: Tensor | None) -> Tensor | None:
    """The gradient that receipts stand for, rows of the same bucket added up."""
    table = table_of(number)
    found = [(rows, values) for rows, values in table.counted(receipts) if values.numel()]
    if not found:
        return None
    total = found[0][1].new_zeros((min(table.layout.rows, BUCKETS), table.layout.width))
    for rows, values in found:
        trained = rows != table.padding
        total.index_add_(0, rows[trained] % len(total), values[trained])
    return total


def gathered_in(gradients: Sequence[Any], places: Sequence[int], receipts: dict[int, int]) -> list[Any]:
    """Gradients by inputs at `places`, those of receipts as what they stand for."""
    return [gathered(receipts[i], g) if i in receipts else g for i, g in zip(places, gradients, strict=True)]
