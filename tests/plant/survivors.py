"""Faults that no guard notices, each with the reason why it changes no number: `survivors.txt`.

    word | reason | fault

A fault is named without its line, so that edits elsewhere leave the list alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("survivors.txt")
WORDS = {
    "repeated": "another check says the same",
    "never": "what it guards against does not get there: an invariant upstream, named",
    "slower": "it refuses more, asks for more rows, or keeps more: no number depends on it",
    "alike": "the changed text means the same",
    "loud": "without it a rule or the pass fails, with a remark: no number depends on it",
    "text": "a remark, a name or an order is all that depends on it",
}


@dataclass(frozen=True)
class Survivor:
    word: str
    reason: str
    fault: str


def survivors() -> Iterator[Survivor]:
    for line in FILE.read_text().splitlines():
        if line and not line.startswith("#"):
            yield Survivor(*line.split(" | ", 2))


def named(fault: str) -> str:
    """A fault as `Fault.__str__` gives it, without its package and its line."""
    place, _, rest = fault.partition(" ")
    return f"{place.rpartition(':')[0].partition('.rows.')[2]} {rest}"
