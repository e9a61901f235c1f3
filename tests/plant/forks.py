"""A function in a process of its own: what it breaks dies with it."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import Any


class Died(Exception):
    """The process ended without an answer, or did not end."""


def in_a_fork(work: Callable[[], Any], seconds: float) -> Any:
    """What `work` returns. Raises Died."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = pickle.dumps((True, work()))
        except BaseException as error:
            answer = pickle.dumps((False, f"{type(error).__name__}: {error}"[:300]))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(answer)
        os._exit(0)
    os.close(writing)
    said = _all_of(reading, time.time() + seconds)
    if said is None:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not said:
        raise Died("it does not end" if said is None else "the process died")
    ended, value = pickle.loads(said)
    if not ended:
        raise Died(value)
    return value


def _all_of(pipe: int, end: float) -> bytes | None:
    parts = []
    with os.fdopen(pipe, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, end - time.time()))[0]:
            part = file.read(1 << 16)
            if not part:
                return b"".join(parts)
            parts.append(part)
    return None
