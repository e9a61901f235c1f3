"""Ops that move rows: slices, pads, shifts, concatenations, gathers. Each names the rows it reads by a relation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from .axes import Typing, dim_of_cat, einsum_labels, padding, picking_mask
from .meaning import Iota, Meanings, OneHot, Predicate
from .ops import SPLITS, Size, arg, dim_of, dims_of, is_tensor, op, rank_of, shape, size
from .spaces import At, Fixed, Moved, Numbered, Part, Relation, Space, Taken

RESIZING = {"slice", "narrow", "constant_pad_nd", "pad", "roll", "flip", "cat", "concat"}


@dataclass(frozen=True)
class Move:
    """Rows of the result read rows of the parts; those that read none hold `fill`."""

    out: Space
    parts: tuple[tuple[fx.Node, Relation], ...]
    fill: float = 0.0
    narrows: bool = False  # reads few rows of its source even when all of the result is wanted


@dataclass
class Moves:
    typing: Typing
    meanings: Meanings
    space_of: Callable[[Any], Space | None]

    def of(self, node: fx.Node) -> Move | None:
        """How the rows of `node` come from the rows of its operands, where it moves rows."""
        name = op(node)
        if name in ("slice", "narrow", "constant_pad_nd", "pad", "roll", "flip"):
            return self._resized(node)
        if name in ("cat", "concat", "stack"):
            return self._joined(node)
        if name == "select":
            return self._selected(node)
        if name == "getitem" and op(node.args[0]) in SPLITS:
            return self._piece(node)
        if name == "index_select" or (name == "index" and len(node.args[1]) == 1):  # type: ignore[arg-type]
            return self._numbered(node)
        if name in ("gather", "take_along_dim"):
            return self._gathered(node)
        if name == "index":
            return self._indexed(node)
        if name in ("bmm", "matmul", "einsum"):
            return self._one_hot(node)
        return None

    def _resized(self, n: fx.Node) -> Move | None:
        x: Any = n.args[0]
        out, into = self.space_of(n), self.space_of(x)
        if out is None or into is None or out.sequence != into.sequence:
            return None
        dims = self._changed(n)
        if len(dims) != 1 or tuple(self.typing.atoms(x)[dims[0]]) != into.column:
            return None
        if tuple(self.typing.atoms(n)[dims[0]]) != out.column or (op(n) == "slice" and out == into):
            return None
        at, length = dims[0], shape(x)[dims[0]]
        name = op(n)
        if name == "flip":
            return Move(out, ((x, Moved(out, into, length - 1, -1)),))
        if name == "roll":
            shifts = arg(n, "shifts")
            shift = shifts[0] if isinstance(shifts, (list, tuple)) else shifts
            return Move(out, ((x, Moved(out, into, -size(shift), 1, True)),)) if _plain(shift) else None
        if name in ("constant_pad_nd", "pad"):
            if name == "pad" and arg(n, "mode", "constant") != "constant":
                return None
            before = padding(n)[at][0]
            fill = arg(n, "value") or 0.0
            return Move(out, ((x, Moved(out, into, -size(before))),), float(fill)) if _plain(before) else None
        start = slice_start(n, length)
        step = arg(n, "step", 1) or 1
        return Move(out, ((x, Moved(out, into, start, step)),)) if start is not None else None

    def _changed(self, n: fx.Node) -> list[int]:
        if op(n) in ("slice", "narrow"):
            return [dim_of(n)]
        if op(n) in ("roll", "flip"):
            return dims_of(n, "dims") or []
        return [i for i, (before, after) in enumerate(padding(n)) if before or after]

    def _joined(self, n: fx.Node) -> Move | None:
        out, at = self.space_of(n), dim_of_cat(n)
        parts: Any = n.args[0]
        if out is None:
            return None
        atoms = self.typing.atoms(n)[at]
        if op(n) == "stack" or (len(atoms) > 1 and all(self.typing.atoms(p)[at] == atoms[1:] for p in parts)):
            if not atoms or atoms[0] not in out.axes:
                return None
            coarse = Space(out.sequence, tuple(a for a in out.column if a != atoms[0]))
            if atoms[0] not in out.column or any(self.space_of(p) not in (coarse, None) for p in parts):
                return None
            return Move(out, tuple((p, Part(out, coarse, atoms[0], i)) for i, p in enumerate(parts)))
        if tuple(atoms) != out.column:
            return None
        pieces, start = [], 0
        for p in parts:
            into, length = self.space_of(p), shape(p)[at]
            if into is not None and into.sequence == out.sequence and tuple(self.typing.atoms(p)[at]) == into.column:
                pieces.append((p, Moved(out, into, -start)))
            elif length == 1 and set(out.sequence) <= set(self.typing.flat(p)):
                pieces.append((p, Moved(out, Space(out.sequence), -start)))
            else:
                return None
            start = start + length
        return Move(out, tuple(pieces))

    def _selected(self, n: fx.Node) -> Move | None:
        x: Any = n.args[0]
        into, atoms = self.space_of(x), tuple(self.typing.atoms(x)[dim_of(n)])
        index = arg(n, "index")
        if into is None or not atoms or not isinstance(index, int):
            return None
        if atoms == into.column:
            return Move(Space(into.sequence), ((x, At(Space(into.sequence), into, index)),), narrows=True)
        if len(atoms) == 1 and atoms[0] in into.column:
            return self._fixed(n, x, into, atoms[0], index)
        return None

    def _piece(self, n: fx.Node) -> Move | None:
        source: Any = n.args[0]
        x = source.args[0]
        into, at = self.space_of(x), dim_of(source)
        atoms = tuple(self.typing.atoms(x)[at])
        if into is None or op(source) != "unbind":
            return self._part(n, x, into, at, atoms)
        if len(atoms) == 1 and atoms[0] in into.column and len(into.column) > 1:
            return self._fixed(n, x, into, atoms[0], int(n.args[1]))  # type: ignore[arg-type]
        if atoms == into.column:
            return Move(Space(into.sequence), ((x, At(Space(into.sequence), into, int(n.args[1]))),), narrows=True)  # type: ignore[arg-type]
        return None

    def _part(self, n: fx.Node, x: fx.Node, into: Space | None, at: int, atoms: tuple[int, ...]) -> Move | None:
        """A piece of a split along the columns."""
        out = self.space_of(n)
        if into is None or out is None or atoms != into.column or out.sequence != into.sequence:
            return None
        start: Size = 0
        for piece in n.args[0].meta["val"][: n.args[1]]:  # type: ignore[union-attr]
            start = start + size(piece.shape[at])
        return Move(out, ((x, Moved(out, into, start)),)) if tuple(self.typing.atoms(n)[at]) == out.column else None

    def _fixed(self, n: fx.Node, x: fx.Node, into: Space, axis: int, index: int) -> Move | None:
        coarse = Space(into.sequence, tuple(a for a in into.column if a != axis))
        found = self.space_of(n)
        if found is not None and found != coarse:
            return None
        return Move(coarse, ((x, Fixed(coarse, into, axis, index)),), narrows=True)

    # --- rows named by data ------------------------------------------------------------------------

    def _taken(self, n: fx.Node, x: fx.Node, column: fx.Node, rows: list[int]) -> Move | None:
        """Rows of x at the columns in an index tensor; `rows` are the axes of the result's rows."""
        into = self.space_of(x)
        if into is None or not into.column or column in self.meanings.tainted or not is_tensor(column):
            return None
        out = self.space_of(n)
        if out is None:
            out = Space(into.sequence, tuple(a for a in rows if a not in into.sequence))
        flat = self.typing.flat(column)
        inside = set(flat) <= set(out.axes) and set(into.sequence) <= set(out.axes) and len(set(flat)) == len(flat)
        # The rows of the result must really be what the index runs over.
        if not inside or not set(out.axes) <= {*flat, *into.sequence}:
            return None
        return Move(out, ((x, Taken(out, into, column)),), narrows=True)

    def _numbered(self, n: fx.Node) -> Move | None:
        """Rows of a flattened value, by their number."""
        x: Any = n.args[0]
        index = arg(n, "index") if op(n) == "index_select" else n.args[1][0]  # type: ignore[index]
        into = self.space_of(x)
        if into is None or tuple(self.typing.atoms(x)[0]) != into.axes or (op(n) == "index_select" and dim_of(n) != 0):
            return None
        if not is_tensor(index) or index in self.meanings.tainted or tensor(index).dtype == torch.bool:  # type: ignore[union-attr]
            return None
        flat = self.typing.flat(index)  # type: ignore[arg-type]
        out = self.space_of(n) or Space(tuple(flat))
        sized = all(isinstance(self.typing.axes.size(a), int) for a in out.axes)
        if set(out.axes) != set(flat) or len(set(flat)) != len(flat) or not flat or not sized:
            return None
        return Move(out, ((x, Numbered(out, into, index)),), narrows=True)  # type: ignore[arg-type]

    def _gathered(self, n: fx.Node) -> Move | None:
        x: Any = n.args[0]
        index, at = arg(n, "index") or arg(n, "indices"), dim_of(n)
        into = self.space_of(x)
        if into is None or tuple(self.typing.atoms(x)[at]) != into.column:
            return None
        column = index
        while op(column) in ("expand", "repeat", "broadcast_to", "clone", "contiguous"):
            column = column.args[0]
        rest = [a for a in self.typing.flat(column) if a not in into.sequence]
        allowed = set(self.typing.atoms(n)[at])
        if not set(rest) <= allowed or not set(into.sequence) <= set(self.typing.flat(n)):
            return None  # different columns for different features
        kept = [a for i, d in enumerate(self.typing.atoms(x)) if i != at for a in d]
        got = [a for i, d in enumerate(self.typing.atoms(n)) if i != at for a in d]
        return self._taken(n, x, column, [*into.sequence, *self.typing.atoms(n)[at]]) if kept == got else None

    def _indexed(self, n: fx.Node) -> Move | None:
        """x[arange(B), column]."""
        x: Any = n.args[0]
        indices: Any = n.args[1]
        into = self.space_of(x)
        if into is None or len(indices) != 2 or not all(is_tensor(i) for i in indices):
            return None
        atoms = self.typing.atoms(x)
        if tuple(atoms[0]) != into.sequence or tuple(atoms[1]) != into.column:
            return None
        counts = self.meanings.of(indices[0])
        aligned = isinstance(counts, Iota) and counts.offset == 0
        if (
            not aligned
            or tuple(self.typing.flat(indices[0])) != into.sequence
            or tensor(indices[1]).dtype == torch.bool  # type: ignore[union-attr]
        ):
            return None
        if isinstance(self.meanings.of(indices[1]), Iota):
            return None  # a view
        rank = max(rank_of(i) for i in indices)
        rows = [a for d in self.typing.atoms(n)[:rank] for a in d]
        return self._taken(n, x, indices[1], rows)

    def _one_hot(self, n: fx.Node) -> Move | None:
        """A product with rows of a unit matrix picks rows."""
        if op(n) == "einsum":
            labels = einsum_labels(n)
            if labels is None or len(n.args[1]) != 2:  # type: ignore[arg-type]
                return None
            (p, v), out = labels
            hot, x = n.args[1]  # type: ignore[misc,str-unpack]
            found = self.meanings.of(hot)
            if not isinstance(found, OneHot) or p[found.dim] in out or p[found.dim] not in v:
                return None
        else:
            hot, x = n.args[:2]
            found = self.meanings.of(hot)
            if not isinstance(found, OneHot) or found.dim != rank_of(hot) - 1:
                return None
        into = self.space_of(x)
        if into is None or tuple(self.typing.atoms(hot)[found.dim]) != into.column:  # type: ignore[arg-type]
            return None
        rows = [a for i, d in enumerate(self.typing.atoms(hot)) if i != found.dim for a in d]  # type: ignore[arg-type]
        return self._taken(n, x, found.index, rows)  # type: ignore[arg-type]

    # --- rows named by a predicate -----------------------------------------------------------------

    def kept_rows(self, n: fx.Node) -> Predicate | None:
        """The predicate p when n is x[p], or x[nonzero(p)], for rows of x in order."""
        x: Any = n.args[0]
        into = self.space_of(x)
        mask = picking_mask(n)
        if into is None or mask is None:
            return None
        two = self.meanings.two(mask)
        kept = two.with_yes(lambda yes, no: yes is True and no is False) if two is not None else None
        if kept is None or len(kept.literals) != 1:
            return None
        (literal,) = kept.literals
        predicate = getattr(literal, "predicate", None)
        dims = rank_of(mask)
        own = [a for d in self.typing.atoms(x)[:dims] for a in d]
        if predicate is None or tuple(own) != into.axes or self.typing.flat(mask) != own:
            return None
        return predicate


def slice_start(n: fx.Node, length: Size) -> Size | None:
    start = arg(n, "start")
    start = start.meta.get("val") if isinstance(start, fx.Node) else 0 if start is None else start
    if not _plain(start):
        return None
    start = size(start)
    if isinstance(start, int) and start < 0:
        return length + start
    return start


def _plain(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt))
