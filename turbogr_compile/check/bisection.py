"""Which pass, and which of its rewrites, changed the numbers.

Stopping the pipeline after a pass, or after its k-th rewrite, gives the graph as it was there; nothing is left out
from the middle, which would change what later passes see. Every stop is looked at, because a later pass can mask an
error; a binary search is used where looking is expensive, as with a command of the user's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from .. import _torch
from ..graph.provenance import UserLine, line_of
from ..pipeline.context import Rewrite
from ..pipeline.instrument import GraphRun, Instrument, Step
from ..pipeline.manager import Manager
from .numerics import Verdict, compare_graphs


@dataclass(frozen=True)
class Finding:
    """The first stop after which the numbers differ."""

    graph: str
    step: int
    spec: str
    site: str
    verdict: Verdict
    rewrite: int = 0  # 1-based; 0: the pass made no single rewrites
    rewrites: int = 0
    rule: str = ""
    rule_site: str = ""
    line: UserLine | None = None

    @property
    def bad(self) -> str:
        """Value of `stop_after` that shows the fault."""
        return self.spec.split("{")[0] + (f":{self.rewrite}" if self.rewrite else "")

    @property
    def good(self) -> str:
        """Value of `stop_after` just before the fault."""
        return f"{self.spec.split('{')[0]}:{max(self.rewrite - 1, 0)}"

    def __str__(self) -> str:
        lines = [f"{self.graph}: {self.step:03d} {self.spec} ({self.site})"]
        if self.rewrite:
            lines.append(f"  rewrite {self.rewrite} of {self.rewrites}, rule '{self.rule}' ({self.rule_site})")
        if self.line:
            lines.append(f"  {self.line}")
        return "\n".join([*lines, f"  {self.verdict.text}"])


class Snapshots(Instrument):
    """Keeps a copy of each graph as it arrived and after each pass that changed it."""

    def __init__(self) -> None:
        self.runs: list[tuple[GraphRun, fx.Graph, list[tuple[Step, fx.Graph]]]] = []

    def start(self, run: GraphRun) -> None:
        self.runs = [kept for kept in self.runs if kept[0] is not run]
        self.runs.append((run, _torch.copy_graph(run.graph), []))

    def after(self, run: GraphRun, step: Step) -> None:
        if step.changed:
            self.runs[-1][2].append((step, _torch.copy_graph(run.graph)))


def find_culprits(
    snapshots: Snapshots, fast: bool = False, progress: Callable[[str], None] = lambda _: None
) -> list[Finding]:
    """For every graph, the first pass and rewrite after which it computes something else."""
    findings = (_find_culprit(*kept, fast, progress) for kept in snapshots.runs)
    return [f for f in findings if f is not None]


def _find_culprit(
    run: GraphRun, original: fx.Graph, kept: list[tuple[Step, fx.Graph]], fast: bool, progress: Callable[[str], None]
) -> Finding | None:
    def verdict(i: int) -> Verdict:
        progress(f"{run.name}: after {kept[i][0].pass_.spec}")
        return compare_graphs(run.module, original, kept[i][1], run.inputs)

    guilty = first_bad(len(kept), lambda i: verdict(i).wrong, fast)
    return _into_the_pass(run, original, kept[guilty][0], verdict(guilty)) if guilty is not None else None


def first_bad(count: int, bad: Callable[[int], bool], fast: bool) -> int | None:
    """Lowest i with bad(i): by looking at each, or, when `fast`, by halving (which trusts that bad stays bad)."""
    if not fast:
        return next((i for i in range(count) if bad(i)), None)
    if count == 0 or not bad(count - 1):
        return None
    low, high = -1, count - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bad(middle) else (middle, high)
    return high


def _into_the_pass(run: GraphRun, original: fx.Graph, step: Step, verdict: Verdict) -> Finding:
    assert step.context is not None
    finding = Finding(run.name, step.number, step.pass_.spec, str(type(step.pass_).site()), verdict)
    total = len(step.context.rewrites)
    for k in range(1, total + 1):
        module, last = _replay(run, original, f"{step.pass_.name}:{k}")
        now = compare_graphs(module, original, module.graph, run.inputs)
        if now.wrong and last.rewrite is not None:
            rule, site = last.rewrite.rule, last.rewrite.site
            return replace(finding, verdict=now, rewrite=k, rewrites=total, rule=rule, rule_site=site, line=last.line)
    return finding


def _replay(run: GraphRun, original: fx.Graph, stop_after: str) -> tuple[fx.GraphModule, _LastRewrite]:
    """The same passes on the same graph, stopped early."""
    module = fx.GraphModule(run.module, _torch.copy_graph(original))
    options = replace(run.options, stop_after=stop_after)
    again = replace(run, module=module, options=options, steps=[], remarks=[])
    last = _LastRewrite()
    Manager(again, [last]).run_all()
    return module, last


class _LastRewrite(Instrument):
    """Remembers the last rewrite and the user's line it worked on."""

    rewrite: Rewrite | None = None
    line: UserLine | None = None

    def start(self, run: GraphRun) -> None:
        self._lines = {n.name: line_of(n) for n in run.graph.nodes}

    def rewritten(self, run: GraphRun, step: Step) -> None:
        assert step.context is not None
        self.rewrite = step.context.rewrites[-1]
        self._lines |= {n.name: line_of(n) for n in run.graph.nodes}
        self.line = next((self._lines[s] for s in reversed(self.rewrite.sources) if self._lines.get(s)), None)
