"""Translation validation: a compiled graph is tried against the graph as it was captured, before it is trusted.

`verify="validate"`, the default, tries the first call of each graph that a pass rewrote: on the caller's batch, and on
a batch made of it in which sequences have other lengths (disturbance.py). `verify="shadow:3"` compares the first calls
as they come, and says aloud what cannot be compared. Both run on stand-ins; nothing that the step writes is written
twice.

A compiled graph that differs is not used: all its calls run the captured graph, and a remark names the pass.

What is not tried, and why, is a remark: a step whose padded form is larger than the budget, one that exchanges data
with other ranks, one whose random numbers are drawn elsewhere once it is compiled. Dropout is switched off in both
graphs while they are compared; the passes are then tried, and code generation is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from .. import _torch
from ..errors import VerifyError
from ..graph import costs
from ..graph.nodes import is_collective
from ..graph.phases import Phase
from ..graph.provenance import line_of
from ..pipeline.instrument import GraphRun, Instrument
from ..pipeline.remarks import Remark, RemarkKind, warn
from ..runtime.prologue import Call, InputRows, Provider, Unprovable, rows_of, supply
from ..runtime.prologue import draws as drawn_outside
from ..runtime.statistics import RunStatistics
from .comparison import Comparison, NotComparable
from .disturbance import disturbed

DIFFERS = "differs from the captured graph"
GIB = 1 << 30
_SHOWN = 3
_SHARES = ("p", "dropout_p", "dropout")
_SWITCHES = ("train", "training")


@dataclass(frozen=True)
class Plan:
    """How much is compared."""

    calls: int  # of each compiled graph
    disturbed: bool = False  # also a batch with other lengths, made of the first
    aloud: bool = True  # what cannot be compared is a warning
    flops: float = float("inf")  # of the captured forward: more is not tried
    bytes: float = float("inf")  # of everything the captured forward computes


SHADOW_CALLS = 3
# About ten seconds and as much memory as a small machine has to spare, for what is done once per graph.
VALIDATION = Plan(calls=1, disturbed=True, aloud=False, flops=3e11, bytes=4 * GIB)


class Validation(Instrument):
    """Keeps the captured graph from before the first pass, and compares the compiled one with it."""

    def __init__(self, plan: Plan, on_error: str, outputs_compare: bool = True) -> None:
        self.plan, self.on_error = plan, on_error
        self.outputs_compare = outputs_compare  # padded rows that may hold anything have no right value
        self.kept: fx.Graph | None = None
        self.undrawn: fx.Graph | None = None  # the rewritten graph, where both must run with dropout off

    def start(self, run: GraphRun) -> None:
        if run.phase is Phase.PRE_GRAD:
            self.kept = _torch.copy_graph(run.graph)

    def finish(self, run: GraphRun) -> None:
        """Before the recording instruments finish, so that they have the remark."""
        if run.phase is not Phase.PRE_GRAD:
            return
        assert self.kept is not None
        if not any(step.changed for step in run.steps) and not self.plan.aloud:
            self.kept = None  # the compiled graph is the captured one
            return
        self.undrawn = _torch.copy_graph(run.graph) if _drops_something(self.kept) else None
        self._say_what_stands_in_the_way(run)

    def _say_what_stands_in_the_way(self, run: GraphRun) -> None:
        assert self.kept is not None
        found = self._obstacle(self.kept, run)
        if found is None:
            return
        text, node, hint = found
        kind = RemarkKind.MISSED if self.plan.aloud else RemarkKind.ANALYSIS
        line = line_of(node) if node is not None else None
        who = "shadow" if self.plan.aloud else "validate"
        remark = Remark(kind, "not-compared", who, text, line, node.name if node is not None else "", hint)
        run.remarks.append(remark)
        self.kept = None
        if self.plan.aloud and self.outputs_compare:
            warn(str(remark))

    def _obstacle(self, graph: fx.Graph, run: GraphRun) -> tuple[str, fx.Node | None, str] | None:
        """Why calls are not compared with the captured graph, where, and what to do about it."""
        never = "calls are not compared with the captured graph"
        asked = next((s.pass_ for s in run.steps if s.changed and s.pass_.changes_numbers()), None)
        if asked is not None and not self.plan.aloud:
            return f"{asked.spec} changes the numbers, as was asked for: {never}", None, ""
        if not self.outputs_compare:
            return f"padded_outputs is 'unspecified': {never}", None, "compile the loss too"
        exchange = next((n for n in graph.nodes if _acts_outside(n)), None)
        if exchange is not None:
            return f"the graph exchanges data with others: its {never}", exchange, ""
        outside = drawn_outside(_providers(run.graph))
        drawing = next((n for n in graph.nodes if draws(n)), None)
        if drawing is not None and outside:
            return f"random numbers are drawn before the step: {never}", drawing, ""
        for what, counted, most, unit in (
            ("FLOPs", costs.cost(graph).flops, self.plan.flops, ""),
            ("memory", costs.cost(graph).bytes, self.plan.bytes, "B"),
        ):
            size = costs.at_hints(counted, graph)
            if size is not None and size > most:
                hint = "verify='shadow' compares all the same"
                need = f"{costs.human(size)}{unit} of {what}"
                return f"the captured step would take {need}, more than {costs.human(most)}{unit}: {never}", None, hint
        return None

    def watch(
        self,
        run: Callable[..., Any],
        compiled: Callable[..., Any],
        provide: Sequence[Provider],
        owner: fx.GraphModule,
        stats: RunStatistics,
        locate: Callable[[Callable[[], Any]], str] = lambda again: "",
    ) -> Callable[..., Any]:
        """`run`, which is `compiled` with its prologue, compared with the captured graph in its first calls.

        `locate` runs again what differed, and says where the target's own work first goes wrong, if it can.
        """
        if self.kept is None:
            return run
        captured = fx.GraphModule(owner, self.kept)
        served: Callable[..., Any] = compiled
        compared = captured
        if self.undrawn is not None:  # same numbers only while nothing is dropped
            served = fx.GraphModule(owner, undropped(self.undrawn)).forward
            compared = fx.GraphModule(owner, undropped(_torch.copy_graph(self.kept)))

        def rewritten(*inputs: Any) -> Any:
            return served(*inputs, *supply(provide, Call(inputs)))

        counting = run if provide else _counted(run, stats)  # a prologue counts by itself
        rows = rows_of(owner) if self.plan.disturbed else None
        comparison = Comparison(compared, rewritten)
        return _Watched(counting, captured, comparison, self.plan, rows, stats, self.on_error, locate)


def _providers(graph: fx.Graph) -> list[Provider]:
    from ..runtime.prologue import providers

    return providers(graph)


def _acts_outside(node: fx.Node) -> bool:
    """Would the world notice a second run? Other ranks would, and so do tables that keep a journal of their lookups."""
    return is_collective(node) or str(node.target).startswith(("turbogr.sharded", "turbogr.stale"))


def draws(node: fx.Node) -> bool:
    """Does the node draw random numbers? Dropout that drops nothing does not."""
    return _torch.is_random(node) and not _is_off(node)


def _is_off(node: fx.Node) -> bool:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in arguments), node.args, strict=False)) | dict(node.kwargs)
    return any(given.get(name) is False for name in _SWITCHES) or any(given.get(name) == 0 for name in _SHARES)


def _share_of(node: fx.Node) -> tuple[int, str] | None:
    """Place and name of the argument that says how much is dropped."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    return next(((names.index(share), share) for share in _SHARES if share in names), None)


def _drops_something(graph: fx.Graph) -> bool:
    return any(draws(n) and _share_of(n) is not None for n in graph.nodes)


def undropped(graph: fx.Graph) -> fx.Graph:
    """The graph with every dropout at zero."""
    for node in graph.nodes:
        place = _share_of(node) if node.op == "call_function" else None
        if place is None:
            continue
        index, name = place
        if name in node.kwargs:
            node.update_kwarg(name, 0.0)
        elif index < len(node.args):
            node.update_arg(index, 0.0)
    return graph


class _Watched:
    """A compiled graph with so many calls left to compare; afterwards only the one or the other graph is kept."""

    def __init__(
        self,
        run: Callable[..., Any],
        captured: fx.GraphModule,
        comparison: Comparison,
        plan: Plan,
        rows: InputRows | None,
        stats: RunStatistics,
        on_error: str,
        locate: Callable[[Callable[[], Any]], str],
    ) -> None:
        self.run, self.captured, self.stats, self.on_error, self.locate = run, captured, stats, on_error, locate
        self.comparison: Comparison | None = comparison
        self.plan, self.rows, self.left = plan, rows, plan.calls

    def __call__(self, *inputs: Any) -> Any:
        if self.comparison is not None:
            began = time.perf_counter()
            try:
                self._compare(self.comparison, inputs)
            finally:
                self.stats.comparing += time.perf_counter() - began
        return self.run(*inputs)

    def _compare(self, comparison: Comparison, inputs: Sequence[Any]) -> None:
        try:
            found = comparison.differences(inputs)
        except Unprovable:
            return  # nothing of the rewritten graph runs in this call
        except NotComparable as error:
            found = [f"the captured graph raises {error}"] if self._runs(inputs) else []
        self.stats.compared += 1
        self.left -= 1
        where = "call"
        if not found and self.rows is not None:
            found, inputs = self._on_other_lengths(comparison, inputs)
            where = "a batch like that of call"
            self.rows = None
        if not self.left or found:
            self.comparison = None
        if found:
            self.run = _counted(self.captured.forward, self.stats, DIFFERS)
            self._tell(found, where, self.locate(lambda: comparison.again(inputs)))
        if self.comparison is None and not found:
            del self.captured  # its memory is not needed any more

    def _runs(self, inputs: Sequence[Any]) -> bool:
        """Does the compiled graph take what the captured one refuses?"""
        assert self.comparison is not None
        try:
            self.comparison.again(inputs)
        except Exception:
            return False
        return True

    def _on_other_lengths(self, comparison: Comparison, inputs: Sequence[Any]) -> tuple[list[str], Sequence[Any]]:
        assert self.rows is not None
        try:
            other = disturbed(inputs, self.rows)
            if other is None:
                return [], inputs
            found = comparison.differences(other)
        except (Unprovable, NotComparable):
            return [], inputs  # no batch that the compiled graph would serve, or none that the model takes
        self.stats.compared += 1
        return found, other

    def _tell(self, found: list[str], where: str, located: str) -> None:
        more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        lines = [f"graph {self.stats.graph}, {where} {self.plan.calls - self.left}, {DIFFERS}:"]
        lines += [f"  {text}" for text in found[:_SHOWN] + more]
        lines += [f"  {text}" for text in located.splitlines()]
        try_next = (
            "  try: verify='numeric' names the pass, if it is one before autograd; 'turbogr bisect' finds any\n"
            "  a pass that changes numbers on purpose says so by `changes_numbers`"
        )
        if self.on_error == "raise":
            raise VerifyError("\n".join([*lines, try_next]))
        warn("\n".join([*lines, "  all calls of this graph run the captured graph, op by op", try_next]))


def _counted(graph: Callable[..., Any], stats: RunStatistics, reason: str = "") -> Callable[..., Any]:
    def run(*inputs: Any) -> Any:
        stats.calls += 1
        if reason:
            stats.fallbacks[reason] += 1
        return graph(*inputs)

    return run
