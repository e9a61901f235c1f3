"""Generated programs as guards: captured once, analysed, packed and compared with eager under each fault.

A fault that leaves the packed graph and the row indices of every batch as they were changes no number of the program:
only what it changed is run.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import fx

import turbogr_compile
from tests.fuzz.fast import Watch, one_node
from tests.fuzz.judge import Outcome, compare, inputs, open_dims, outcome, tolerance_of
from tests.fuzz.program import Program
from tests.fuzz.work import Work
from turbogr_compile import _torch
from turbogr_compile.backend import Compilation
from turbogr_compile.capture.dynamo import CannotCapture, capture
from turbogr_compile.graph import metadata
from turbogr_compile.graph.phases import Phase, Role
from turbogr_compile.passes.pack_rows import PackRows
from turbogr_compile.pipeline.context import Context
from turbogr_compile.pipeline.manager import fingerprint
from turbogr_compile.runtime import prologue

BEFORE = "remove-noops, fold-views"  # what runs before rows are packed
OFTEN = 40  # calls of a function after which its lines are known
Lines = dict[str, set[int]]


@dataclass
class Seen:
    """What comes of a program: the packed graph, the row indices of each batch, and whether its numbers are eager's."""

    described: str = ""  # the graph when it was described
    graph: str = ""
    rows: list[Any] = field(default_factory=list)
    verdict: str = "same"
    note: str = ""
    loud: str = ""  # a rule or the pass failed, and said so
    work: int = 0  # numbers computed for the first batch
    fallbacks: int = 0

    def same_as(self, other: Seen) -> bool:
        return self.graph == other.graph and self.rows == other.rows and not self.loud


class Prepared:
    """A program up to the moment where its rows are packed. Packing uses it up: do it in a fork."""

    def __init__(self, program: Program) -> None:
        self.program, self.names = program, program.arguments
        fn = program.function()
        self.batches = [inputs(program, k) for k in range(len(program.kinds))]
        self.expected = [outcome(fn, self.names, b) for b in self.batches]
        self.valid = self.expected[0].error is None and not self.expected[0].values["loss"].dim()
        if not self.valid:
            return
        watch = Watch()
        options = {"target": "eager", "verify": "off", "pipeline": BEFORE, "instruments": (watch,)}
        self.compilation = Compilation(turbogr_compile.Options.read(options), "plant")
        module, fakes = one_node(fn, self.names, self.batches[0], open_dims(program))
        self.compilation.examples = _torch.real_inputs(module)
        try:
            self.module: fx.GraphModule = capture(module, fakes).module
        except CannotCapture:
            self.valid = False
            return
        self.compilation._run(Phase.PRE_GRAD, Role.CAPTURED, self.module, fakes)
        self.tolerance = tolerance_of(watch.computes_in)
        self.ops = {str(n.target) for n in self.module.graph.nodes if n.op == "call_function"}

    def try_(self, before: Seen | None) -> Seen:
        """Pack; run the batches whose graph or rows are not those seen before."""
        found = Seen()
        try:
            self._pack(found, before)
        except Exception as error:
            found.loud = f"the pass fails: {type(error).__name__}: {error}".splitlines()[0][:160]
            return found
        found.graph = _text(self.module.graph)
        provide = prologue.providers(self.module.graph)
        self.module.recompile()
        for number, (batch, wanted) in enumerate(zip(self.batches, self.expected, strict=True)):
            self._batch(found, before, number, provide, batch, wanted)
        return found

    def _pack(self, found: Seen, before: Seen | None) -> None:
        graph, module = self.module.graph, self.module
        seen = metadata.signatures(graph)

        def refresh() -> None:
            found.described = _text(graph)
            if before is None or found.described != before.described:
                metadata.refresh(module, seen)

        run = self.compilation._graph_run(Phase.PRE_GRAD, Role.CAPTURED, module, None)
        context = Context(
            pass_=PackRows(), role=Role.CAPTURED, target="eager", options=run.options, graph=graph, words=run.words,
            examples=self.compilation.examples, refresh=refresh,
        )  # fmt: skip
        context.pass_.run(graph, context)
        graph.lint()
        failed = [r for r in context.remarks if r.id == "rule-failed"]
        found.loud = failed[0].text[:160] if failed else ""

    def _batch(
        self, found: Seen, before: Seen | None, number: int, provide: Any, batch: list[torch.Tensor], wanted: Outcome
    ) -> None:
        try:
            rows: Any = prologue.supply(provide, prologue.Call(batch))
        except prologue.Unprovable as refusal:
            found.rows.append(refusal.reason)
            found.fallbacks += 1
            return
        except Exception as error:
            found.rows.append(f"{type(error).__name__}")
            found.verdict, found.note = "crash", f"batch {number}: {type(error).__name__}: {error}"[:160]
            return
        found.rows.append([_plain(r) for r in rows])
        if before is not None and found.graph == before.graph and found.rows[number] == before.rows[number]:
            found.work = before.work if number == 0 else found.work
            return
        kind, text, _ = compare(wanted, outcome(lambda *a: self.module(*a, *rows), self.names, batch), self.tolerance)
        if kind != "same":
            found.verdict, found.note = kind, f"batch {number} ({self.program.kinds[number]}): {text}"[:160]
        elif number == 0 and wanted.error is None:
            with torch.no_grad(), Work(None) as work:
                self.module(*batch, *rows)
            found.work = work.numbers


def _text(graph: fx.Graph) -> str:
    return hashlib.sha1(repr(fingerprint(graph)).encode()).hexdigest()


def _plain(value: Any) -> Any:
    return (str(value.dtype), tuple(value.shape), value.tolist()) if isinstance(value, torch.Tensor) else value


@contextmanager
def traced(folder: str) -> Iterator[Lines]:
    """Lines of the sources in a folder that run meanwhile."""
    lines: Lines = {}
    calls: Counter[Any] = Counter()

    def line(frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "line":
            lines[frame.f_code.co_filename].add(frame.f_lineno)
        return line

    def call(frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(folder):
            return None
        lines.setdefault(name, set()).add(frame.f_lineno)
        calls[frame.f_code] += 1
        return line if calls[frame.f_code] <= OFTEN else None

    sys.settrace(call)
    try:
        yield lines
    finally:
        sys.settrace(None)
