"""Bad rows of every kind, to see that a reader survives them: what real files suffer from, and then some."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...files import replace_file
from . import kuairand

Fields = list[bytes]
Random = np.random.Generator
Spoiler = Callable[[Fields, Random], bytes]

_USER, _ITEM, _TIME, _CLICK = (kuairand.COLUMNS.index(n) for n in ("user_id", "video_id", "time_ms", "is_click"))

_EXAMPLE = b"1,1,20220421,400,1650485801301,1,0,0,0,0,0,0,1,1,0,0,0,0,0"
_OVERLONG = 0.1  # of those drawn: they take room


def _any(random: Random, *choices: bytes) -> bytes:
    return choices[int(random.integers(len(choices)))]


def _with(fields: Fields, at: int, value: bytes) -> bytes:
    return b",".join([*fields[:at], value, *fields[at + 1 :]])


def _somewhere(fields: Fields, random: Random) -> int:
    return int(random.integers(len(fields)))


def _too_few(fields: Fields, random: Random) -> bytes:
    return b",".join(fields[: int(random.integers(1, len(fields)))])


def _too_many(fields: Fields, random: Random) -> bytes:
    return b",".join([*fields, *[b"0"] * int(random.integers(1, 4))])


def _empty(fields: Fields, random: Random) -> bytes:
    return _with(fields, _somewhere(fields, random), _any(random, b"", b" "))


def _no_number(fields: Fields, random: Random) -> bytes:
    wrong = _any(
        random, b"abc", b"NaN", b"null", b"1.2.3", b"0x1F", b"--5", b"1_000", "４２".encode(), b"12a", b"-", b"."
    )
    return _with(fields, _somewhere(fields, random), wrong)


def _not_whole(fields: Fields, random: Random) -> bytes:
    return _with(fields, int(random.choice([_USER, _ITEM, _TIME])), _any(random, b"1.5", b"1e99", b"inf"))


def _impossible(fields: Fields, random: Random) -> bytes:
    at = int(random.choice([_USER, _ITEM, _TIME, _CLICK]))
    wrong = {_TIME: (b"0", b"1650485801", b"99999999999999"), _CLICK: (b"2", b"-1")}.get(
        at, (b"-3", b"9" * 19, b"9" * 40)
    )
    return _with(fields, at, _any(random, *wrong))


def _wrong_bytes(fields: Fields, random: Random) -> bytes:
    wrong = _any(random, b"\xff\xfe1", "快".encode("gbk"), b"\xc3", b"1\x80")
    return _with(fields, _somewhere(fields, random), wrong)


def _nul(fields: Fields, random: Random) -> bytes:
    return _with(fields, _somewhere(fields, random), _any(random, b"\0", b"1\0", b"\0" * 64))


def _quotes(fields: Fields, random: Random) -> bytes:
    at = _somewhere(fields, random)
    return _with(fields, at, _any(random, b'"' + fields[at] + b'"', b'"', b"'" + fields[at] + b"'"))


def _endless(fields: Fields, random: Random) -> bytes:
    return _with(fields, _somewhere(fields, random), b"1" * int(random.integers(5_000, 50_000)))


def _header(fields: Fields, random: Random) -> bytes:
    return ",".join(kuairand.COLUMNS).encode()


def _blank(fields: Fields, random: Random) -> bytes:
    return _any(random, b"", b"   ", b"\t")


# The kind that a reader must report, and how to make a row of it.
SPOILERS: tuple[tuple[str, Spoiler], ...] = (
    ("fields", _too_few), ("fields", _too_many), ("missing", _empty), ("number", _no_number), ("number", _not_whole),
    ("range", _impossible), ("encoding", _wrong_bytes), ("nul", _nul), ("quotes", _quotes), ("long", _endless),
    ("header", _header), ("blank", _blank),
)  # fmt: skip


def spoil(path: Path, count: int, seed: int = 0) -> list[tuple[int, str]]:
    """Insert `count` bad rows into a CSV file of KuaiRand's schema; good ones stay. Line and kind of each bad one.

    The last one is a row that ends in the middle, as in a download that was cut.
    """
    if count < 1:
        return []
    random = np.random.default_rng((seed, count))
    header, *rows = path.read_bytes().splitlines()
    example = rows or [_EXAMPLE]
    before = np.sort(random.integers(0, len(rows) + 1, size=count - 1))
    written, at, found = [header], 0, []
    for place in before.tolist():
        written += rows[at:place]
        at = place
        fields = example[int(random.integers(len(example)))].split(b",")
        kind, make = SPOILERS[int(random.integers(len(SPOILERS)))]
        if kind == "long" and random.random() > _OVERLONG:
            kind, make = SPOILERS[0]
        written.append(make(fields, random))
        found.append((len(written), kind))
    written += rows[at:]
    cut = example[0].split(b",")[: int(random.integers(2, len(kuairand.COLUMNS)))]
    found.append((len(written) + 1, "truncated"))
    path.write_bytes(b"\n".join([*written, b",".join(cut)]))
    return found


def spoil_folder(folder: Path, count: int, seed: int = 0) -> None:
    """Spread over its files; bad_rows.json lists them as [line, kind] for each file."""
    files = sorted(folder.glob("log_*.csv"))
    listed = {}
    for number, path in enumerate(files):
        share = count // len(files) + (number < count % len(files))
        listed[path.name] = spoil(path, share, seed + number)
    replace_file(folder / "bad_rows.json", json.dumps(listed) + "\n")
