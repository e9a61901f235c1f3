"""Products of two tensors as contractions with labels, however they are spelled."""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from ..calls import is_tensor, op, rank_of
from .calls import arguments, shape
from .formula import ZERO, Formula, Index
from .indexing import tidy

PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "mm"}
Labels = tuple[str, ...]


@dataclass(frozen=True)
class Contraction:
    """out[labels] = sum over labels that `out` lacks of left[labels] · right[labels]; a size of one is broadcast."""

    node: fx.Node
    left: fx.Node
    right: fx.Node
    left_labels: Labels
    right_labels: Labels
    out_labels: Labels

    def sides(self) -> Iterable[tuple[fx.Node, Labels, fx.Node, Labels]]:
        yield self.left, self.left_labels, self.right, self.right_labels
        yield self.right, self.right_labels, self.left, self.left_labels

    @property
    def contracted(self) -> set[str]:
        return {c for c in self.left_labels if c in self.right_labels and c not in self.out_labels}


def contraction(node: fx.Node) -> Contraction | None:
    """A product of two tensors with dims; None where it is none, or one that is not modelled."""
    name = op(node)
    if name == "einsum":
        return _einsum(node)
    if name not in PRODUCTS:
        return None
    first = 1 if name == "baddbmm" else 0
    left, right = node.args[first : first + 2]
    if not is_tensor(left) or not is_tensor(right) or rank_of(left) < 2 or rank_of(right) < 2:
        return None
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    batch = tuple(f"batch{d}" for d in reversed(range(max(rank_of(left), rank_of(right)) - 2)))
    own = [batch[len(batch) - (rank_of(x) - 2) :] for x in (left, right)]
    return Contraction(
        node, left, right, (*own[0], "rows", "inner"), (*own[1], "inner", "columns"), (*batch, "rows", "columns")
    )


def _einsum(node: fx.Node) -> Contraction | None:
    args = arguments(node, ("equation", "tensors"))
    text, tensors = args["equation"].replace(" ", ""), args["tensors"]
    if "->" not in text or len(tensors) != 2:
        return None
    operands, out = text.split("->")
    sides = operands.split(",")
    # "..." stands for as many dims as an operand has beyond its letters, aligned at their ends.
    counts = [
        rank_of(x) - len(side.replace("...", "")) if "..." in side else 0
        for side, x in zip(sides, tensors, strict=True)
    ]
    free = [c for c in string.ascii_uppercase if c not in text][: max(counts)]
    if len(free) < max(counts):
        return None
    left, right = (s.replace("...", "".join(free[len(free) - n :])) for s, n in zip(sides, counts, strict=True))
    out = out.replace("...", "".join(free))
    alone = set(left) ^ set(right)
    if any(len(set(side)) != len(side) for side in (left, right, out)) or not alone <= set(out):
        return None  # a diagonal, or a sum over a dim that one side has alone
    sizes = [dict(zip(side, shape(x), strict=True)) for side, x in zip((left, right), tensors, strict=True)]
    if any(sizes[0][c] != sizes[1][c] for c in left if c in right and c not in out):
        return None  # one side is broadcast along what is contracted
    return Contraction(node, tensors[0], tensors[1], tuple(left), tuple(right), tuple(out))


def placed(node: fx.Node, labels: Labels, at: Mapping[str, Formula]) -> Index:
    """The index of an operand, given the formula that each label stands for."""
    return tidy(node, tuple(at.get(c, ZERO) for c in labels))
