"""Compute the added inputs of the next call while the present one runs.

    for batch in turbogr_compile.ahead(loader):
        loss = step(batch)

The loop looks one batch ahead. A compiled graph that is called with tensors of a batch has its prologue (row indices of
packing, what `offload-sampling` cut out) run for the same tensors of the next batch on a worker thread, and picks the
values up in its next call. Nothing depends on that: a call uses them only if it gets the very tensors that were
announced, unwritten since, and the seed that was guessed; else it computes them itself, and the statistics say why.

The values are awaited when the graph is called: their sizes are sizes of the graph. Waiting later would not make steps
shorter, since the worker has the next batch to do from then on: a step takes as long as the longer of the two.

What providers exchange with other ranks (`prologue.exchanging`) is never dropped, and a rank whose loop ends says so to
the others: a rank that has another batch then raises, and does not wait for ever.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from .. import _torch
from ..errors import TurbogrError
from ..graph.shapes import expression
from .batches import pairs
from .draws import Seeds
from .prologue import KEY, Call, Exchange, Provider, RanksApart, Unprovable, exchanges, reads, supply
from .statistics import RunStatistics
from .worker import on_line, opened

log = logging.getLogger("turbogr_compile.runtime")
Batch = TypeVar("Batch")
_END: Any = object()


def ahead(loader: Iterable[Batch]) -> Ahead[Batch]:
    """The batches of a loader, unchanged and in order; compiled graphs work on the next one while a step runs."""
    return Ahead(loader)


class Ahead(Generic[Batch]):
    """A loader seen one batch ahead; every iteration over it starts the loader anew."""

    def __init__(self, loader: Iterable[Batch]) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        batches, sights = iter(self.loader), _LOOPS.sights
        now = next(batches, _END)
        sight = Sight()
        sights.append(sight)
        complete = False
        try:
            while now is not _END:
                then, failed = _END, None
                try:
                    then = next(batches, _END)
                except Exception as error:  # of the batch after this one, which must not be lost
                    failed = error
                sight.show(now, then)
                yield now
                if failed is not None:
                    raise failed
                now = then
            complete = True
        finally:
            sights.remove(sight)
            sight.close(complete)


def sight_of(x: torch.Tensor) -> Sight | None:
    """The innermost loop under way that has a tensor in its batch."""
    return next((s for s in reversed(_LOOPS.sights) if s.after(x) is not _END), None)


class _Loops(threading.local):
    """Loops over `ahead` that are under way in this thread, the innermost last."""

    def __init__(self) -> None:
        self.sights: list[Sight] = []


_LOOPS = _Loops()


@dataclass
class Announced:
    """A call to come, and its values in the making."""

    call: Call
    written: dict[int, int]  # how often each tensor that is read had been written to
    batch: int
    values: Future[list[Any]]
    used: bool = False


class Sight:
    """What one loop sees: this batch and the next."""

    def __init__(self) -> None:
        self.announced: dict[Any, Any] = {}  # what is in the making, by whom it is for; has `batch` and `values`
        self.batch = 0
        self._now, self._then = _END, _END
        self._next: dict[int, Any] | None = None  # by identity of this batch's tensors
        self._line = opened()
        self._met: dict[Hashable, Exchange] = {}  # those that have gone ahead in this loop
        self._left: dict[Hashable, Future[Any]] = {}
        self._last: Future[Any] | None = None  # exchange that was announced

    def show(self, now: Any, then: Any) -> None:
        self._now, self._then, self._next = now, then, None
        self.batch += 1
        for owner, old in list(self.announced.items()):
            if old.batch < self.batch:
                self._forget(owner)

    @property
    def ends(self) -> bool:
        return self._then is _END

    def after(self, x: torch.Tensor) -> Any:
        """What the next batch has in the place of a tensor of this one; `_END` for other tensors."""
        if self._next is None:
            then = None if self.ends else self._then
            self._next = {id(a): b for a, b in reversed(list(pairs(self._now, then)))}
        return self._next.get(id(x), _END)

    def announce(self, graph: Foresight, call: Call, written: dict[int, int]) -> None:
        old = self.announced.get(graph)
        if old is not None and not graph.differs(old.call, call):
            return
        self._forget(graph)
        for exchange in graph.exchanges:
            exchange.begin(call)
            self._met[exchange.place] = exchange
        keep = bool(graph.exchanges)
        values = self._line.submit(_compute, graph.provide, call, torch.is_inference_mode_enabled(), keep=keep)
        self.announced[graph] = Announced(call, written, self.batch + 1, values)
        if keep:
            self._last = values

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        return self._line.submit(work, *args)

    def leave(self, exchanges: Iterable[Exchange], during: bool) -> None:
        """Say to other ranks that this loop has no further batch, once."""
        for exchange in exchanges:
            if exchange.place in self._met and exchange.place not in self._left:
                self._left[exchange.place] = self._line.submit(exchange.leave(during), keep=True)

    def _forget(self, owner: Any) -> None:
        old = self.announced.pop(owner, None)
        if old is not None and not getattr(owner, "exchanges", ()):
            old.values.cancel()

    def close(self, complete: bool = False) -> None:
        """Nothing waits any more: what has not begun is dropped, what has begun is waited for, and so are exchanges."""
        self.show(_END, _END)
        self.announced.clear()
        # Ranks that have found out that they differ do not meet again.
        apart = self._last is not None and not on_line() and isinstance(self._last.exception(), RanksApart)
        if not apart:
            self.leave(self._met.values(), during=False)
        self._line.close()
        for left in self._left.values():
            error = None if on_line() else left.exception()
            if error is not None and complete:
                raise error
            if error is not None:
                log.error("%s", error)


def _compute(provide: Sequence[Provider], call: Call, inference: bool) -> list[Any]:
    with torch.inference_mode(inference):
        return supply(provide, call)


class Unguessable(Exception):
    """The next call cannot be told from this one; says why."""


class Foresight:
    """Supplies the added inputs of one compiled graph: those computed ahead, where they are those of the call."""

    def __init__(self, graph: fx.Graph, provide: Sequence[Provider], stats: RunStatistics, seeds: Seeds) -> None:
        own = [n for n in graph.find_nodes(op="placeholder") if KEY not in n.meta]
        self.provide, self.stats, self.seeds = provide, stats, seeds
        self.names = [n.name for n in own]
        self.reads = reads(provide)
        self.idle = self.reads is None or not (self.reads or seeds.draws)  # nobody says what is read; constants
        self.exchanges = exchanges(provide)
        self.sizes = _sizes([n.meta.get("val") for n in own])
        self._held: dict[int, weakref.ref[torch.Tensor]] = {}  # inputs that are in no batch, as they were last
        self._why = ""  # nothing was announced

    def __call__(self, call: Call) -> list[Any]:
        if self.idle or not _LOOPS.sights:
            return supply(self.provide, call)
        try:
            values = self._values(call)
        except Unprovable:
            # What the other graph exchanges for this batch comes before anything of the next one.
            if not self.exchanges:
                self._look_ahead(call)
            raise
        self._look_ahead(call)
        return values

    def _values(self, call: Call) -> list[Any]:
        why = self._why or "the first batch of a loop"
        for sight in reversed(_LOOPS.sights):
            found = sight.announced.get(self)
            if found is None:
                continue
            why = self.differs(found.call, call) or self._written(found)
            if not why:
                found.used = True
                return self._await(found)
        self.stats.at_once[why] += 1
        call.kin = self._kin() if self.exchanges else []
        return supply(self.provide, call)

    def _kin(self) -> list[Call]:
        """What an earlier compilation of the same code announced: a rank that compiles anew exchanges nothing twice."""
        frame = self.stats.graph.partition(".")[0]
        found = [
            old for sight in _LOOPS.sights for graph, old in sight.announced.items()
            if isinstance(graph, Foresight) and graph is not self and graph.stats.graph.partition(".")[0] == frame
            and old.batch == sight.batch and not old.used
        ]  # fmt: skip
        for old in found:
            old.used = True
            old.values.exception()
        return [old.call for old in found]

    def differs(self, announced: Call, call: Call) -> str:
        """Why the values of one call are not those of the other; '' when they are."""
        for i in sorted(self.reads or ()):
            mine, theirs = call.inputs[i], announced.inputs[i]
            same = mine is theirs if isinstance(mine, torch.Tensor) else mine == theirs
            if not same:
                return f"input {self.names[i]} is not the one that was announced"
        return "" if announced.seed == call.seed else "other calls that draw, or a new seed, came in between"

    def _written(self, found: Announced) -> str:
        for i, version in found.written.items():
            if _torch.version_of(found.call.inputs[i]) != version:
                return f"input {self.names[i]} was written to after it was announced"
        return ""

    def _await(self, found: Announced) -> list[Any]:
        began = time.perf_counter()
        try:
            values = found.values.result()
        except Unprovable:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise TurbogrError(f"computing ahead for this call of graph {self.stats.graph} failed: {said}") from error
        finally:
            self.stats.waited += time.perf_counter() - began
            self.stats.ahead += 1
        return values

    # --- the next call -----------------------------------------------------------------------------

    def _look_ahead(self, call: Call) -> None:
        sight = self._sight(call)
        if sight.ends:
            self._why = ""
            sight.leave(self.exchanges, during=True)
            return
        try:
            sight.announce(self, *self._next(call, sight))
            self._why = ""
        except Unguessable as reason:
            self._why = str(reason)

    def _sight(self, call: Call) -> Sight:
        """The innermost loop whose batch the call is about; the innermost of all where it is about none."""
        read = [x for i in self.reads or () if isinstance(x := call.inputs[i], torch.Tensor)]
        about = [s for s in _LOOPS.sights if any(s.after(x) is not _END for x in read)]
        return (about or _LOOPS.sights)[-1]

    def _next(self, call: Call, sight: Sight) -> tuple[Call, dict[int, int]]:
        """The next call, and how often each of the tensors it reads has been written to."""
        inputs: list[Any] = [None] * len(call.inputs)
        written: dict[int, int] = {}
        for i in self.reads or ():
            x = call.inputs[i]
            inputs[i] = self._tensor(i, x, sight) if isinstance(x, torch.Tensor) else self._number(i, call, sight)
            if isinstance(x, torch.Tensor):
                written[i] = self._version(i, inputs[i])
        return Call(inputs, self.seeds.next()), written

    def _tensor(self, i: int, x: torch.Tensor, sight: Sight) -> torch.Tensor:
        then = sight.after(x)
        if then is not _END:
            if isinstance(then, torch.Tensor) and then.dtype == x.dtype and then.ndim == x.ndim:
                return then
            raise Unguessable(f"the next batch holds nothing like input {self.names[i]} in its place")
        before, self._held[i] = self._held.get(i), weakref.ref(x)
        if before is not None and before() is not x:
            raise Unguessable(f"input {self.names[i]} is neither a tensor of the batch nor the same in every call")
        return x

    def _number(self, i: int, call: Call, sight: Sight) -> Any:
        """A size of the next batch; any other number is taken to stay."""
        for j, dim in self.sizes.get(i, ()):
            then = sight.after(call.inputs[j])
            if isinstance(then, torch.Tensor) and then.ndim > dim:
                return then.shape[dim]
        return call.inputs[i]

    def _version(self, i: int, x: torch.Tensor) -> int:
        version = _torch.version_of(x)
        if version is None:
            raise Unguessable(f"input {self.names[i]} is an inference tensor: writes to it cannot be seen")
        return version


def _sizes(values: Sequence[Any]) -> dict[int, list[tuple[int, int]]]:
    """Which tensor inputs have a number among the inputs as a size: input and dim."""
    found: dict[int, list[tuple[int, int]]] = {}
    for i, number in enumerate(values):
        if isinstance(number, torch.SymInt):
            found[i] = [
                (j, dim)
                for j, x in enumerate(values) if isinstance(x, torch.Tensor)
                for dim, size in enumerate(x.shape) if expression(size) == expression(number)
            ]  # fmt: skip
    return found
