"""Ops that run along the rows of a sequence: a row of the result is computed from rows around it, or up to it.

Prefix   recurrences and running sums: lives on every row up to the last that is read
Window   convolutions: lives on the rows that are read, and asks for those around them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from .calls import Size
from .sets import UNBOUNDED, Terms, read, seen, spanned
from .spaces import Moved, Space


@dataclass(frozen=True)
class Prefix:
    """A row is made from the rows up to it."""

    space: Space
    source: fx.Node

    def lives_on(self, wanted: Terms) -> Terms:
        return frozenset(seen(t, 0, UNBOUNDED) for t in wanted)

    def asks(self, wanted: Terms) -> Terms:
        return self.lives_on(wanted)


@dataclass(frozen=True)
class Window:
    """Column c is made from columns start + c of the operand, for each start in ascending order.

    Beyond the ends are zeros.
    """

    space: Space
    into: Space
    source: fx.Node
    starts: tuple[Size, ...]
    inside: bool  # do all of them exist, for every column?

    def lives_on(self, wanted: Terms) -> Terms:
        return wanted

    def asks(self, wanted: Terms) -> Terms:
        first, last = self.starts[0], self.starts[-1]
        if self.space == self.into and isinstance(first, int) and isinstance(last, int):
            return frozenset(seen(t, min(-last, 0), max(-first, 0)) for t in wanted)
        if self.inside and isinstance(last - first, int):
            reads = [read(self.taps[0], t) for t in wanted]
            return frozenset(seen(r, int(first - last), 0) for r in reads)
        return frozenset(r for t in wanted for r in spanned(read(tap, t) for tap in self.taps))

    @property
    def taps(self) -> list[Moved]:
        return [Moved(self.space, self.into, start) for start in self.starts]


Span = Prefix | Window


def pieces(node: fx.Node, wanted: dict[fx.Node, Any]) -> list[fx.Node]:
    """Results of an op with several that are asked for."""
    return [u for u in node.users if u in wanted]
