"""One case of the sweep in eager and by turbogr, over ragged batches."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import turbogr_compile
from tests.fuzz.fast import Fast
from tests.fuzz.judge import WRONG, compare, outcome, quiet, tolerance_of

from . import idioms
from .cases import Case, Place, batches
from .idioms import Idiom

SECONDS = 20
MOST_RESULTS = 200_000


class TooLong(BaseException):
    """A case that takes longer than a case should; no op's error, so that nobody takes it for one."""


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judged(case: Case | Idiom, dynamo: bool = False) -> dict[str, Any]:
    """{'case', 'status', …}: same, a kind of wrong, pass-error, or skip with the reason."""
    record: dict[str, Any] = {"case": case.text}
    try:
        with quiet(), limited():
            fn, names, values, ids = prepared(case, record)
            return record | _compared(fn, names, values, ids, dynamo)
    except Skip as why:
        return record | {"status": "skip", "why": str(why)}
    except TooLong:
        return record | {"status": "skip", "why": "takes too long"}


class Draws(TorchDispatchMode):
    """Are random numbers drawn? An op that seeds itself first gives the same every time, and other numbers traced."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class Skip(Exception):
    """Nothing can be asked: eager does not run, or gives something else every time."""


def prepared(
    case: Case | Idiom, record: dict[str, Any]
) -> tuple[Callable[..., Any], list[str], list[torch.Tensor], list[torch.Tensor]]:
    """The loss as a function of ids and tensors, and what to call it with."""
    if isinstance(case, Idiom):
        given, ids = idioms.arguments(), batches(idioms.B, idioms.N)

        def fn(ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            return case.loss(ids, *rest)

    else:
        at = _located(case, record)
        try:
            given = case.tensors()
        except Exception as error:
            raise Skip(f"tables: {type(error).__name__}") from error
        ids, order = batches(case.place.B, case.place.N), list(given)

        def fn(ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            return case.loss(ids, dict(zip(order, rest, strict=True)), at)

    return fn, ["ids", *given], list(given.values()), ids


def _located(case: Case, record: dict[str, Any]) -> Sequence[Place | None]:
    try:
        with torch.no_grad():
            at = case.found()
            ids, given = batches(case.place.B, case.place.N)[2], case.tensors()
            torch.manual_seed(0)
            with Draws() as draws:
                first = case.value(ids, given)
            torch.manual_seed(1)
            again = case.value(ids, given)
    except Exception as error:
        raise Skip(f"eager: {type(error).__name__}: {str(error)[:80]}") from error
    if not first or sum(y.numel() for y in first) > MOST_RESULTS:
        raise Skip("no result, or a large one")
    if draws.seen or any(not torch.equal(a[a == a], b[b == b]) for a, b in zip(first, again, strict=True)):
        raise Skip("random")
    record["rows"] = [p.text if p else "mix" for p in at]
    return at


def _compared(
    fn: Callable[..., Any], names: list[str], values: list[torch.Tensor], ids: list[torch.Tensor], dynamo: bool
) -> dict[str, Any]:
    expected = [outcome(fn, names, [i, *values]) for i in ids]
    if expected[0].error is not None:
        raise Skip(f"eager: {type(expected[0].error).__name__}: {str(expected[0].error)[:80]}")
    found: dict[str, Any] = {"status": "same", "notes": []}
    if dynamo:
        torch._dynamo.reset()
        run, watch = turbogr_compile.compile(fn, target="eager", verify="fast", worth="always"), None
    else:
        try:
            fast = Fast(fn, names, [ids[0], *values])
        except Exception as error:
            return {"status": "crash", "notes": [f"compiling: {type(error).__name__}: {str(error)[:200]}"]}
        run, watch = fast.run, fast.watch
    tolerance = tolerance_of(watch.computes_in if watch else set()) * 10
    for number, (i, wanted) in enumerate(zip(ids, expected, strict=True)):
        kind, text, _ = compare(wanted, outcome(run, names, [i, *values]), tolerance)
        if kind == "same":
            continue
        found["notes"].append(f"batch {number}: {text}")
        if found["status"] == "same" or WRONG.index(kind) < WRONG.index(found["status"]):
            found["status"] = kind
    if watch is not None:
        calls = fast.stats.calls - sum(fast.stats.fallbacks.values())
        found["packed"] = calls > 0
        found["through"] = calls > 0 and watch.looks_up_packed is not False  # packed before the op, so also in it
        found["missed"] = [f"{r.id}: {r.text}" for r in watch.remarks if r.kind.value == "missed"]
        failed = [*watch.failed_passes, *(text for text in found["missed"] if text.startswith("rule-failed"))]
        if failed and found["status"] == "same":
            found["status"], found["notes"] = "pass-error", [failed[0][:300]]
    return found
