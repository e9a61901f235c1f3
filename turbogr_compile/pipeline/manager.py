"""Runs the passes of one phase on one graph.

The manager, not the pass, finds out what changed, keeps metadata right, calls the instruments and survives a
pass that fails: the graph starts over from its input without that pass, and a remark says so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import fx

from .. import _torch
from ..errors import PassError, VerifyError
from ..graph import metadata
from ..graph.phases import Phase
from ..graph.provenance import line_of, line_of_error
from ..graph.streams import stream_of
from .context import Context, RewriteLimit
from .instrument import GraphRun, Instrument, Step
from .pass_base import Pass
from .pipeline import Item, Repeat
from .remarks import CAPTURE, Remark, RemarkKind, warn

log = logging.getLogger("turbogr_compile.pipeline")
Fingerprint = list[Any]


def fingerprint(graph: fx.Graph) -> Fingerprint:
    """What the graph computes and on which streams, names aside; equal fingerprints mean that nothing changed."""
    place = {n: i for i, n in enumerate(graph.nodes)}

    def plain(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return ("%", place[argument])
        if isinstance(argument, (list, tuple)):
            return tuple(plain(a) for a in argument)
        if isinstance(argument, dict):
            return tuple((k, plain(v)) for k, v in argument.items())
        if isinstance(argument, slice):
            return ("slice", plain(argument.start), plain(argument.stop), plain(argument.step))
        # Text keeps 1, 1.0 and True apart, and nan equal to itself.
        return repr(argument)

    return [
        (n.op, n.target if n.op != "placeholder" else "", plain(n.args), plain(n.kwargs), stream_of(n))
        for n in graph.nodes
    ]


class Manager:
    """One phase over one graph."""

    def __init__(self, run: GraphRun, instruments: Sequence[Instrument]) -> None:
        self.run, self.instruments = run, instruments
        self._explaining = any(i.explains for i in instruments)

    def run_all(self) -> None:
        items = self.run.pipeline.ordered(self.run.phase)
        if not items and not self.instruments:
            return
        pristine = _torch.copy_graph(self.run.graph)
        failures: dict[str, str] = {}
        while True:
            try:
                self._run_once(items, failures)
                break
            except PassError as error:
                if self.run.options.on_error == "raise":
                    raise
                self._drop(error, failures)
                self.run.module.graph = _torch.copy_graph(pristine)
        self.run.module.recompile()
        for instrument in self.instruments:
            instrument.finish(self.run)

    def _run_once(self, items: list[Item], failures: dict[str, str]) -> None:
        self.run.steps = []
        self.run.remarks = [r for r in self.run.remarks if r.kind is RemarkKind.FAILED or r.pass_name == CAPTURE]
        self._print = fingerprint(self.run.graph)
        self._stopped = _stops_before(self.run)
        for instrument in self.instruments:
            instrument.start(self.run)
        for item in items:
            if isinstance(item, Repeat):
                self._repeat(item, failures)
            else:
                self._step(item, failures)

    def _repeat(self, item: Repeat, failures: dict[str, str]) -> None:
        seen = [self._print]
        for _ in range(item.limit):
            fired = [p.name for p in item.passes if self._step(p, failures).changed]
            if not fired:
                return
            if self._print in seen:
                text = f"never ends in {item.spec}: {' and '.join(fired)} undo each other; order or merge them"
                self._fail(self.run.steps[-1], PassError(text, pass_name=fired[-1]))
            seen.append(self._print)
        text = (
            f"{item.spec} still changed the graph in round {item.limit}, its limit: repeat(limit: passes) sets another"
        )
        self.run.remarks.append(Remark(RemarkKind.MISSED, "repeat-limit", item.passes[0].name, text))

    def _step(self, pass_: Pass, failures: dict[str, str]) -> Step:
        step = Step(len(self.run.steps) + 1, pass_)
        self.run.steps.append(step)
        step.reason = self._why_not(pass_, failures)
        if step.reason:
            step.status = "failed" if pass_.name in failures else "skipped"
            self._tell("after", step)
            return step
        self._tell("before", step)
        step.began = time.perf_counter()
        try:
            self._apply(step)
        except PassError as error:
            self._fail(step, error)
        except Exception as error:
            at = step.context.at if step.context else None
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raised = PassError(f"raised {what}", node=at.name if at is not None else "")
            raised.__cause__ = error
            self._fail(step, raised)
        finally:
            log.debug("%s: %03d %s %s", self.run.name, step.number, step.pass_.spec, step.status)
        return step

    def _apply(self, step: Step) -> None:
        graph = self.run.graph
        self._seen = metadata.signatures(graph)
        context = step.context = Context(
            pass_=step.pass_, role=self.run.role, target=self.run.target, options=self.run.options, graph=graph,
            words=self.run.words, examples=self.run.examples, explaining=self._explaining,
            limit=self._limit(step.pass_), on_rewrite=lambda _: self._rewritten(step), refresh=self._refresh,
        )  # fmt: skip
        with suppress(RewriteLimit):
            step.pass_.run(graph, context)
        self._stopped = self._stopped or step.pass_.name == self.run.options.stop()[0]
        now = fingerprint(graph)
        step.status = "changed" if now != self._print else "unchanged"
        self._print = now
        if step.changed:
            _lint(graph)
            with context.part("refresh"):
                metadata.refresh(self.run.module, self._seen)
        self.run.remarks += context.remarks
        step.seconds = time.perf_counter() - step.began
        self._tell("after", step)

    def _limit(self, pass_: Pass) -> int | None:
        name, count = self.run.options.stop()
        return count if pass_.name == name else None

    def _rewritten(self, step: Step) -> None:
        """Between two rewrites nobody looks at metadata, unless somebody records each of them."""
        if self._explaining:
            self._refresh()
        self._tell("rewritten", step)

    def _refresh(self) -> None:
        metadata.refresh(self.run.module, self._seen)
        self._seen = metadata.signatures(self.run.graph)

    def _why_not(self, pass_: Pass, failures: dict[str, str]) -> str:
        """Why a pass of the pipeline does not run on this graph; '' when it does."""
        if pass_.name in failures:
            return failures[pass_.name]
        if self.run.role not in pass_.roles:
            return f"not for {self.run.role.value} graphs"
        if self._stopped:
            return f"stop_after={self.run.options.stop_after}"
        lost = [n for n in pass_.needs if n in failures]
        return f"needs {lost[0]}, which failed" if lost else ""

    def _fail(self, step: Step, error: PassError) -> None:
        step.status = "failed"
        step.seconds = time.perf_counter() - step.began
        error.pass_name = error.pass_name or step.pass_.name
        located = _located(error, step, self.run)
        step.reason = str(located)
        for instrument in self.instruments:
            instrument.failed(self.run, step, located)
        raise located from (error.__cause__ or error)

    def _drop(self, error: PassError, failures: dict[str, str]) -> None:
        failures[error.pass_name] = str(error).split("\n", 1)[0]
        self.run.remarks.append(Remark(RemarkKind.FAILED, "pass-failed", error.pass_name, str(error), node=error.node))
        warn(f"{error}\n  the graph goes on without this pass")

    def _tell(self, hook: str, step: Step) -> None:
        for instrument in self.instruments:
            getattr(instrument, hook)(self.run, step)


def _stops_before(run: GraphRun) -> bool:
    """Was the pass to stop after one of an earlier phase?"""
    name = run.options.stop()[0]
    phases = list(Phase)
    return any(p.name == name and phases.index(p.phase) < phases.index(run.phase) for p in run.pipeline.passes())


def _lint(graph: fx.Graph) -> None:
    try:
        graph.lint()
    except Exception as error:
        raise VerifyError(f"left an ill-formed graph: {str(error).splitlines()[0]}") from error


def _located(error: PassError, step: Step, run: GraphRun) -> PassError:
    """The error with pass, rewrite, node, user line, dump and next step."""
    # A node the pass was erasing when it failed is no longer in the graph, but still knows its line.
    at = step.context.at if step.context else None
    node = next((n for n in run.graph.nodes if n.name == error.node), at)
    line = line_of(node) if node is not None else None
    rewrites = step.context.rewrites if step.context else []
    lines = [f"{step.number:03d} {step.pass_.spec} {error}"]
    raised_at = line_of_error(error.__cause__, type(step.pass_).site().path) if error.__cause__ else None
    where = [f"graph {run.name}", f"pass {raised_at or type(step.pass_).site()}"]
    if rewrites:
        where.append(f"rule {rewrites[-1].rule}, rewrite {len(rewrites)}")
    if error.node:
        where.append(f"node %{error.node}")
    lines.append("  " + ", ".join(where))
    if line is not None or error.line:
        lines.append(f"  {line or error.line}")
    if run.options.dump is not None:
        lines.append(f"  graph before: {run.options.dump}/rank*/{run.name}")
    stop = "" if run.options.on_error == "raise" else ", {'on_error': 'raise', 'verify': 'strict'} to stop here"
    lines.append(f"  try: options={{'without': ['{step.pass_.name}']}} to leave it out{stop}")
    located = type(error)("\n".join(lines), pass_name=step.pass_.name, node=error.node, line=str(line or error.line))
    return located
