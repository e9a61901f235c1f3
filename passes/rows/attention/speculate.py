"""What a tensor that was seen stands for: a pattern of positions, or a mask of two numbers.

A constant is what was seen. Of other tensors it is a guess, made only where gradients do not reach, and checked on
every batch: an average that happens to hold zeros and ones is not a mask, so exactly two values must have been seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .formula import QUERY, Formula, Index
from .language import KEYS, Number
from .numbers import LOW
from .table import Table, combine, one

if TYPE_CHECKING:
    from .evaluate import Evaluator

_PIECES = 4
_LARGEST = 2**26


def pattern(ev: Evaluator, seen: torch.Tensor, index: Index) -> Table | None:
    """A tensor of queries and keys that holds few values, each over a range of distances.

    Where there are no scores, any two axes of one size may be queries and keys: lengths of a batch that grow by one
    make a triangle, too.
    """
    dims = [d for d, s in enumerate(seen.shape) if s > 1]
    if len(dims) != 2 or seen.numel() > _LARGEST:
        return None
    square = seen.shape[dims[0]] == seen.shape[dims[1]]
    rows, columns = (index[d] for d in dims)
    pairs = {bool(QUERY in i.axes) + 2 * bool(i.axes & KEYS) for i in (rows, columns)}
    apart = bool(rows.axes) and bool(columns.axes) and not rows.axes & columns.axes
    if pairs != {1, 2} and not (apart and ev.of_any_axes and square):
        return None
    return _by_distance(ev, seen.reshape([seen.shape[d] for d in dims]), columns - rows)


def _by_distance(ev: Evaluator, m: torch.Tensor, distance: Formula) -> Table | None:
    """m[i, j] as steps of j - i."""
    if (m.is_floating_point() and bool(m.isnan().any())) or not torch.equal(m[1:, 1:], m[:-1, :-1]):
        return None
    values = torch.cat([m[:, 0].flip(0), m[0, 1:]])
    steps = (values[1:] != values[:-1]).nonzero().flatten() + 1
    if not 1 <= len(steps) < _PIECES:
        return None
    found = one(Number.of(values[:1]))
    for at in steps.tolist():
        here, later = found, Number.of(values[at : at + 1])
        reached = ev.test(distance - (at - (m.shape[0] - 1)))
        found = combine(lambda yes, before, now=later: now if yes.value else before, reached, here)
    return found


def two_values(seen: torch.Tensor) -> tuple[float, float] | None:
    """0 and 1, or 0 and a number that removes a score."""
    if seen.dtype == torch.bool or seen.is_complex() or seen.numel() > _LARGEST or bool(seen.isnan().any()):
        return None
    values = seen.unique().tolist()
    if len(values) != 2 or 0 not in values:
        return None
    other = values[0] if values[1] == 0 else values[1]
    removes = seen.is_floating_point() and other <= LOW
    return (0, other) if other == 1 or removes else None
