"""Option `capacity`: packed rows in a few sizes instead of any size, by dummy rows that influence nothing.

The number of rows of a row set is the data's, another one for each batch. Rounded up to a bucket it takes few values:
memory is reused from step to step, and a target that wants static shapes compiles one graph per combination of buckets
(`specialize.py`). The prologue rounds; the packed graph is the same for every size.

A dummy row repeats the last row of its set. Every index of a row (into padded values, tables, other sets) is repeated
with it, so that ops which compute a row from the same row give the last row's values again: as finite as a row that
counts, whatever the model does. What a dummy may not do is leave the set, and rows leave a set in these ways only:

  scattered to padded rows, or added up by sequence   dummies go to one row more than there are, which is cut off
  added up over the whole set                         dummies are multiplied by zero, on the side that is a weight
                                                      where there is one, so that losses are still fused
  a scalar cross-entropy                              a dummy's target is `ignore_index`: neither summed nor counted
  gathered by another set, shifted, concatenated      places of real rows only; a dummy there reads what its own set's
                                                      last row reads
  keys of an attention                                dummies lie behind the last offset and belong to no sequence
  queries of an attention                             dummies are further queries of the last row's sequence, and nobody
                                                      reads their results
  a softmax over the rows of a sequence               dummies belong to no sequence; the last row's weight is repeated
                                                      afterwards
  x[mask], dense_to_jagged                            the number of rows is seen by the model: gathered from the rounded
                                                      set into a set of its own, which is not rounded

So the gradient of every dummy is exactly zero, and zero times a finite value is what it adds to weights and tables.
Random numbers are the exception to "the same values": a dummy draws its own dropout mask.

A set is rounded to at most all rows there are. A batch with more rows than the largest bucket runs the captured graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..errors import OptionError

POWERS = "pow2"


@dataclass(frozen=True)
class Capacity:
    """Sizes that numbers of rows are rounded up to: multiples of `step`, powers of two, or `sizes`."""

    step: int | None = None
    sizes: tuple[int, ...] = ()

    @staticmethod
    def read(value: Any) -> Capacity | None:
        """From an option: None, a number, 'pow2', '64,128', a sequence of numbers."""
        if value is None or isinstance(value, Capacity):
            return value
        given = value
        if isinstance(value, str):
            if value.strip() == POWERS:
                return Capacity()
            parts = value.split(",")
            if not all(part.strip().isdecimal() for part in parts):
                raise _refused(given)
            numbers = [int(part) for part in parts]
            value = numbers[0] if len(numbers) == 1 else numbers
        if _is_count(value):
            return Capacity(step=value)
        if not isinstance(value, Sequence) or not value or not all(map(_is_count, value)):
            raise _refused(given)
        if any(a >= b for a, b in pairwise(value)):
            raise _refused(given, ": buckets must ascend")
        return Capacity(sizes=tuple(value))

    def rounded(self, rows: int) -> int | None:
        """The smallest bucket for so many rows; None where all are smaller."""
        if self.step is not None:
            return -(-rows // self.step) * self.step
        if self.sizes:
            return next((size for size in self.sizes if size >= rows), None)
        return 1 << max(rows - 1, 0).bit_length()

    def __str__(self) -> str:
        if self.step is not None:
            return f"multiples of {self.step}"
        return ", ".join(map(str, self.sizes)) if self.sizes else "powers of two"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _refused(value: Any, why: str = "") -> OptionError:
    return OptionError(
        f"option 'capacity' takes a number of rows to round up to multiples of (64), 'pow2', or ascending bucket sizes "
        f"such as (256, 1024) or '256,1024'; got {value!r}{why}"
    )
