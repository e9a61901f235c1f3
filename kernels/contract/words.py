"""What can be said of an argument: the words of a contract."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import entries

HALF = (torch.float16, torch.bfloat16)
REAL = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INT64 = (torch.int64,)
BOOL = (torch.bool,)
MOST = 1 << 62  # of a size that is said in numbers: what is computed from it still fits


@dataclass(frozen=True)
class As:
    """The dtype of another argument; the dtype of its sums, if these are meant."""

    argument: str
    sums: bool = False


@dataclass(frozen=True)
class Array:
    """A tensor: its sizes, its dtype (None: any), and what holds of its entries."""

    dims: str
    dtype: tuple[torch.dtype, ...] | As | None = REAL
    entries: Range | Ascending | None = None
    anywhere: bool = False  # on any device


@dataclass(frozen=True)
class Parts:
    """A list of tensors, one for each entry of `sizes`, which is their last size."""

    dims: str
    sizes: str
    like: str  # the argument whose dtype they have


@dataclass(frozen=True)
class Number:
    low: float | None = None
    high: float | None = None
    finite: bool = True


@dataclass(frozen=True)
class Whole:
    """An integer; `below` names a size."""

    low: int
    high: int = MOST
    below: str = ""


@dataclass(frozen=True)
class Word:
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Flags:
    """One for each of these."""

    of: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """Some sizes, none negative, that add up to `total`."""

    total: str


@dataclass(frozen=True)
class Range:
    """Entries from 0 to below a size, except those that are `but`, another argument.

    `within` names offsets: rows that belong to no sequence may hold anything. `or_one`: a size of 1 stands for each.
    """

    below: str = ""
    but: str = ""
    within: str = ""
    or_one: bool = False
    most: int = entries.LAST
    error: type[Exception] = IndexError


@dataclass(frozen=True)
class Ascending:
    """Offsets of sequences of rows: from 0 on, up to `rows`, all of them where they are `whole`; or any numbers."""

    rows: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Entries:
    """More that holds of the entries of an argument, where the size that `what.below` names is there."""

    argument: str
    what: Range
    table: str  # the argument that has this size


@dataclass(frozen=True)
class Distances:
    """Columns of queries and keys of a sequence differ by less than a size."""

    queries: str
    keys: str
    query_offsets: str
    key_offsets: str
    below: str
    table: str


@dataclass(frozen=True)
class Rule:
    """A Python expression of arguments and sizes; checked where all these sizes are known.

    `first`: before any size is looked at, so that sizes can rely on it.
    """

    holds: str
    message: str
    first: bool = False


def together(*names: str) -> Rule:
    alike = " == ".join(f"({name} is None)" for name in names)
    return Rule(alike, f"{' and '.join(names)} come together", first=True)
