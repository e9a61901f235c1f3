"""Drawing a program: lines written so far, and words chosen from the vocabulary.

A word is a construct of the vocabulary, "slot:name"; a slot is a table of them. A sweep forces a word, so that every
construct occurs in as many programs as asked, however rare it is among random ones.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import TypeVar

from .data import Sizes
from .program import Line

T = TypeVar("T")
VOCABULARY: dict[str, tuple[str, ...]] = {}  # slot: its words


def slot(name: str, table: Mapping[str, T]) -> Mapping[str, T]:
    """Make a table known to sweeps."""
    VOCABULARY[name] = tuple(table)
    return table


class Draw:
    """A program in the making."""

    def __init__(self, seed: int, sizes: Sizes, force: str = "", hostility: float = 0.5) -> None:
        self.random = random.Random(f"{seed}|{force}")
        self.seed, self.sizes, self.force, self.hostility = seed, sizes, force, hostility
        self.lines: list[Line] = []
        self.words: set[str] = set()
        self._count: dict[str, int] = {}

    # --- text ---

    def let(self, name: str, text: str) -> str:
        """Name a value; the text itself where it is a name already."""
        if text.isidentifier():
            return text
        self._count[name] = self._count.get(name, -1) + 1
        fresh = f"{name}{self._count[name]}"
        self.lines.append(Line(fresh, text))
        return fresh

    def columns(self, name: str, dims: int = 1) -> str:
        """A parameter or buffer over columns, as wide as the batch."""
        return f"{name}[{', '.join([':N'] * dims)}]" if self.sizes.open else name

    def latest(self, name: str) -> str:
        """The value of this name that was made last."""
        return f"{name}{self._count[name]}"

    # --- chance ---

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def hostile(self, share: float = 1.0) -> bool:
        return self.chance(self.hostility * share)

    def one(self, *choices: T) -> T:
        return self.random.choice(choices)

    def forced(self, *slots: str) -> bool:
        """Is a word of these slots still to come?"""
        return self.force.partition(":")[0] in slots and self.force not in self.words

    def word(self, slot: str, table: Mapping[str, T], usual: tuple[str, ...] = (), share: float = 0.5) -> T:
        """A word of the table: the forced one, a usual one, or any."""
        wanted_slot, _, wanted = self.force.partition(":")
        if wanted_slot == slot and self.force not in self.words and wanted in table:
            name = wanted
        elif usual and not self.hostile(share):
            name = self.one(*usual)
        else:
            name = self.one(*table)
        self.words.add(f"{slot}:{name}")
        return table[name]


def outer(text: str) -> str:
    """In parentheses unless it binds tighter than any operator."""
    return text if re.fullmatch(r"[\w.]+(\(.*\))?", text) and _balanced(text) else f"({text})"


def _balanced(text: str) -> bool:
    """Does the first parenthesis close at the end?"""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c == ")" and depth == 0:
            return i == len(text) - 1
    return depth == 0
