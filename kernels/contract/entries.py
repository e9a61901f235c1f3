"""What contracts say of the entries of tensors, looked at by torch: it explains what is wrong, and runs everywhere.

Before a kernel, cpu/check.cpp looks first, in one pass; a check is some numbers there, of which the first is its kind:

    RANGE         entries, number of entries, bytes of one, limit
    RANGE_BUT     the same; the number that may stand for none
    RANGE_WITHIN  the same as of RANGE; offsets, number of offsets
    ASCENDING     entries, number of entries, bytes of one, limit (-1: none), how much is asked
    DISTANCES     query columns, key columns, query offsets, key offsets, number of offsets, limit
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

LAST = (1 << 63) - 1
RANGE, RANGE_BUT, RANGE_WITHIN, ASCENDING, DISTANCES = 1, 2, 3, 4, 5

Fail = Callable[..., NoReturn]


def look(fail: Fail, *checks: Question) -> None:
    for check in checks:
        check.run(fail)


class Range(NamedTuple):
    """Entries from 0 to below `limit`; those of rows that belong to a sequence, where offsets are given."""

    name: str
    x: Tensor | None
    limit: int | None
    but: int | None
    within: Tensor | None
    table: str
    error: type[Exception]

    def run(self, fail: Fail) -> None:
        if self.x is None or self.limit is None or self.x.numel() == 0:
            return
        x, start = self.x.reshape(-1), 0
        if self.within is not None:
            start, stop = int(self.within[0]), int(self.within[-1])
            x = x[start:stop]
        kind = torch.iinfo(x.dtype)  # torch wraps a number that is none of the dtype's
        wrong = (x < 0) | (x > min(self.limit - 1, kind.max))
        if self.but is not None and kind.min <= self.but <= kind.max:
            wrong &= x != self.but
        if not bool(wrong.any()):
            return
        if self.table:
            low, high = (int(end) for end in x.aminmax())
            fail(f"{self.name} from {low} to {high} exceed {self.table}, which has {self.limit}", self.error)
        at = int(wrong.nonzero()[0, 0])
        what = f"row {int(x[at])}, entry {at + start} of {self.name}, is"
        if self.limit == LAST:
            fail(f"{what} negative", self.error)
        fail(f"{what} out of range: there are {self.limit} rows", self.error)


class Ascending(NamedTuple):
    """Offsets, from 0 on and not beyond `limit`; exactly so where they are `whole`. Without a limit, any numbers."""

    name: str
    x: Tensor | None
    limit: int | None
    whole: bool

    def run(self, fail: Fail) -> None:
        if self.x is None:
            return
        x = self.x
        if bool((x[1:] < x[:-1]).any()):
            fail(f"{self.name} must ascend")
        if self.limit is None:
            return
        if x.numel() == 0 or int(x[0]) < 0:
            fail(f"{self.name} must ascend from at least one number, none below zero")
        if int(x[-1]) > self.limit:
            fail(f"{self.name} end at row {int(x[-1])}, and there are {self.limit} rows")
        if self.whole and (int(x[0]) != 0 or int(x[-1]) != self.limit) and self.limit > 0:
            fail(f"{self.name} must begin at 0 and end at {self.limit}")


class Distances(NamedTuple):
    """Columns of one sequence differ by less than `limit`."""

    query_columns: Tensor
    key_columns: Tensor
    query_offsets: Tensor
    key_offsets: Tensor
    limit: int | None
    table: str

    def run(self, fail: Fail) -> None:
        if self.limit is None:
            return
        queries, keys = (list(pairwise(x.tolist())) for x in (self.query_offsets, self.key_offsets))
        for (first, last), (first_key, last_key) in zip(queries, keys, strict=True):
            if first == last or first_key == last_key:
                continue
            q_low, q_high = (int(end) for end in self.query_columns[first:last].aminmax())
            k_low, k_high = (int(end) for end in self.key_columns[first_key:last_key].aminmax())
            if q_high - k_low >= self.limit or k_high - q_low >= self.limit:
                most = self.limit - 1
                fail(
                    f"distances {q_low - k_high} to {q_high - k_low} exceed {self.table}, which has -{most} to {most}",
                    IndexError,
                )


Question = Range | Ascending | Distances
