"""A folder of compiled libraries that one user's processes share.

A library's name ends in a digest of its content, so a damaged file is known before it is loaded: loading a truncated
library can end the process. Only the owner may write into the folder, because what lies there is run.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any


def _files() -> Any:
    """Looked up late: a source tree on the path offers this folder as a package `kernels` to whoever looks for one."""
    from ... import files

    return files


KEPT = 8  # libraries, unless a cache is told otherwise
STALE_SECONDS = 3600  # a build folder this old belongs to a process that died
PATIENCE_SECONDS = 600  # for another process that builds; then this one builds too, which is right though wasteful


class Refused(OSError):
    """Why a folder cannot be used."""


def user_folder() -> Path:
    """$TURBOGR_CACHE_DIR, else turbogr in $XDG_CACHE_HOME, else in ~/.cache."""
    if named := os.environ.get("TURBOGR_CACHE_DIR"):
        return Path(named).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "turbogr"
    except RuntimeError:
        raise Refused("there is no home folder") from None


class Cache:
    def __init__(self, folder: Path, kept: int = KEPT) -> None:
        """Refused where the folder is not to be trusted or cannot be made."""
        self.folder, self.kept = folder, kept
        try:
            _files().make_private(folder)
        except NotADirectoryError:
            pass  # the obstacle says so
        except OSError as error:
            raise Refused(f"{folder} cannot be made ({error.strerror})") from error
        if reason := _files().obstacle(folder):
            raise Refused(reason)

    def find(self, stem: str) -> Path | None:
        """The newest library whose name starts so and that is as it was written."""
        return next((path for path in _newest_first(self.folder.glob(f"{stem}-*.so")) if _sound(path)), None)

    def keep(self, built: Path, stem: str) -> Path:
        """Moves a library into place, whole or not at all."""
        path = self.folder / f"{stem}-{_digest(built)}.so"
        built.chmod(0o700)
        os.replace(built, path)
        self.discard(self.log(stem))
        self._tidy(path)
        return path

    def log(self, stem: str) -> Path:
        """Where the compiler's messages go when a library cannot be made."""
        return self.folder / f"{stem}.log"

    def discard(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()

    @contextmanager
    def workplace(self) -> Iterator[Path]:
        """An empty folder on the same file system, gone afterwards."""
        try:
            place = tempfile.mkdtemp(prefix="build-", dir=self.folder)
        except OSError as error:
            raise Refused(f"{self.folder} cannot be written ({error.strerror})") from error
        try:
            yield Path(place)
        finally:
            shutil.rmtree(place, ignore_errors=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time. The lock dies with its process; one that hangs is waited for, but not forever."""
        import fcntl

        try:
            file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Refused(f"{self.folder} cannot be written ({error.strerror})") from error
        try:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while time.monotonic() < deadline:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    time.sleep(0.05)
                except OSError:
                    break  # a file system without locks
                else:
                    break
            yield
        finally:
            os.close(file)

    def _tidy(self, newest: Path) -> None:
        """Libraries unused for longest go, and what processes left that died while building."""
        others = [path for path in self.folder.glob("*.so") if path != newest]
        logs = self.folder.glob("*.log")
        for path in [*_newest_first(others)[self.kept - 1 :], *_newest_first(logs)[self.kept :]]:
            self.discard(path)
        for place in self.folder.glob("build-*"):
            if time.time() - _time(place) > STALE_SECONDS:
                shutil.rmtree(place, ignore_errors=True)


@lru_cache(maxsize=1)
def temporary_folder() -> Path:
    """A folder for this process alone, gone when it ends."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="turbogr-"))
    except OSError as error:
        raise Refused(f"there is no temporary folder ({error.strerror})") from error
    owner = os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _sound(path: Path) -> bool:
    """Ours, and as it was written."""
    try:
        return not _files().foreign(path.stat()) and path.stem.endswith(f"-{_digest(path)}")
    except OSError:
        return False


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=_time, reverse=True)


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
