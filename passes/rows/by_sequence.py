"""Products of rows with the matrix that their sequence has, and the matrix that the rows of a sequence make.

Both as they are said by letters: each dim of an operand has one, and a letter that the result lacks is contracted. Dims
of rows are no letters here: what is left are heads, which both operands have and the result, and dims of one operand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .axes import Typing
from .calls import Size, einsum_labels, op, operand, product, rank_of
from .calls import operands as operands_of
from .spaces import Space

if TYPE_CHECKING:
    from .emit.values import Values
    from .program import RowSet

aten, ops = torch.ops.aten, torch.ops.turbogr

Labels = Sequence[str]
MOST_COPIED = 4  # times as large as a row may be what each row of a sequence gets a copy of


@dataclass(frozen=True)
class Operand:
    """A value whose dims have letters."""

    node: fx.Node
    label: Labels

    def letters(self, t: Typing, space: Space) -> dict[str, Size]:
        """Of dims beside rows, with their sizes; a size of one is none, since it broadcasts."""
        found = {}
        for letter, atoms in zip(self.label, t.atoms(self.node), strict=True):
            size = t.size_of([a for a in atoms if a not in space.axes])
            if size != 1:
                found[letter] = size
        return found

    def row_axes(self, t: Typing, space: Space) -> list[int]:
        return [a for a in t.flat(self.node) if a in space.axes]


@dataclass(frozen=True)
class Times:
    """Rows times the matrices of their sequences; `others` follow."""

    rows: Operand
    matrices: Operand
    others: tuple[Operand, ...]
    contracted: frozenset[str]
    out: Labels


def by_letters(n: fx.Node) -> tuple[list[Operand], list[str]] | None:
    """A product as an einsum: its operands, and the letters of its result. What is contracted has 'z' in a matmul."""
    if op(n) == "einsum":
        labels = einsum_labels(n)
        return labels and (
            [Operand(x, label) for label, x in zip(labels[0], operands_of(n, 1), strict=True)],
            [*labels[1]],
        )
    if op(n) not in ("matmul", "bmm") or min(rank_of(operand(n)), rank_of(operand(n, 1))) < 2:
        return None
    x, y, rank = operand(n), operand(n, 1), rank_of(n)
    out = list(ascii_lowercase[:rank])
    of_x, of_y = [*out[rank - rank_of(x) : -1], "z"], [*out[rank - rank_of(y) : -2], "z", out[-1]]
    return [Operand(x, of_x), Operand(y, of_y)], out


def times(t: Typing, n: fx.Node, space: Space) -> Times | None:
    """A product as rows times matrices; None where that is not what it is, or where a matrix is no larger than rows."""
    letters = by_letters(n)
    if letters is None:
        return None
    operands, out = letters
    for matrices in operands:
        if sorted(matrices.row_axes(t, space)) != sorted(space.sequence) or not space.sequence:
            continue
        for rows in operands:
            others = tuple(x for x in operands if x not in (rows, matrices))
            if sorted(rows.row_axes(t, space)) == sorted(space.axes):
                found = _times(t, rows, matrices, others, out, space)
                if found is not None:
                    return found
    return None


def _times(
    t: Typing, rows: Operand, matrices: Operand, others: tuple[Operand, ...], out: Labels, space: Space
) -> Times | None:
    here, there = matrices.letters(t, space), rows.letters(t, space)
    elsewhere = {*out}.union(*(x.label for x in others))
    contracted = (here.keys() & there.keys()) - elsewhere
    kept = (here.keys() | there.keys()) - contracted
    if not contracted or not kept <= elsewhere or not here.keys() - there.keys():
        return None
    return Times(rows, matrices, others, frozenset(contracted), out) if _is_large(here, there) else None


def _is_large(matrices: dict[str, Size], rows: dict[str, Size]) -> bool:
    """Would a copy for each row be more than is read anyway?"""
    sizes = product(matrices.values()), product(rows.values())
    return not all(isinstance(size, int) for size in sizes) or sizes[0] > MOST_COPIED * sizes[1]


def multiplied(e: Values, n: fx.Node, found: Times, chosen: RowSet) -> fx.Node:
    """The product on packed rows."""
    t, space, out = e.typing, chosen.space, found.out
    rows, matrices = found.rows.letters(t, space), found.matrices.letters(t, space)
    sizes = {**rows, **matrices}
    heads = [c for c in rows if c in matrices and c not in found.contracted]
    inner = [c for c in rows if c in found.contracted]
    beside = [c for c in rows if c not in matrices]  # more than one line of each row
    width = [c for c in matrices if c not in rows]

    def count(letters: Sequence[str]) -> Size:
        return product(sizes[c] for c in letters)

    x = _arranged(e, e.packed(found.rows.node, chosen), rows, [*beside, *heads, *inner], sizes)
    x = e.reshape(x, [-1, count(heads), count(inner)])
    y = _arranged(e, e.flat_rows(found.matrices.node, space.sequence), matrices, [*heads, *inner, *width], sizes)
    y = e.reshape(y, [-1, count(heads), count(inner), count(width)])
    offsets = e.query_offsets(chosen)
    if beside:
        offsets = e.call(aten.mul.Tensor, offsets, e.size(count(beside)))
    have = [*beside, *heads, *width]
    result = e.reshape(e.call(ops.sequence_mm.default, x, y, offsets), [-1, *(sizes[c] for c in have)])
    if found.others:
        texts, values = ["T" + "".join(have)], [result]
        for other in found.others:
            mine = other.letters(t, space)
            of_rows = bool(other.row_axes(t, space))
            value = e.packed(other.node, chosen) if of_rows else e.dense(other.node)
            values.append(e.reshape(value, [*([-1] if of_rows else []), *mine.values()]))
            texts.append(("T" if of_rows else "") + "".join(mine))
            sizes |= mine
        have = [c for c in out if any(c in text for text in texts)]
        result = e.call(aten.einsum.default, f"{','.join(texts)}->T{''.join(have)}", values)
    else:
        result = _arranged(e, result, have, [c for c in out if c in have], sizes)
    return e.reshape(result, [-1, *e.kept_sizes(n, space.axes)])


def makes_matrix(t: Typing, left: Operand, right: Operand, out: Labels, space: Space) -> bool:
    """Is what the rows of a sequence contract to a matrix, to which both operands bring dims of their own?"""
    mine, others = set(left.letters(t, space)), set(right.letters(t, space))
    return bool(mine - others) and bool(others - mine) and mine | others <= set(out)


def made(e: Values, left: Operand, right: Operand, out: Labels, chosen: RowSet) -> fx.Node:
    """What the rows of each sequence contract to, its letters in the order of the result."""
    t, space = e.typing, chosen.space
    mine, others = left.letters(t, space), right.letters(t, space)
    sizes = {**mine, **others}
    heads = [c for c in mine if c in others]
    height, width = [c for c in mine if c not in others], [c for c in others if c not in mine]

    def lines(x: Operand, have: dict[str, Size], ends: list[str]) -> fx.Node:
        value = _arranged(e, e.packed(x.node, chosen), have, [*heads, *ends], sizes)
        return e.reshape(value, [-1, product(sizes[c] for c in heads), product(sizes[c] for c in ends)])

    found = e.call(
        ops.sequence_outer.default, lines(left, mine, height), lines(right, others, width), e.offsets(chosen)
    )
    have = [*heads, *height, *width]
    return _arranged(e, e.reshape(found, [-1, *(sizes[c] for c in have)]), have, [c for c in out if c in have], sizes)


def _arranged(e: Values, x: fx.Node, have: Any, want: Sequence[str], sizes: dict[str, Size]) -> fx.Node:
    """(rows, dims with letters) in another order."""
    order = list(have)
    x = e.reshape(x, [-1, *(sizes[c] for c in order)])
    return x if order == list(want) else e.call(aten.permute.default, x, [0, *(1 + order.index(c) for c in want)])
