"""Translation validation: a compiled graph is tried against the graph as it was captured, before it is trusted.

`verify="validate"`, the default, tries the first call of each graph that a pass rewrote: on the caller's batch, and on
a batch made of it in which sequences have other lengths (disturbance.py). Where the padded step is larger than the
budget, a few sequences of the batch are tried instead (sampling.py). `verify="shadow:3"` compares the first calls as
they come, and says aloud what cannot be compared. Both run on stand-ins; nothing that the step writes is written twice.

A compiled graph that differs is not used: all its calls run the captured graph, and a warning says so (watched.py).

A graph that exchanges data with other ranks is compared on one rank alone, with local functions in the place of
collectives (stand_ins.py), op by op. Dropout is switched off in both graphs while they are compared. In both cases the
passes are tried, and code generation is not. What is not tried at all, and why, is a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..graph import costs
from ..graph.phases import Phase
from ..graph.provenance import line_of
from ..pipeline.instrument import GraphRun, Instrument, Step
from ..pipeline.remarks import Remark, RemarkKind, warn
from ..runtime.prologue import Call, Exchange, Provider, RanksApart, exchanges, providers, rows_of, supply
from ..runtime.prologue import draws as drawn_outside
from ..runtime.ranks import agreement
from ..runtime.statistics import RunStatistics
from . import stand_ins
from .comparison import Comparison
from .sampling import CannotSample, Sample, Sizes, sample_for
from .watched import DIFFERS, Trial, Verdict, Watched, counted

__all__ = ["DIFFERS", "VALIDATION", "Plan", "Validation", "draws", "undropped"]
GIB = 1 << 30
_SHARE_OF_SAMPLES = 0.25  # of the budget: what is a part anyway need not take as long as the largest whole
_NEVER = "calls are not compared with the captured graph"
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


@dataclass(frozen=True)
class Obstacle:
    """Why calls are not compared with the captured graph, where, and what to do about it."""

    text: str
    node: fx.Node | None = None
    hint: str = ""


@dataclass(frozen=True)
class Stage:
    """The graph as a pass left it."""

    step: Step | None
    graph: fx.Graph

    def __str__(self) -> str:
        if self.step is None:
            return "capture"
        done = self.step.context.rewrites if self.step.context is not None else []
        rules = ", ".join(dict.fromkeys(" of %".join([r.rule, *r.sources[-1:]]) for r in done[:2])) + (
            ", …" if len(done) > 2 else ""
        )
        return f"{self.step.number:03} {self.step.pass_.spec}" + (f" ({rules})" if rules else "")


class Validation(Instrument):
    """Keeps the captured graph from before the first pass, and compares the compiled one with it."""

    def __init__(self, plan: Plan, on_error: str, outputs_compare: bool = True) -> None:
        self.plan, self.on_error = plan, on_error
        self.outputs_compare = outputs_compare  # padded rows that may hold anything have no right value
        self.kept: fx.Graph | None = None
        self.stages: list[Stage] = []  # the graph after each pass, as long as one rank can run it by itself
        self.untried: list[str] = []  # passes after those
        self.reaches_others = self.op_by_op = False
        self.sample: Sample | None = None
        self.obstacle = ""

    def start(self, run: GraphRun) -> None:
        if run.phase is Phase.PRE_GRAD:
            self.kept = _torch.copy_graph(run.graph)
            self.stages, self.untried, self.sample, self.obstacle = [], [], None, ""
            self.reaches_others = any(map(stand_ins.reaches_others, run.graph.nodes))
            self.op_by_op = self.reaches_others or _drops_something(run.graph)

    def after(self, run: GraphRun, step: Step) -> None:
        if run.phase is not Phase.PRE_GRAD or not step.changed:
            return
        if exchanges(providers(run.graph)):
            self.untried.append(step.pass_.name)
        else:
            self.stages.append(Stage(step, _torch.copy_graph(run.graph)))

    def finish(self, run: GraphRun) -> None:
        """Before the recording instruments finish, so that they have the remark."""
        if run.phase is not Phase.PRE_GRAD:
            return
        assert self.kept is not None
        if not any(step.changed for step in run.steps) and not self.plan.aloud:
            self.kept = None  # the compiled graph is the captured one
            return
        obstacle = self._obstacle(self.kept, run) or self._too_large(self.kept, run)
        if obstacle is not None:
            self._not_compared(run, obstacle)
        elif self.reaches_others:
            text = "in the place of exchanges with others, calls are compared with functions of this rank's own data"
            text += f"; not compared: {', '.join(self.untried)}" if self.untried else ""
            run.remarks.append(Remark(RemarkKind.ANALYSIS, "compared-in-part", "validate", text))

    def _not_compared(self, run: GraphRun, obstacle: Obstacle) -> None:
        node, self.obstacle, self.kept = obstacle.node, obstacle.text, None
        kind = RemarkKind.MISSED if self.plan.aloud else RemarkKind.ANALYSIS
        line = line_of(node) if node is not None else None
        who = "shadow" if self.plan.aloud else "validate"
        remark = Remark(
            kind, "not-compared", who, obstacle.text, line, node.name if node is not None else "", obstacle.hint
        )
        run.remarks.append(remark)
        if self.plan.aloud and self.outputs_compare:
            warn(str(remark))

    def _obstacle(self, graph: fx.Graph, run: GraphRun) -> Obstacle | None:
        asked = next((s.pass_ for s in run.steps if s.changed and s.pass_.changes_numbers()), None)
        if asked is not None and not self.plan.aloud:
            return Obstacle(f"{asked.spec} changes the numbers, as was asked for: {_NEVER}")
        if not self.outputs_compare:
            return Obstacle(f"padded_outputs is 'unspecified': {_NEVER}", hint="compile the loss too")
        kept = graph.find_nodes(op="call_function", target=torch.ops.turbogr.left_rows.default)
        if kept:
            return Obstacle(f"rows that nobody reads are not there: {_NEVER}", kept[0])
        acting = next(filter(stand_ins.may_act, graph.nodes), None)
        if acting is not None:
            hint = "an op that only computes its result is declared by turbogr_compile.row_op"
            return Obstacle(f"{acting.target} may do more than compute its result: {_NEVER}", acting, hint)
        if self.untried and not self.stages:
            return Obstacle(f"no pass changed what one rank can run by itself: {_NEVER}")
        exchange = stand_ins.without_stand_in(graph)
        if exchange is not None:
            return Obstacle(f"the graph exchanges data with others by {exchange.target}: its {_NEVER}", exchange)
        drawing = next(filter(draws, graph.nodes), None)
        if drawing is not None and drawn_outside(providers(run.graph)):
            return Obstacle(f"random numbers are drawn before the step: all of its {_NEVER}", drawing)
        return None

    def _too_large(self, graph: fx.Graph, run: GraphRun) -> Obstacle | None:
        """Sets the sample that is small enough, where there is one."""
        cost = costs.cost(graph)
        budget = ((cost.flops, self.plan.flops, "FLOP", ""), (cost.bytes, self.plan.bytes, "B", " of memory"))

        def excess(sizes: Sizes, share: float = 1.0) -> str:
            for formula, most, unit, what in budget:
                size = costs.at_hints(formula.subs(sizes), graph)
                if size is not None and size > share * most:
                    return f"{costs.human(size, unit)}{what}, more than {costs.human(most, unit)}"
            return ""

        too_much = excess({})
        if not too_much:
            return None
        try:
            self.sample = sample_for(graph, rows_of(run.module), lambda sizes: not excess(sizes, _SHARE_OF_SAMPLES))
        except CannotSample as why:
            hint = "verify='shadow' compares all the same"
            return Obstacle(f"the captured step would take {too_much}, and {why}: {_NEVER}", hint=hint)
        text = f"the captured step would take {too_much}: {self.sample.text} are compared"
        run.remarks.append(Remark(RemarkKind.ANALYSIS, "compared-in-part", "validate", text))
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
        stats.uncompared = self.obstacle
        if self.kept is None:
            return run
        if self.sample is not None and not self.sample.allowed(self.kept):
            stats.uncompared = "the target allows no smaller sizes than those of the batch seen"
            return run
        captured = fx.GraphModule(owner, self.kept)
        stages = self.stages if self.stages or not self.op_by_op else [Stage(None, _torch.copy_graph(self.kept))]
        alone = partial(_by_itself, owner, self.kept)
        whole = Comparison(captured, compiled, lambda inputs: supply(provide, Call(inputs)))
        trial = Trial(
            alone(stages[-1].graph) if self.op_by_op else whole,
            self.plan.calls,
            rows_of(owner) if self.plan.disturbed else None,
            self.sample,
        )

        def blame(inputs: Sequence[Any]) -> str:
            """The first pass whose graph differs, run op by op."""
            first = next((s for s in stages if alone(s.graph).differs(inputs)), None)
            return f"first after {first}" if first is not None else locate(lambda: trial.comparison.again(inputs))

        refuse = self._refusal(provide) if self.reaches_others else None
        verdict = Verdict(captured.forward, self.on_error == "raise", blame, refuse)
        counting = run if provide else counted(run, stats)  # a prologue counts by itself
        return Watched(counting, trial, verdict, stats)

    def _refusal(self, provide: Sequence[Provider]) -> Callable[[str], None]:
        """How the ranks that wait for this one learn that it does not come."""
        assert self.kept is not None
        met = exchanges(provide)
        if met:
            return lambda reason: _leave(met[0])  # others wait there, before the step
        groups = [*agreement.collectives(self.kept), *stand_ins.groups(self.kept)]
        return lambda reason: agreement.refuse(groups, reason)


def _leave(exchange: Exchange) -> None:
    with suppress(RanksApart):  # all of them know then
        exchange.leave(False)()


def _by_itself(owner: fx.GraphModule, captured: fx.Graph, rewritten: fx.Graph) -> Comparison:
    """Both op by op: they give the same numbers while nothing is dropped, and while other ranks are left alone."""
    pair = [stand_ins.local(undropped(_torch.copy_graph(g))) for g in (captured, rewritten)]
    before, after = (fx.GraphModule(owner, g) for g in pair)
    own = providers(rewritten)
    return Comparison(before, after.forward, lambda inputs: supply(own, Call(inputs)))


def draws(node: fx.Node) -> bool:
    """Does the node draw random numbers? Dropout that drops nothing does not."""
    return _torch.is_random(node) and not drops_nothing(node.target, node.args, node.kwargs)


def drops_nothing(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Is an op that may draw random numbers called so that it does not?"""
    arguments = op._schema.arguments
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)
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
