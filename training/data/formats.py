"""Published files and what to read in them: KuaiRand's logs and MovieLens' ratings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...errors import OptionError, did_you_mean
from . import kuairand
from .lines import chunks_of
from .problems import DataError
from .rows import DIGITS, Column, Layout

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LARGEST = 10**DIGITS - 1
_EARLIEST, _LATEST = 631_152_000, 4_102_444_800  # 1990 and 2100: nothing was logged outside


@dataclass(frozen=True)
class Signal:
    """A column that says whether an interaction counts: where it is `least` or more."""

    column: str
    least: float


@dataclass(frozen=True)
class Format:
    """A kind of file: where users, items and times are, and which interactions can be asked for."""

    kind: str
    user: str
    item: str
    time: str
    columns: tuple[str, ...]  # as published; where there is no header, these are they
    keeps: Mapping[str, Signal | None]  # the first one is the default
    flags: Mapping[str, float]  # columns from 0 up to this number
    delimiter: bytes = b","
    has_header: bool = True
    per_second: int = 1
    row_bytes: int = 24

    def keep(self, name: str | None) -> Signal | None:
        if name is None:
            return next(iter(self.keeps.values()))
        if name not in self.keeps:
            raise OptionError(
                f"keep={name!r}: of {self.kind}, one of {', '.join(self.keeps)}{did_you_mean(name, self.keeps)}"
            )
        return self.keeps[name]

    def layout(self, path: Path) -> Layout:
        """Of this file, by its header where it has one."""
        names, header = (list(self.columns), b"") if not self.has_header else _header(path, self)
        read = [self.user, self.item, self.time, *self.flags]
        missing = [name for name in read if name not in names]
        if missing:
            hints = "".join(did_you_mean(name, names) for name in missing[:1])
            raise DataError(
                f"{path}: no column {', '.join(missing)} in the header {_short(header)}{hints}; "
                f"{self.kind} files have {', '.join(self.columns)}"
            )
        largest = {
            self.user: (0, _LARGEST),
            self.item: (0, _LARGEST),
            self.time: (_EARLIEST * self.per_second, _LATEST * self.per_second),
        }
        columns = [Column(name, names.index(name), *bounds) for name, bounds in largest.items()]
        columns += [Column(name, names.index(name), 0, most, most == 1) for name, most in self.flags.items()]
        return Layout(len(names), tuple(columns), self.delimiter, header)


KUAIRAND = Format(
    kind="kuairand",
    user="user_id",
    item="video_id",
    time="time_ms",
    columns=kuairand.COLUMNS,
    keeps={
        "clicks": Signal("is_click", 1),
        "all": None,
        "long_views": Signal("long_view", 1),
        "likes": Signal("is_like", 1),
    },
    flags={"is_click": 1, "is_like": 1, "long_view": 1},
    per_second=1000,
    row_bytes=70,
)


def _movielens(delimiter: bytes, has_header: bool) -> Format:
    return Format(
        kind="movielens",
        user="userId",
        item="movieId",
        time="timestamp",
        columns=("userId", "movieId", "rating", "timestamp"),
        keeps={"all": None, "likes": Signal("rating", 4)},
        flags={"rating": 5},
        delimiter=delimiter,
        has_header=has_header,
    )


RATINGS = {
    "ratings.csv": _movielens(b",", has_header=True),  # 20M, 25M, 32M, latest
    "ratings.dat": _movielens(b"::", has_header=False),  # 1M, 10M
    "u.data": _movielens(b"\t", has_header=False),  # 100K
}
KINDS = ("auto", "kuairand", "movielens")
_LOG = re.compile(r"log_(?:standard|random)_.*?_(?P<version>[a-z0-9]+?)(?:_part\d+)?\.csv(?:\.gz)?")


def find_files(source: Path, kind: str, standard_only: bool) -> tuple[Format, list[Path]]:
    """The format of a file, or of what is in a folder, and the files to read, in the order of their names."""
    if kind not in KINDS:
        raise OptionError(f"kind={kind!r}: one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    if source.is_file():
        return _format_of(source, kind), [source]
    if not source.is_dir():
        raise DataError(f"{source}: no such file or folder; generate() writes one")
    for folder in (source, source / "data"):
        logs = [p for p in folder.glob("log_*.csv*") if _LOG.fullmatch(p.name)] if folder.is_dir() else []
        if standard_only:
            logs = [p for p in logs if p.name.startswith("log_standard")]
        if logs and kind != "movielens":
            return KUAIRAND, _checked(folder, _once(logs))
    for name in RATINGS if kind != "kuairand" else ():
        for path in (source / name, source / f"{name}.gz"):
            if path.is_file():
                return RATINGS[name], [path]
    wanted = {
        "kuairand": "log_standard_*.csv (in it, or in its folder data)",
        "movielens": ", ".join(RATINGS),
    }
    there = sorted(p.name for p in source.iterdir())[:8]
    raise DataError(
        f"{source}: neither {' nor '.join(wanted[k] for k in wanted if kind in ('auto', k))}; "
        f"it holds {', '.join(there) or 'nothing'}"
    )


def _format_of(path: Path, kind: str) -> Format:
    """By its name, and otherwise by its header."""
    name = path.name.removesuffix(".gz")
    if kind != "movielens" and _LOG.fullmatch(path.name):
        return KUAIRAND
    if kind != "kuairand" and name in RATINGS:
        return RATINGS[name]
    if kind == "kuairand":
        return KUAIRAND
    if name.endswith((".dat", ".data")):
        return RATINGS["ratings.dat" if name.endswith(".dat") else "u.data"]
    if kind == "movielens":
        return RATINGS["ratings.csv"]
    for known in (KUAIRAND, RATINGS["ratings.csv"]):
        if {known.user, known.item} <= set(_header(path, known)[0]):
            return known
    raise DataError(
        f"{path}: neither KuaiRand's columns ({KUAIRAND.user}, {KUAIRAND.item}, ...) nor those of MovieLens "
        f"(userId, movieId, ...) in its first line; say which with kind="
    )


def _once(paths: list[Path]) -> list[Path]:
    """Not both a file and the same compressed."""
    plain = {path.name for path in paths if path.suffix != ".gz"}
    return sorted(path for path in paths if path.suffix != ".gz" or path.stem not in plain)


def _checked(folder: Path, logs: list[Path]) -> list[Path]:
    versions = sorted({found["version"] for path in logs if (found := _LOG.fullmatch(path.name))})
    if len(versions) > 1:
        raise DataError(
            f"{folder}: logs of {', '.join(versions)}, which number users and videos differently; give each a folder"
        )
    return logs


def _header(path: Path, known: Format) -> tuple[list[str], bytes]:
    """Names in the first line, and the line."""
    chunk = next(iter(chunks_of(path, 1 << 16)), None)
    line = b"" if chunk is None else chunk.text.split(b"\n", 1)[0].removesuffix(b"\r").removeprefix(_BYTE_ORDER_MARK)
    text = line.decode(errors="replace")
    return [name.strip().strip('"') for name in text.split(known.delimiter.decode())], line


def _short(header: bytes) -> str:
    text = header[:100].decode(errors="backslashreplace")
    return repr(text) + ("..." if len(header) > 100 else "")
