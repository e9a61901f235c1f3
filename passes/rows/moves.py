"""Ops that move rows: slices, pads, shifts, concatenations, gathers. Each names the rows it reads by a relation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .axes import Typing
from .calls import arg, is_tensor, op, picking_mask, rank_of, value_of
from .declaration import declared
from .meaning import Predicate
from .meanings import Meanings
from .spaces import Fixed, Relation, Space, Taken
from .spans import Span

RESIZING = {"slice", "narrow", "constant_pad_nd", "pad", "roll", "flip", "cat", "conv1d", "conv2d"}


@dataclass(frozen=True)
class Move:
    """Rows of the result read rows of the parts; those that read none hold `fill`."""

    out: Space
    parts: tuple[tuple[fx.Node, Relation], ...]
    fill: complex = 0
    narrows: bool = False  # reads few rows of its source even when all of the result is wanted


@dataclass
class Moves:
    typing: Typing
    meanings: Meanings
    space_of: Callable[[Any], Space | None]
    is_sized: Callable[[int], bool]  # is the size of an axis known before the graph runs?
    arg = staticmethod(arg)

    def of(self, node: fx.Node) -> Move | None:
        """How the rows of `node` come from the rows of its operands, where it moves rows."""
        found = declared(node.args[0] if op(node) == "getitem" else node)
        if found is None or found.reads is None or node in self.typing.untyped or not is_tensor(node):
            return None
        reads = found.reads
        return self.typing.trying(node, lambda: reads(self, node), None)

    def span_of(self, node: fx.Node, space: Space) -> Span | None:
        """Which rows of its own sequence each row of `node` is computed from, where it runs along rows."""
        source: Any = node.args[0] if op(node) == "getitem" else node
        found = declared(source)
        if found is None or found.spans is None or node in self.typing.untyped or not is_tensor(node):
            return None
        spans = found.spans
        return self.typing.trying(source, lambda: spans(self, source, space), None)

    def fixed(self, n: fx.Node, x: fx.Node, into: Space, axis: int, index: int) -> Move | None:
        coarse = Space(into.sequence, tuple(a for a in into.column if a != axis))
        found = self.space_of(n)
        if found is not None and found != coarse:
            return None
        return Move(coarse, ((x, Fixed(coarse, into, axis, index)),), narrows=True)

    def taken(
        self, n: fx.Node, x: fx.Node, column: fx.Node, rows: list[int], from_end: bool = False,
        repeats: tuple[int, ...] = (),
    ) -> Move | None:  # fmt: skip
        """Rows of x at the columns in an index tensor, which is the same along the dims `repeats`; `rows` are the axes
        of the result's rows."""
        into = self.space_of(x)
        if into is None or not into.column or column in self.meanings.tainted or not is_tensor(column):
            return None
        out = self.space_of(n)
        if out is None:
            out = Space(into.sequence, tuple(a for a in rows if a not in into.sequence))
        flat = [a for i, d in enumerate(self.typing.atoms(column)) if i not in repeats for a in d]
        inside = set(flat) <= set(out.axes) and set(into.sequence) <= set(out.axes) and len(set(flat)) == len(flat)
        # The rows of the result must really be what the index runs over.
        if not inside or not set(out.axes) <= {*flat, *into.sequence}:
            return None
        return Move(out, ((x, Taken(out, into, column, from_end, repeats)),), narrows=True)

    def kept_rows(self, n: fx.Node) -> Predicate | None:
        """The predicate p when n is x[p], or x[nonzero(p)], for rows of x in order."""
        x: Any = n.args[0]
        into = self.space_of(x)
        mask = picking_mask(n)
        if into is None or mask is None:
            return None
        two = self.meanings.two(mask)
        kept = two.with_yes(lambda yes, no: yes is True and no is False) if two is not None else None
        literal = next(iter(kept.literals)) if kept is not None and len(kept.literals) == 1 else None
        predicate = getattr(literal, "predicate", None)
        if predicate is None and self.meanings.describes_rows(mask):
            tests_truth = value_of(mask).dtype == torch.bool
            predicate = Predicate(mask) if tests_truth else Predicate(mask, 0, False)  # whatever it says
        dims = rank_of(mask)
        own = [a for d in self.typing.atoms(x)[:dims] for a in d]
        if predicate is None or tuple(own) != into.axes or self.typing.flat(mask) != own:
            return None
        return predicate
