"""The one way to write and to read files: whole or not at all, and never through what somebody else has put there.

    replace_file(path, text)        # readers see the old file or the new one, also after a crash
    read_json(path)                 # or `Damaged`, which names the file
    with reading(path): ...         # so too for what follows from it
    name_folder(folder, name)       # what was filled beside its place takes it, whole
    unchanged(folder, sums)         # or `Damaged`: files are as they were when `sum_of` was taken of them
    make_private(folder)            # for us alone, parents included
    obstacle(folder)                # why what lies there is not to be trusted, or ''

Only the standard library: kernels and the command line use it before torch is there.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30  # of a file that is read whole

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


# --- writing -----------------------------------------------------------------------------------------


def replace_file(path: Path, content: str | bytes) -> None:
    """Write beside the file, then rename over it; nothing is left behind when that fails.

    The new file has a name that nobody can foresee and must not exist, so that no link is followed and no two threads
    write the same one. A file that was there keeps its mode.
    """
    data = content.encode("utf-8", errors="replace") if isinstance(content, str) else content
    temporary = path.with_name(f".{secrets.token_hex(8)}.partial")
    file = os.open(temporary, _NEW, 0o666)
    try:
        try:
            _keep_mode(path, file)
            _write(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError) and error.strerror and error.filename is None:
            error.filename = str(path)
        raise
    _keep_name(path.parent)


def reserve(path: Path) -> None:
    """Have room on disk for a file that is written through memory: there, a full disk kills the process."""
    if hasattr(os, "posix_fallocate") and (size := path.stat().st_size):
        file = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        try:
            os.posix_fallocate(file, 0, size)
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            os.close(file)


def _keep_mode(path: Path, file: int) -> None:
    try:
        before = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISREG(before):
        os.fchmod(file, stat.S_IMODE(before))


def _write(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _keep_name(folder: Path) -> None:
    """A rename outlives a crash once its folder is on disk; some file systems cannot say so."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


# --- reading -----------------------------------------------------------------------------------------


class Damaged(ValueError):
    """A file is not what its writer made; the message names it."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever goes wrong with data from a file is the file's fault: its form is not checked beforehand."""
    try:
        yield
    except Damaged:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise Damaged(f"{path} is damaged, or of another version ({type(error).__name__}: {error})") from error


def read_text(path: Path, errors: str = "strict") -> str:
    """A regular file of UTF-8; `Damaged` otherwise, and of a pipe at once: nobody may ever write into it."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise Damaged(f"{path} is not a file")
        if found.st_size > MOST_BYTES:
            raise Damaged(f"{path} has {found.st_size} bytes, which is more than turbogr writes")
        data = file.read()
    try:
        return data.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise Damaged(f"{path} is damaged: not UTF-8 at byte {error.start}") from None


def read_json(path: Path, kind: type | tuple[type, ...] = object) -> Any:
    """What a file of JSON holds, which is of this kind; `Damaged` otherwise."""
    try:
        found = json.loads(read_text(path))
    except RecursionError:
        raise Damaged(f"{path} is damaged: nested too deeply") from None
    except Damaged:
        raise
    except ValueError as error:  # of JSON, or of a number with too many digits
        raise Damaged(f"{path} is damaged: {error}") from None
    if not isinstance(found, kind):
        raise Damaged(f"{path} is damaged: it holds a {type(found).__name__}")
    return found


# --- with a sum over what is in them -----------------------------------------------------------------


def sealed(value: Mapping[str, Any]) -> str:
    """JSON that says whether it is as it was written; `read_sealed` reads it."""
    return json.dumps({**value, "crc": _crc(value)}, indent=1) + "\n"


def read_sealed(path: Path) -> dict[str, Any]:
    found = read_json(path, dict)
    if found.pop("crc", None) != _crc(found):
        raise Damaged(f"{path} is damaged: it is not as it was written")
    return found


def _crc(value: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def sum_of(path: Path) -> list[int]:
    """Bytes of a file, and their CRC: against damage, not against malice."""
    size = crc = 0
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            size, crc = size + len(part), zlib.crc32(part, crc)
    return [size, crc]


def unchanged(folder: Path, sums: Mapping[str, Any], names: Iterable[str]) -> None:
    """Every byte of these files is as it was written; `Damaged` says which file is not."""
    for name in names:
        size, path = sums.get(name, [None])[0], folder / name
        if not path.is_file():
            raise Damaged(f"{folder} is damaged: {name} is missing")
        if (found := path.stat().st_size) != size:
            raise Damaged(f"{folder} is damaged: {name} has {found} bytes of {size}")
        if sum_of(path) != sums[name]:
            raise Damaged(f"{folder} is damaged: {name} is not as it was written")


# --- folders -----------------------------------------------------------------------------------------


def name_folder(folder: Path, name: Path) -> None:
    """What has been written into one folder gets its name at once; where that exists already, an OSError."""
    _keep_name(folder)
    os.rename(folder, name)
    _keep_name(name.parent)


def make_private(folder: Path) -> None:
    """Make a folder and the missing ones above it, for this user alone, whatever the umask is."""
    missing = [folder, *folder.parents]
    while missing and missing[-1].exists():
        missing.pop()
    for each in reversed(missing):
        with suppress(FileExistsError):
            each.mkdir(mode=0o700)


def obstacle(folder: Path) -> str:
    """Why what lies in a folder is not to be trusted, or ''; one that is not there yet is fine where it can be made."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        above = next(parent for parent in folder.parents if parent.exists())
        return "" if is_writable(above) else f"{folder} cannot be made: {above} is not writable"
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if foreign(found):
        return f"{folder} belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder} is writable by other users"
    return ""


def foreign(found: os.stat_result) -> bool:
    """Whether a file belongs to neither this user nor the administrator."""
    return found.st_uid not in (os.geteuid(), 0)


def is_writable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
