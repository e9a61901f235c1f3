"""Where some products stand among those of all rows of a table, counted without storing any of them.

    own   = own_products(queries, rows)                    # <queries[i], rows[i]>
    above, equal = standing(queries, table, own, skip)     # rows whose product is larger, and those where it is equal

Row skip[i] does not count for query i; a number that is no row skips nothing. Kernels compute both in the same order of
additions, so that equal rows have equal products; a NaN is neither above nor equal. Without kernels products are those
of torch, a part of the rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import INT64, Array, As, Contract
from .cpu import standing as cpu
from .cpu.build import library

REALS = (torch.float32, torch.float64)
NUMBERS = 1 << 20  # products of torch that are there at a time

_OWN = Contract(queries=Array("Q D", REALS), rows=Array("Q D", As("queries")), nonzero="D")
_OWN.bind("own_products(Tensor queries, Tensor rows) -> Tensor")
_STANDING = Contract(
    queries=Array("Q D", REALS), rows=Array("R D", As("queries")), own=Array("Q", As("queries")),
    skip=Array("Q", INT64), nonzero="D",
)  # fmt: skip
_STANDING.bind("standing(Tensor queries, Tensor rows, Tensor own, Tensor skip) -> (Tensor, Tensor)")


def own_products(queries: Tensor, rows: Tensor) -> Tensor:
    """The product of each query with the row at its own place."""
    _OWN.check(queries, rows)
    kernels = library(queries.dtype) if queries.device.type == "cpu" and len(queries) else None
    if kernels is not None:
        return cpu.own_products(kernels, queries, rows)
    some = max(1, int(NUMBERS**0.5))
    parts = zip(queries.split(some), rows.split(some), strict=True)
    return torch.cat([(query @ row.T).diagonal() for query, row in parts]) if len(queries) else queries.new_zeros(0)


def standing(queries: Tensor, rows: Tensor, own: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """How many rows have a larger product with each query than `own` says, and how many an equal one."""
    _STANDING.check(queries, rows, own, skip)
    kernels = library(queries.dtype) if queries.device.type == "cpu" and len(queries) and len(rows) else None
    if kernels is not None:
        return cpu.standing(kernels, queries, rows, own, skip)
    above, equal = (torch.zeros(len(queries), dtype=torch.int64, device=queries.device) for _ in range(2))
    some = max(1, NUMBERS // max(len(queries), 1))
    for first in range(0, len(rows), some):
        products = queries @ rows[first : first + some].T
        counts = torch.arange(first, first + products.shape[1], device=queries.device) != skip[:, None]
        above += ((products > own[:, None]) & counts).sum(1)
        equal += ((products == own[:, None]) & counts).sum(1)
    return above, equal
