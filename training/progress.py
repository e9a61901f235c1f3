"""One line about the run, while it runs: a bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import deque
from typing import Any, TextIO

RECENT = 20  # steps that rates are taken from
SECONDS = 5.0  # between lines where there is no terminal


class Progress:
    """Shown on standard error: standard output holds results only."""

    def __init__(self, steps: int, done: int, gemm: float, stream: TextIO | None = None, shown: bool = True) -> None:
        self.steps, self.gemm, self.stream = steps, gemm, stream or sys.stderr
        self.quality = ""
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self._shown, self._said = shown, time.monotonic() - SECONDS
        self._bar = _bar(steps, done) if shown and self.stream.isatty() and stream is None else None

    def step(self, line: dict[str, Any]) -> None:
        self._recent.append(line)
        if self._bar:
            bar, task = self._bar
            bar.update(task, completed=line["step"], description=self.text())
        elif self._shown and (time.monotonic() - self._said >= SECONDS or line["step"] == self.steps):
            self._said = time.monotonic()
            self.stream.write(f"step {line['step']}/{self.steps}  {self.text()}\n")
            self.stream.flush()

    def evaluated(self, quality: dict[str, Any]) -> None:
        self.quality = f"  HR@10 {quality['hr@10']:.4f}  NDCG@10 {quality['ndcg@10']:.4f}"

    def text(self) -> str:
        total = {k: sum(line[k] for line in self._recent) for k in ("seconds", "tokens", "padded", "flops")}
        seconds = max(total["seconds"], 1e-9)
        return (
            f"loss {self._recent[-1]['loss']:.4f}  {total['tokens'] / seconds:,.0f} tokens/s  "
            f"padding saved {1 - total['tokens'] / max(total['padded'], 1):.0%}  "
            f"MFU {total['flops'] / seconds / self.gemm:.1%}{self.quality}"
        )

    def close(self) -> None:
        if self._bar:
            self._bar[0].stop()


class Reading:
    """How far reading data is, now and then; nothing where it takes no time."""

    def __init__(self, stream: TextIO | None = None, shown: bool = True) -> None:
        self.stream, self._shown = stream or sys.stderr, shown
        self._began = self._said = time.monotonic()

    def __call__(self, read: int, total: int) -> None:
        now = time.monotonic()
        if self._shown and now - self._said >= SECONDS and read:
            self._said = now
            left = (now - self._began) * (total - read) / read
            self.stream.write(f"reading data: {read / total:.0%} of {total / 1e9:.2f} GB, {left:,.0f} s left\n")
            self.stream.flush()


def _bar(steps: int, done: int) -> tuple[Any, Any] | None:
    if importlib.util.find_spec("rich") is None:
        return None
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Rich

    columns = BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    bar = Rich(*columns, console=_console())
    task = bar.add_task("compiling", total=steps, completed=done)
    bar.start()
    return bar, task


def _console() -> Any:
    from rich.console import Console

    return Console(stderr=True)
