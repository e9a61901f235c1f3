"""Sizes in `dims`, one word each:

T       any size, the same wherever the name occurs
S+1     one more than S; 2*M-1, G*M: the other way round, S and M are found by it and must be whole
T|1     T, or 1 that stands for each of T
...F    any number of sizes
_       any size
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_DIM = re.compile(r"(?:(?P<factor>\w+)\*)?(?P<name>[A-Za-z]\w*)(?P<more>[+-]\d+)?(?P<one>\|1)?$")


@dataclass(frozen=True)
class Dim:
    """One word of `dims`."""

    factor: str
    name: str
    more: int
    one: bool

    @staticmethod
    def parse(word: str) -> Dim:
        found = _DIM.match(word)
        if found is None:
            raise ValueError(f"{word!r} is no size of a contract")
        return Dim(found["factor"] or "", found["name"], int(found["more"] or 0), bool(found["one"]))

    @property
    def text(self) -> str:
        product = f"{self.factor}*{self.name}" if self.factor else self.name
        return f"{product}{self.more:+d}" if self.more else product

    @property
    def names(self) -> list[str]:
        return [self.name, *([self.factor] if self.factor and not self.factor.isdigit() else [])]


@dataclass(frozen=True)
class Shape:
    """`dims` taken apart: sizes in front of ..., its name, sizes behind it."""

    front: tuple[str, ...]
    rest: str | None
    back: tuple[str, ...]

    @staticmethod
    def parse(dims: str) -> Shape:
        words = dims.split()
        at = next((i for i, word in enumerate(words) if word.startswith("...")), None)
        if at is None:
            return Shape(tuple(words), None, ())
        return Shape(tuple(words[:at]), words[at][3:], tuple(words[at + 1 :]))

    @property
    def fixed(self) -> int:
        return len(self.front) + len(self.back)

    def places(self) -> Iterator[tuple[int, str]]:
        yield from enumerate(self.front)
        yield from zip(range(-len(self.back), 0), self.back, strict=True)


# --- of which rules speak ----------------------------------------------------------------------------


def unlike(sizes: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether they are known to differ."""
    pairs = list(zip(sizes, others, strict=False))
    return len(sizes) != len(others) or any(type(a) is int and type(b) is int and a != b for a, b in pairs)


def equal_blocks(rows: int, blocks: int) -> bool:
    """Whether rows can be cut into so many blocks, all as large as the first but the last."""
    return -(-rows // max(-(-rows // max(blocks, 1)), 1)) == blocks
