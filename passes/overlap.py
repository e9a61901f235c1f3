"""Start collectives and work of the host early, and wait for them late, so that compute runs meanwhile.

Nodes move within forward and backward graphs, and get labels of streams; nothing is computed differently. All
collectives keep the order they have in the program, which is the same on every rank: estimates decide only where
compute stands between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.nodes import is_collective, is_wait
from ..graph.phases import Phase
from ..graph.streams import COMMUNICATION, put_on, stream_of
from ..graph.text import target_text
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from ..show.timeline import arm, block, duration, timeline_text, wait
from .schedule.costs import Costs, read_costs
from .schedule.dependences import dependences, is_async, started_by
from .schedule.order import schedule
from .schedule.play import Played, play

NOTICED = 0.05  # of the time: what stays exposed beyond is remarked on


@register
@dataclass(frozen=True)
class Overlap(Pass):
    """Start collectives and work of the host early, and wait for them late."""

    name = "overlap"
    phase = Phase.POST_GRAD

    budget_mib: int = 512  # memory that values may take above the peak of the graph as it was
    costs: str = ""  # JSON file of measured rates and seconds

    def concerns(self, graph: fx.Graph) -> bool:
        return any(is_async(n) for n in graph.nodes)

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        if not self.concerns(graph):
            return
        given = list(graph.nodes)
        for node in [n for n in given if is_collective(n) and not stream_of(n)]:
            with ctx.rewrite(COMMUNICATION, node):
                put_on(node, COMMUNICATION)
        costs = Costs(graph, *read_costs(self.costs, ctx.target))
        found = schedule(graph, dependences(graph), costs, self.budget_mib * 2**20)
        before, after = play(given, costs), play(found.order, costs)
        if found.order != given:
            with ctx.rewrite("schedule", *(n for n in given if is_async(n) or is_wait(n))):
                _arrange(graph, found.order)
        _tell(ctx, before, after)
        if found.limited:
            text = f"a faster order takes more than {self.budget_mib} MiB above the memory of the graph as it was"
            ctx.missed("overlap-budget", text, hint=f"overlap{{budget_mib={2 * self.budget_mib}}} allows more")


def _arrange(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    last = order[0]
    for node in order[1:]:
        last.append(node)
        last = node


def _tell(ctx: Context, before: Played, after: Played) -> None:
    if after.exposed < before.exposed:
        ctx.applied(
            "overlapped",
            f"estimated: compute waits {duration(after.exposed)} instead of {duration(before.exposed)}, and the graph "
            f"takes {duration(after.seconds)} instead of {duration(before.seconds)}",
        )
    for span in after.waits:
        if span.end - span.start > NOTICED * after.seconds:
            awaited, seconds = _awaited(span.node), duration(span.end - span.start)
            text = f"estimated: compute waits {seconds} for %{awaited}; nothing that does not need it is left to do"
            ctx.missed("exposed", text, span.node, "start it earlier in the model, or a batch ahead")
    ctx.timeline = {"estimated": True, "arms": [_arm("as it was", before), _arm("scheduled", after)]}
    ctx.note("timeline", lambda: timeline_text(ctx.timeline or {}))


def _arm(name: str, played: Played) -> dict[str, Any]:
    blocks = [block(s.node.name, target_text(s.node), s.stream, s.start, s.end) for s in played.spans]
    waits = [wait(_awaited(w.node), w.start, w.end) for w in played.waits]
    return arm(name, played.seconds, played.exposed, blocks, waits)


def _awaited(node: fx.Node) -> str:
    """What compute waits for in front of a node: a collective, or work of the host that it reads."""
    started = started_by(node) if is_wait(node) else None
    return started.name if started is not None else ", ".join(n.name for n in node.all_input_nodes if is_async(n))
