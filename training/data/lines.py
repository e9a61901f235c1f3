"""Complete lines of a file, a chunk at a time, whether it is compressed or not, complete or cut."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from .problems import DataError
from .rows import LONGEST

CHUNK = 1 << 19  # bytes
_COMPRESSED = 1 << 16  # bytes that are inflated at a time
_NEWLINE = b"\n"[0]
_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31


@dataclass(frozen=True)
class Chunk:
    """Lines with their ends. The last line of a file may lack it; then one is added, and `unfinished` is set."""

    text: bytes
    line: int  # number of the first one, from 1
    unfinished: bool = False
    damage: str = ""  # of the file, right after these lines


def chunks_of(path: Path, size: int = CHUNK) -> Iterator[Chunk]:
    """Never holds more than a chunk; of a line without end, only as much as shows that it is too long."""
    line, rest, damage = 1, b"", ""
    for block in _blocks(path, size):
        if isinstance(block, Damage):
            damage = block.reason
            break
        text = rest + block
        end = text.rfind(b"\n") + 1
        rest = text[end:]
        if len(rest) > LONGEST:
            rest = rest[: LONGEST + 1]
        if end:
            yield Chunk(text[:end], line)
            line += int(np.count_nonzero(np.frombuffer(text, dtype=np.uint8, count=end) == _NEWLINE))
    if rest or damage:
        yield Chunk(rest + b"\n" if rest else b"", line, bool(rest), damage)


@dataclass(frozen=True)
class Damage:
    """Why a compressed file gives no more."""

    reason: str


def _blocks(path: Path, size: int) -> Iterator[bytes | Damage]:
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == _GZIP
            file.seek(0)
            if compressed:
                yield from _inflated(file, size)
            else:
                while block := file.read(size):
                    yield block
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _inflated(file: BinaryIO, size: int) -> Iterator[bytes | Damage]:
    """All members of a gzip file; what comes before damage is not lost."""
    inflate, waiting = zlib.decompressobj(_GZIP_WINDOW), b""
    while waiting := waiting or file.read(_COMPRESSED):
        if inflate.eof:
            waiting = waiting.lstrip(b"\0")  # padding between and after members
            inflate = zlib.decompressobj(_GZIP_WINDOW) if waiting else inflate
            if not waiting:
                continue
        before = inflate.copy()
        try:
            block = inflate.decompress(waiting, size)
        except zlib.error as error:
            yield _up_to_damage(before, waiting)
            yield Damage(f"compressed data is damaged ({error}); nothing after this line could be read")
            return
        waiting = inflate.unconsumed_tail or inflate.unused_data
        if block:
            yield block
    if not inflate.eof:
        yield Damage("compressed data ends early; nothing after this line could be read")


def _up_to_damage(inflate: Any, waiting: bytes) -> bytes:
    """zlib drops what a call gave before it failed; byte by byte, nothing is lost."""
    found = []
    with contextlib.suppress(zlib.error):
        for at in range(len(waiting)):
            found.append(inflate.decompress(waiting[at : at + 1]))
    return b"".join(found)
