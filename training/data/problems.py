"""Rows that could not be used: counted by kind, and every one of them located.

    print(histories.problems)
    histories.problems.write("problems.json")

Lines are kept as runs, 16 bytes each, so that even a file of nothing but bad rows takes little room.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import TurbogrError
from ...files import replace_file

FORMAT = 1
SHOWN = 10  # of each kind, with what is wrong in it

KINDS = {
    "fields": "wrong number of fields",
    "missing": "an empty field",
    "number": "a field that is not a number",
    "range": "a number that cannot be",
    "encoding": "bytes that are not UTF-8",
    "nul": "NUL bytes",
    "quotes": "quotes around a field",
    "long": "a line too long to be a row",
    "header": "the header again",
    "blank": "an empty line",
    "truncated": "the file ends in the middle of a row",
    "compression": "compressed data that is damaged or cut",
}


class DataError(TurbogrError):
    """The data as a whole cannot be read; single bad rows never raise."""


@dataclass(frozen=True)
class Problem:
    """One bad row. Lines count from 1, the header included."""

    kind: str
    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class Problems:
    """Bad rows met while reading, and how many rows there were in all."""

    def __init__(self) -> None:
        self.rows = 0  # lines that should have been rows: good + bad
        self.kept = 0  # good rows that are in the histories
        self.filtered = 0  # good rows that `keep` leaves out
        self.short = 0  # good rows of users with too few of them
        self.shown: list[Problem] = []  # the first of each kind
        self._runs: dict[tuple[str, str], array[int]] = {}  # kind, file: first line, last line, first, last, ...
        self._counts: dict[str, int] = {}

    def add(self, kind: str, file: str, line: int, reason: str) -> None:
        """Lines of a file come in order."""
        seen = self._counts.get(kind, 0)
        self._counts[kind] = seen + 1
        if seen < SHOWN:
            self.shown.append(Problem(kind, file, line, reason))
        runs = self._runs.setdefault((kind, file), array("q"))
        if runs and runs[-1] == line - 1:
            runs[-1] = line
        else:
            runs.extend((line, line))

    def add_all(self, kind: str, file: str, lines: np.ndarray, reason: str) -> None:
        """The same for many lines of one kind, without a look at each."""
        for line in lines[:SHOWN].tolist():
            self.add(kind, file, line, reason)
        rest = lines[SHOWN:]
        if len(rest):
            self._counts[kind] += len(rest)
            breaks = np.flatnonzero(np.diff(rest) != 1)
            runs = np.stack([rest[np.append(0, breaks + 1)], rest[np.append(breaks, -1)]], 1).reshape(-1)
            known = self._runs[kind, file]
            if known[-1] == runs[0] - 1:
                known[-1], runs = int(runs[1]), runs[2:]
            known.frombytes(runs.astype(np.int64).tobytes())

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __bool__(self) -> bool:
        return bool(self._counts)

    @property
    def counts(self) -> dict[str, int]:
        """By kind, the most frequent first."""
        return dict(sorted(self._counts.items(), key=lambda item: (-item[1], item[0])))

    @property
    def good(self) -> int:
        return self.kept + self.filtered + self.short

    def lines(self, kind: str | None = None) -> Iterator[tuple[str, int, str]]:
        """File, line and kind of every bad row."""
        for (of, file), runs in self._runs.items():
            if kind in (None, of):
                for first, last in zip(runs[::2], runs[1::2], strict=True):
                    for line in range(first, last + 1):
                        yield file, line, of

    def to_json(self) -> dict[str, Any]:
        """All of it; lines are numbers, or [first, last] where several follow each other."""
        located: dict[str, dict[str, list[int | list[int]]]] = {}
        for (kind, file), runs in self._runs.items():
            pairs = zip(runs[::2], runs[1::2], strict=True)
            located.setdefault(file, {})[kind] = [a if a == b else [a, b] for a, b in pairs]
        return {
            "format": FORMAT,
            "rows": self.rows,
            "kept": self.kept,
            "filtered": self.filtered,
            "short": self.short,
            "bad": len(self),
            "counts": self.counts,
            "kinds": {kind: KINDS[kind] for kind in self.counts},
            "shown": [vars(problem) for problem in self.shown],
            "lines": located,
        }

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Problems:
        if facts.get("format") != FORMAT:
            raise DataError(f"problems of format {facts.get('format')!r}, and this turbogr reads {FORMAT}")
        problems = cls()
        problems.rows, problems.kept = facts["rows"], facts["kept"]
        problems.filtered, problems.short = facts["filtered"], facts["short"]
        problems.shown = [Problem(**shown) for shown in facts["shown"]]
        problems._counts = dict(facts["counts"])
        for file, kinds in facts["lines"].items():
            for kind, runs in kinds.items():
                flat = [(run, run) if isinstance(run, int) else (run[0], run[1]) for run in runs]
                problems._runs[kind, file] = array("q", [line for run in flat for line in run])
        return problems

    def write(self, path: str | Path) -> None:
        """As JSON, all bad rows located."""
        replace_file(Path(path), json.dumps(self.to_json()) + "\n")

    def __str__(self) -> str:
        used = f"{self.rows:,} rows: {self.kept:,} kept"
        left_out = [
            f"{count:,} {why}"
            for count, why in ((self.filtered, "not asked for"), (self.short, "of users with too few"))
            if count
        ]
        if not self:
            return ", ".join([used, *left_out, "none bad"])
        lines = [", ".join([used, *left_out, f"{len(self):,} bad"])]
        for kind, count in self.counts.items():
            lines.append(f"  {count:,} {kind}: {KINDS[kind]}")
            first = [problem for problem in self.shown if problem.kind == kind][:3]
            lines += [f"    {problem}" for problem in first]
        return "\n".join(lines)
