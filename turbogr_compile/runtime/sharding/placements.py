"""Where a table lives: what a plan says of each of them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...errors import OptionError

ORDERS = ("block", "hash")
WIRES = ("", "float16", "bfloat16")


@dataclass(frozen=True)
class Placement:
    """Base of all placements."""

    def __post_init__(self) -> None:
        for name, known in (("order", ORDERS), ("wire", WIRES)):
            value = getattr(self, name, known[0])
            if value not in known:
                told = ", ".join(repr(k) for k in known)
                raise OptionError(f"{type(self).__name__}: {name} is one of {told}, not {value!r}")

    @property
    def spec(self) -> str:
        """Text form: equal texts, equal placements."""
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True)
class Replicated(Placement):
    """Every rank has the whole table, as the ordinary parameter that it was."""


@dataclass(frozen=True)
class RowWise(Placement):
    """Every rank of the mesh has an equal share of the rows."""

    order: str = "block"  # 'hash' spreads neighbours, against ids that are sorted by popularity
    wire: str = ""  # dtype in which rows and their gradients travel; '' for their own


@dataclass(frozen=True)
class Hierarchical(RowWise):
    """Rows are spread over the last dim of a two-dim mesh (a node); the first dim has replicas.

    Rows travel inside of a node only; across nodes go the gradients of touched rows, once per step.
    """


@dataclass(frozen=True)
class ColumnWise(Placement):
    """Every rank has all rows, and an equal share of each."""

    wire: str = ""


@dataclass(frozen=True)
class TableWise(Placement):
    """One rank has the whole table."""

    rank: int = 0
    wire: str = ""
