"""Histories from published files: streamed, checked row by row, sorted on disk, remembered in a cache.

    histories = open_histories("KuaiRand-1K", cache="cache")
    print(histories, histories.problems, sep="\\n")

Good rows are all used, whatever stands between them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np

from ...errors import OptionError
from ...files import name_folder, read_json, reading, replace_file, reserve, sum_of, unchanged
from .formats import Format, Signal, find_files
from .histories import Histories
from .lines import CHUNK, Chunk, chunks_of
from .problems import DataError, Problems
from .rows import BLANK, Layout, Parsed, parse, shown
from .sorting import PART, Numbering, Parts

CACHE_FORMAT = 2
ARRAYS = ("items", "times", "offsets", "users", "item_ids")
FILES = (*(f"{name}.npy" for name in ARRAYS), "problems.json")
SUMS = "sums.json"  # size and CRC of each of them
DAY = 24 * 3600
GZIP_RATIO = 5  # of bytes after and before inflating, about

BLOCKS, BLOCK = 16, 1 << 16  # of each file, that tell files of one name, size and time apart

NewArray = Callable[[str, int, type], np.ndarray]
Tell = Callable[[int, int], None]  # bytes of text that were read, and that there are, about


def _untold(read: int, total: int) -> None:
    pass


def open_histories(
    source: str | Path,
    kind: str = "auto",
    cache: str | Path | None = None,
    min_length: int = 3,
    keep: str | None = None,
    standard_only: bool = False,
    chunk: int = CHUNK,
    tell: Tell = _untold,
) -> Histories:
    """What users did, from a folder with KuaiRand's or MovieLens' files, or from one file.

    keep           which interactions count. KuaiRand: clicks (the default), all, long_views, likes. MovieLens: all (the
                   default), likes (4 and more)
    min_length     users with fewer interactions are left out
    standard_only  without KuaiRand's log of videos that were shown at random
    cache          a folder: the first call leaves arrays in it, later ones map them into memory, until files change.
                   One folder may serve any number of data sets
    tell           is called with how many bytes of text were read and how many there are, about
    """
    if min_length < 1:
        raise OptionError(f"min_length must be at least 1, not {min_length}")
    known, files = find_files(Path(source), kind, standard_only)
    signal = known.keep(keep)
    if cache is None:
        with tempfile.TemporaryDirectory(prefix="turbogr-") as work:
            return _read(known, files, signal, min_length, chunk, Path(work), _in_memory, tell)
    folder = Path(cache) / f"histories-{_digest(known, files, signal, min_length)}"
    if folder.exists():
        try:
            return _load(folder)
        except (OSError, ValueError, DataError) as error:
            warnings.warn(f"a cache of histories is damaged and made anew: {error}", stacklevel=2)
            _discard(folder)
    _fill(folder, known, files, signal, min_length, chunk, tell)
    return _load(folder)


def _read(
    known: Format, files: list[Path], signal: Signal | None, min_length: int, chunk: int, work: Path, new: NewArray,
    tell: Tell,
) -> Histories:  # fmt: skip
    layouts = [known.layout(path) for path in files]  # before any work: a missing column stops here
    problems = Problems()
    total = sum(map(_text_of, files))
    parts = Parts(work, 1 + total // known.row_bytes // PART)
    before = 0
    try:
        for path, layout in zip(files, layouts, strict=True):
            _read_file(path, layout, known, signal, chunk, parts, problems, partial(_tell_of, tell, before, total))
            before += _text_of(path)
    finally:
        parts.close()
    return _gathered(parts, known.per_second, min_length, problems, work, new, files)


def _read_file(
    path: Path, layout: Layout, known: Format, signal: Signal | None, size: int, parts: Parts, problems: Problems,
    tell: Callable[[int], None],
) -> None:  # fmt: skip
    read = 0
    at = None if signal is None else [column.name for column in layout.columns].index(signal.column)
    for chunk in chunks_of(path, size):
        text, line = chunk.text, chunk.line
        if line == 1 and known.has_header:
            text, line = text.partition(b"\n")[2], 2
        read += len(text)
        tell(read)
        parsed = parse(text, layout)
        problems.rows += parsed.lines
        users, items, times, *_ = parsed.values
        if _cut(chunk, parsed):
            users, items, times = users[:0], items[:0], times[:0]
            problems.add("truncated", path.name, line, f"the file ends in the middle of {shown(text.strip())}")
        else:
            for place, bad in parsed.bad:
                problems.add(bad.kind, path.name, line + place, bad.reason)
            problems.add_all(BLANK.kind, path.name, line + parsed.blank, BLANK.reason)
        if chunk.damage:
            problems.add("compression", path.name, line + parsed.lines, chunk.damage)
            problems.rows += 1
        if at is not None and signal is not None and len(users):
            asked_for = parsed.values[at] >= signal.least
            problems.filtered += int(len(users) - asked_for.sum())
            users, items, times = users[asked_for], items[asked_for], times[asked_for]
        if len(users):
            parts.add(users, items, times)


def _cut(chunk: Chunk, parsed: Parsed) -> bool:
    """The end of a file that lacks its end: complete rows are good, unless the file is known to be cut."""
    return chunk.unfinished and parsed.lines > 0 and bool(parsed.bad or len(parsed.blank) or chunk.damage)


def _gathered(
    parts: Parts, per_second: int, min_length: int, problems: Problems, work: Path, new: NewArray, files: list[Path]
) -> Histories:
    """Parts become one: users by their ids, items by their numbers."""
    numbering = Numbering()
    users, lengths = [], []
    before = problems.rows - len(problems) - problems.filtered
    for number, part in enumerate(parts.sorted(min_length)):
        numbering.meet(part.items)
        users.append(part.users)
        lengths.append(part.lengths)
        np.stack([part.items, part.times // per_second]).tofile(work / f"sorted{number}")
    all_users, all_lengths = np.concatenate(users), np.concatenate(lengths)
    total = int(all_lengths.sum())
    problems.kept, problems.short = total, before - total
    if not total:
        raise DataError(f"{', '.join(path.name for path in files)}: no user has {min_length} interactions\n{problems}")

    order = np.argsort(all_users, kind="stable")
    offsets = new("offsets", len(order) + 1, np.int64)
    offsets[0] = 0
    np.cumsum(all_lengths[order], out=offsets[1:])
    starts = np.empty(len(order), dtype=np.int64)
    starts[order] = offsets[:-1]
    items, times = new("items", total, np.int32), new("times", total, np.int64)
    first = 0
    for number, of_users in enumerate(lengths):
        path = work / f"sorted{number}"
        raw_items, raw_times = np.fromfile(path, dtype=np.int64).reshape(2, -1)
        path.unlink()
        begins = np.cumsum(of_users) - of_users
        shift = starts[first : first + len(of_users)] - begins
        to = np.arange(len(raw_items)) + np.repeat(shift, of_users)
        items[to], times[to] = numbering.number(raw_items), raw_times
        first += len(of_users)
    ids, names = new("item_ids", len(numbering.ids), np.int64), new("users", len(order), np.int64)
    ids[:], names[:] = numbering.ids, all_users[order]
    return Histories(items, times, offsets, names, ids, problems)


def _in_memory(name: str, size: int, dtype: type) -> np.ndarray:
    return np.empty(size, dtype=dtype)


def _text_of(path: Path) -> int:
    """Bytes of a file's text; a guess where it is compressed."""
    return path.stat().st_size * (GZIP_RATIO if path.suffix == ".gz" else 1)


def _tell_of(tell: Tell, before: int, total: int, read: int) -> None:
    tell(min(before + read, total), total)


def _digest(known: Format, files: list[Path], signal: Signal | None, min_length: int) -> str:
    """Of all that decides what comes out."""
    facts = [CACHE_FORMAT, known.kind, str(signal), min_length]
    for path in files:
        status = path.stat()
        # The time of the last change is nobody's to set, unlike that of the last write.
        facts += [path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, _sampled(path, status.st_size)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _sampled(path: Path, size: int) -> int:
    """Of blocks all over a file: data sets that share a cache may share names, sizes and times of their files."""
    found = 0
    with path.open("rb") as file:
        for i in range(BLOCKS):
            file.seek(max(0, size - BLOCK) * i // (BLOCKS - 1))
            found = zlib.crc32(file.read(BLOCK), found)
    return found


def _fill(
    folder: Path, known: Format, files: list[Path], signal: Signal | None, min_length: int, chunk: int, tell: Tell
) -> None:
    """Written beside, then renamed: others see all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    work = Path(tempfile.mkdtemp(prefix=".histories-", dir=folder.parent))
    try:

        def mapped(name: str, size: int, dtype: type) -> np.ndarray:
            path = work / f"{name}.npy"
            array = np.lib.format.open_memmap(path, "w+", dtype, (size,))
            reserve(path)
            return array

        histories = _read(known, files, signal, min_length, chunk, work, mapped, tell)
        for name in ARRAYS:
            getattr(histories, name).flush()
        histories.problems.write(work / "problems.json")
        replace_file(work / SUMS, json.dumps({name: sum_of(work / name) for name in FILES}))
        try:
            name_folder(work, folder)
        except OSError:
            if not folder.exists():  # otherwise somebody else was faster, with the same
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sweep(cache: Path) -> None:
    """What killed runs have left: nothing was written there for a day."""
    for work in cache.glob(".histories-*"):
        with suppress(OSError):
            if max(path.stat().st_mtime for path in (work, *work.iterdir())) < time.time() - DAY:
                shutil.rmtree(work, ignore_errors=True)


def _load(folder: Path) -> Histories:
    """Every byte is as it was written, or this is an error: reading once is little beside a step of training."""
    with reading(folder / SUMS):
        unchanged(folder, read_json(folder / SUMS, dict), FILES)
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    problems = Problems.from_json(read_json(folder / "problems.json", dict))
    return Histories(**arrays, problems=problems)


def _discard(folder: Path) -> None:
    """Out of the way first, so that no other process reads it half removed."""
    away = Path(tempfile.mkdtemp(prefix=".histories-", dir=folder.parent))
    try:
        folder.replace(away / "damaged")
    except OSError as error:
        if folder.exists():
            raise DataError(f"{folder} is damaged and cannot be removed ({error.strerror})") from error
    finally:
        shutil.rmtree(away, ignore_errors=True)
