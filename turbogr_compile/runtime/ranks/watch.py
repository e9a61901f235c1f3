"""Who is missing when ranks cannot go on.

    with turbogr_compile.watch_ranks() as watch:
        for step, batch in enumerate(loader):
            watch.step = step
            ...

A rank that dies or hangs makes the others fail within the timeout of their process group, with an error about a
connection. Here each rank says in the job's key-value store that it is there, once a second and on a thread, and leaves
word when it leaves. Then the error is RanksLost, which names the ranks that failed, do not answer, or left early.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
import traceback
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ... import _torch
from ...errors import OptionError, TurbogrError

_NUMBERS = itertools.count()
FINISHED, GAVE_UP = "finished", "gave up waiting for others"  # the latter is no cause
_SIGNS = re.compile(r"gloo|nccl|hccl|ProcessGroup|connection (closed|reset|refused)|socket", re.I)


class RanksLost(TurbogrError):
    """Ranks of the job are gone, hang, or left the others alone; `ranks` says which."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class watch_ranks:
    """Around a training loop, on all ranks. `step` is what the others are told; set it in the loop.

    A rank is missing that has not been heard of for `patience` seconds, which are counted after the error.
    """

    def __init__(self, *, every: float = 1.0, patience: float = 5.0) -> None:
        if not 0 < every < patience:
            raise OptionError(f"watch_ranks: patience must be longer than every, got {patience} and {every}")
        self.every, self.patience = every, patience
        self.step: int | None = None
        self._beats = 0
        self._over = threading.Event()

    def __enter__(self) -> watch_ranks:
        self._many = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() != "fake"
        if self._many:
            self.rank, self.count = dist.get_rank(), dist.get_world_size()
            # A connection of its own: one that waits for a key in another thread would hold this one up.
            store = _torch.default_store().clone()
            self._store = dist.PrefixStore(f"turbogr/watch/{next(_NUMBERS)}", store)
            self._beat()
            self._thread = threading.Thread(target=self._keep_beating, name="turbogr-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if not self._many:
            return
        try:
            if error is None:
                self._leave(FINISHED)
            elif _of_others(error):
                self._explain(error)
            else:
                self._leave(f"failed with {type(error).__name__}: {_line(error)}")
        finally:
            self._over.set()
            self._thread.join()

    # --- what this rank says -----------------------------------------------------------------------

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"beat/{self.rank}", json.dumps([self._beats, self.step]))

    def _keep_beating(self) -> None:
        while not self._over.wait(self.every):
            try:
                self._beat()
            except dist.DistError:  # the store is gone, and the job with it; the loop will find out
                return

    def _leave(self, word: str) -> None:
        try:
            self._store.set(f"word/{self.rank}", json.dumps([self.step, word]))
        except dist.DistError:  # what is under way matters more
            return

    # --- what the others say -----------------------------------------------------------------------

    def _explain(self, error: BaseException) -> None:
        begun = f"rank {self.rank} cannot go on{_at(self.step)}{_during(error)}: {_line(error)}"
        try:
            words, silent, beats = self._roll_call()
        except dist.DistError as gone:
            raise RanksLost(
                f"{begun}\n  the key-value store of the job is gone too: the process that keeps it (rank 0, or "
                "torchrun on the first node) died or left; its output says why",
                [],
            ) from gone
        named = {r: f"{word}{_at(step)}" for r, (step, word) in words.items() if word != GAVE_UP}
        named |= {r: f"does not answer: it died or hangs{_at(beats[r][1], '; last heard of')}" for r in silent}
        self._leave(GAVE_UP)
        lines = [f"rank {r} {text}" for r, text in sorted(named.items())]
        if any(text.startswith(FINISHED) for text in named.values()):
            lines.append("all ranks must take the same number of steps")
        if not named:
            lines = ["all ranks answer: one waits for something else, or takes longer than the timeout of its group"]
            lines += [f"rank {r} {words[r][1] if r in words else 'is'}{_at(beats[r][1])}" for r in beats]
        lines.append("torchrun --max-restarts restarts the job, which goes on from the last checkpoint it loads")
        raise RanksLost(begun + "".join(f"\n  {line}" for line in lines), sorted(named)) from error

    def _roll_call(self) -> tuple[dict[int, list[Any]], list[int], dict[int, list[Any]]]:
        """Words of those that left, who does not answer, and the last beat of each."""
        others = [r for r in range(self.count) if r != self.rank]
        before = {r: self._read(f"beat/{r}", [0, None]) for r in others}
        deadline = time.monotonic() + self.patience
        while True:
            words = {r: found for r in others if (found := self._read(f"word/{r}", None))}
            beats = {r: self._read(f"beat/{r}", [0, None]) for r in others}
            silent = [r for r in others if r not in words and beats[r][0] == before[r][0]]
            if not silent or time.monotonic() > deadline:
                return words, silent, beats
            time.sleep(self.every / 4)

    def _read(self, key: str, default: Any) -> Any:
        return json.loads(self._store.get(key)) if self._store.check([key]) else default


def _of_others(error: BaseException) -> bool:
    """Whether an error says no more than that other ranks did not do their part."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (type(seen) is RuntimeError and _SIGNS.search(str(seen))):
            return True
        seen = seen.__cause__
    return False


def _at(step: int | None, before: str = "") -> str:
    return "" if step is None else f"{before} at step {step}"


def _during(error: BaseException) -> str:
    """The collective, or whatever else of torch.distributed was called, and from where."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if "torch/distributed/" in f.filename and not f.name.startswith(("wrapper", "_"))]
    own = [f for f in frames if "/torch/" not in f.filename and "turbogr_compile/" not in f.filename]
    what = f", in {inside[-1].name}" if inside else ""
    return what + (f" ({own[-1].filename.rpartition('/')[2]}:{own[-1].lineno})" if own else "")


def _line(error: BaseException) -> str:
    """The first sentence, without where in torch's sources it comes from."""
    text = re.sub(r"^\[\S*?([\w.]+):\d+\] ", "", (str(error).splitlines() or [""])[0])
    return text.partition(". ")[0]
