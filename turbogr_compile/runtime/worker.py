"""A worker beside the step: what is put on its line runs in the order in which it was put there.

Ranks that put the same exchanges on their lines in the same order find each other, whatever else they do meanwhile.
So an exchange, once on the line, is never dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

T = TypeVar("T")
THREAD = "turbogr-ahead"


class Line:
    """One thread, alive from the first work until nobody uses the line any more."""

    def __init__(self) -> None:
        self._users = 0
        self._worker: ThreadPoolExecutor | None = None
        self._kept: list[Future[Any]] = []  # what must run, and may not have

    def open(self) -> Line:
        self._users += 1
        return self

    def submit(self, work: Callable[..., T], *args: Any, keep: bool = False) -> Future[T]:
        """`keep` what other ranks wait for, or what must not be lost: the line does not close before it ran."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix=THREAD)
        future = self._worker.submit(work, *args)
        if keep:
            self._kept = [f for f in self._kept if not f.done()] + [future]
        return future

    @property
    def busy(self) -> bool:
        return self._worker is not None

    def close(self) -> None:
        """Of one user; the last one waits for what runs or must run, and drops the rest."""
        self._users -= 1
        if self._users or self._worker is None:
            return
        inside = on_line()  # a garbage collection there ended the loop
        for future in [] if inside else self._kept:
            future.exception()
        self._worker.shutdown(wait=not inside, cancel_futures=not inside)
        self._worker = None


class _Current(threading.local):
    """The line of the loops that are under way in this thread."""

    def __init__(self) -> None:
        self.line: Line | None = None


_CURRENT = _Current()


def opened() -> Line:
    """The line of this thread; `close` it when done."""
    if _CURRENT.line is None or not _CURRENT.line._users:
        _CURRENT.line = Line()
    return _CURRENT.line.open()


def current() -> Line | None:
    """The line of the loops under way in this thread; None outside of loops, and on the line itself."""
    line = _CURRENT.line
    return line if line is not None and line._users else None


def on_line() -> bool:
    return threading.current_thread().name.startswith(THREAD)


@torch.no_grad()
def in_turn(work: Callable[..., T], *args: Any) -> T:
    """Run work after everything that is on the line of this thread; at once where there is none."""
    line = current()
    if line is None or not line.busy:
        return work(*args)
    return line.submit(without_gradient, work, *args, keep=True).result()


def without_gradient(work: Callable[..., T], *args: Any) -> T:
    with torch.no_grad():
        return work(*args)
