"""The tests as guards: collected once, and those run that call the function at fault, each fault in a fork.

    python -m tests.plant.suite planted.jsonl tests/passes/rows tests/packing

takes the faults that no program noticed and adds to each which test does.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import io
import json
import os
import pickle
import sys
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from .__main__ import FOLDER, UNNOTICED, answers
from .draw import chosen, modules
from .faults import Fault
from .forks import Died, in_a_fork
from .planting import living, plant

Called = tuple[frozenset[tuple[str, str]], float]  # functions that a test calls, and its seconds
SLOW = 8.0  # seconds of a test that is left out


class Suite:
    """A plugin that takes the place of pytest's loop over the tests."""

    def __init__(
        self, faults: list[tuple[Fault, dict[str, Any]]], kept: Path, out: Path, seconds: float, end: float
    ) -> None:
        self.faults, self.kept, self.out, self.seconds, self.end = faults, kept, out, seconds, end

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        living()
        gc.collect()
        gc.freeze()
        calls = self._calls(session.items)
        print(f"{len(calls)} tests, {len(self.faults)} faults", flush=True)
        counts: Counter[str] = Counter()
        items = {i.nodeid: i for i in session.items}
        for fault, answer in self.faults:
            if time.time() > self.end:
                break
            home = importlib.import_module(fault.module).__file__ or ""
            found = [t for t, (called, took) in calls.items() if _concerns(fault, home, called) and took < SLOW]
            found.sort(key=lambda t: calls[t][1])
            try:
                caught = in_a_fork(
                    lambda f=fault, n=found: self._first_failing(f, [items[t] for t in n]), 60 + 20 * self.seconds
                )  # type: ignore[misc]
            except Died as error:
                caught = str(error)
            counts["caught" if caught else "survived"] += 1
            print(f"{'caught' if caught else 'survived':9} {fault}   {len(found)} tests {caught[:120]}", flush=True)
            with self.out.open("a") as file:
                file.write(json.dumps({**answer, "tests": len(found), "test": caught}) + "\n")
        print(dict(counts))
        return True

    def _calls(self, items: list[pytest.Item]) -> dict[str, Called]:
        known: dict[str, Called] = pickle.loads(self.kept.read_bytes()) if self.kept.exists() else {}
        for item in items:
            if item.nodeid not in known:
                try:
                    known[item.nodeid] = in_a_fork(lambda i=item: _called_by(i), 300)  # type: ignore[misc]
                except Died:
                    known[item.nodeid] = frozenset(), float("inf")
                self.kept.write_bytes(pickle.dumps(known))
        return {i.nodeid: known[i.nodeid] for i in items}

    def _first_failing(self, fault: Fault, items: list[pytest.Item]) -> str:
        plant(fault)
        end = time.process_time() + self.seconds
        for item in items:
            if _fails(item):
                return item.nodeid
            if time.process_time() > end:
                break
        return ""


def _concerns(fault: Fault, home: str, called: frozenset[tuple[str, str]]) -> bool:
    if fault.where.startswith("row_op(") or fault.where.isupper():
        return any(file == home for file, _ in called)
    return (home, fault.where.partition("(")[0]) in called


def _fails(item: pytest.Item) -> bool:
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        reports = runtestprotocol(item, nextitem=None, log=False)
    return any(r.failed for r in reports)


def _called_by(item: pytest.Item) -> Called:
    """Functions of the row analysis, by file and qualified name."""
    found: set[tuple[str, str]] = set()

    def call(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if code.co_filename.startswith(FOLDER):
            found.add((code.co_filename, code.co_qualname.partition(".<locals>")[0]))

    began = time.process_time()
    sys.settrace(call)
    try:
        failed = _fails(item)
    finally:
        sys.settrace(None)
    return (frozenset() if failed else frozenset(found)), time.process_time() - began


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.plant.suite", description=__doc__)
    top.add_argument("planted", type=Path, help="what `python -m tests.plant --out` wrote")
    top.add_argument("tests", nargs="+")
    top.add_argument("--kept", type=Path, required=True, help="file that keeps which functions tests call")
    top.add_argument("--out", type=Path, required=True)
    top.add_argument("--seconds", type=float, default=10, help="of the processor for each fault")
    top.add_argument("--total", type=float, default=float("inf"))
    args = top.parse_args()
    os.environ.setdefault("TURBOGR_VERIFY", "fast")
    done = {a["fault"] for a in answers(args.out)}
    wanted = {a["fault"]: a for a in answers(args.planted) if a["verdict"] in UNNOTICED and a["fault"] not in done}
    faults = [(f, wanted[str(f)]) for f in chosen(modules(), 1.0) if str(f) in wanted]
    suite = Suite(faults, args.kept, args.out, args.seconds, time.time() + args.total)
    return int(pytest.main(["-q", "-p", "no:cacheprovider", *args.tests], plugins=[suite]))


if __name__ == "__main__":
    sys.exit(main())
