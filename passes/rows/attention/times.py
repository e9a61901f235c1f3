"""Buckets of time: from a lookup's index back to the gap between two times, and the bounds of its buckets.

The bounds are found by evaluating the very function that makes buckets out of gaps, so that they are right to the
last gap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...._torch import outside_compilation
from ..calls import called, is_tensor, op
from .calls import arguments, value
from .formula import KEY, QUERY, Index, Sizes, axes_of, written
from .indexing import broadcast, follow
from .language import Unknown

_FARTHEST = (2**63 - 1, 2**62)  # adding 1 to the former overflows, which no clock has reached
_NEVER_DECREASES = {"log", "log1p", "log2", "log10", "sqrt", "floor", "ceil", "round", "trunc", "relu", "clamp",
                    "clamp_min", "clamp_max"}  # fmt: skip
_WHOLE = (torch.int64, torch.int32)


@dataclass(frozen=True)
class Times:
    node: fx.Node
    index: Index

    def __str__(self) -> str:
        return f"{self.node.name}{written(self.index)}"


@dataclass(frozen=True)
class Gap:
    """|query time - key time|, the ops that make a bucket of it, and the largest gap whose bucket the table has."""

    query: Times
    key: Times
    steps: tuple[fx.Node, ...]
    most: int | None = None

    def __str__(self) -> str:
        return f"|{self.query} - {self.key}|"


def gap_of(node: fx.Node, index: Index, sizes: Sizes) -> Gap | None:
    """The gap that a bucket is made of; None where it is not made of one."""
    steps: list[fx.Node] = []
    while True:
        node, index = follow(sizes, node, index)
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not is_tensor(source):
            return None
        if op(node) == "abs":
            return _sides(source, broadcast(source, index), tuple(steps[::-1]), sizes)
        if not never_decreases(node):
            return None
        steps.append(node)
        node, index = source, broadcast(source, index)


def _sides(node: fx.Node, index: Index, steps: tuple[fx.Node, ...], sizes: Sizes) -> Gap | None:
    node, index = follow(sizes, node, index)
    try:
        args = arguments(node, ("self", "other")) if op(node) == "sub" else {}
    except Unknown:
        return None
    if not args or value(node).dtype != torch.int64 or not all(is_tensor(args[n]) for n in ("self", "other")):
        return None
    sides = [Times(*follow(sizes, x, broadcast(x, index))) for x in (args["self"], args["other"])]
    if any(value(s.node).dtype != torch.int64 for s in sides):
        return None
    for query, key in (sides, sides[::-1]):
        found = [axes_of(side.index) & {QUERY, KEY} for side in (query, key)]
        if found == [{QUERY}, {KEY}]:
            return Gap(query, key, steps)
    return None


def never_decreases(node: fx.Node) -> bool:
    """A step of numbers alone that keeps the order of numbers that are not negative."""
    name, others = op(node), [*node.args[1:], *node.kwargs.values()]
    if len(node.all_input_nodes) != 1 or any(isinstance(x, fx.Node) for x in others):
        return False
    if name in ("_to_copy", "to"):
        dtype = value(node).dtype
        return dtype.is_floating_point or dtype in _WHOLE
    if name in ("mul", "div"):
        return isinstance(node.args[1], (int, float)) and node.args[1] > 0
    if name in ("add", "sub"):
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        return isinstance(node.args[1], (int, float)) and isinstance(alpha, (int, float)) and alpha > 0
    if name == "floor_divide":
        return isinstance(node.args[1], (int, float)) and node.args[1] > 0
    return name in _NEVER_DECREASES


def buckets(gap: Gap, entries: int) -> tuple[int, tuple[int, ...], Gap] | None:
    """The bucket of equal times, the smallest gaps that belong to the next ones, and the gap with its largest."""

    def bucket(gaps: torch.Tensor) -> torch.Tensor:
        for step in gap.steps:
            gaps = called(step)(gaps, *step.args[1:], **step.kwargs)
        return gaps

    try:
        with outside_compilation(), torch.no_grad():
            found = bucket_bounds(bucket, entries)
    except Exception:
        return None  # a step that does not run on gaps: nothing is known
    if found is None:
        return None
    first, bounds, most = found
    return first, bounds, replace(gap, most=most)


def bucket_bounds(
    bucket: Callable[[torch.Tensor], torch.Tensor], entries: int
) -> tuple[int, tuple[int, ...], int | None] | None:
    """The bucket of gap 0, the smallest gap of each later one, and the largest gap that has one; None: all have.

    `bucket` must not decrease; `entries` is the number of buckets there are.
    """
    for farthest in _FARTHEST:
        seen = bucket(_samples(farthest)).long()
        if bool((seen[1:] >= seen[:-1]).all()):
            break
    else:
        return None
    first, last = int(seen[0]), int(seen[-1])
    if first < 0 or first >= entries or last <= first:
        return None
    beyond = last >= entries
    wanted = torch.arange(first + 1, min(last, entries) + 1)
    below, reached = torch.zeros_like(wanted), torch.full_like(wanted, farthest)
    while bool((reached - below > 1).any()):
        middle = below + (reached - below) // 2
        far_enough = bucket(middle).long() >= wanted
        below, reached = torch.where(far_enough, below, middle), torch.where(far_enough, middle, reached)
    bounds = reached.tolist()
    if not beyond:
        return first, tuple(bounds), None
    return first, tuple(bounds[:-1]), bounds[-1] - 1


def _samples(farthest: int) -> torch.Tensor:
    """Gaps of all magnitudes, ascending."""
    powers = 2 ** torch.arange(59)
    return torch.cat([torch.arange(1024), *(powers * k // 7 for k in range(7, 15)), torch.tensor([farthest])]).unique()
