"""A sign of life for anything that takes longer than a second."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


class Progress:
    """Says what is going on; in a terminal as one line with the seconds, elsewhere as a line per stage."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.text, self.began = stream, "", time.monotonic()
        self._shown = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __call__(self, text: str) -> None:
        self.text = text

    def _watch(self) -> None:
        terminal = self.stream.isatty()
        while not self._done.wait(1.0):
            if terminal:
                self.stream.write(f"\r\x1b[K… {self.text} ({time.monotonic() - self.began:.0f} s)")
                self.stream.flush()
            elif self.text != self._shown:
                self.stream.write(f"… {self.text}\n")
                self.stream.flush()
            self._shown = self.text

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        if self.stream.isatty() and self._shown:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Shown on standard error: standard output holds results only. Call what it yields to say what comes next."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        with Console(stderr=True).status(text) as status:
            yield status.update
        return
    shown = Progress(sys.stderr)
    shown(text)
    shown.start()
    try:
        yield shown
    finally:
        shown.stop()
