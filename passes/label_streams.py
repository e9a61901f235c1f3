"""Put collectives on a stream of their own, and wait for each where its result is first read.

What does not depend on a collective may then run while it is under way. The order of collectives stays as it is: every
rank must start them in the same one. Nothing is started earlier here, and no label changes a result.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..catalogue import register
from ..context import Context
from ..graphs import is_collective, is_wait
from ..pass_base import Pass, Phase
from ..streams import COMMUNICATION, put_on, stream_of


@register
@dataclass(frozen=True)
class LabelStreams(Pass):
    """Put collectives on a stream of their own, and wait for each where its result is first read."""

    name = "label-streams"
    phase = Phase.POST_GRAD

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for node in [n for n in graph.nodes if is_collective(n) and not stream_of(n)]:
            with ctx.rewrite(COMMUNICATION, node):
                put_on(node, COMMUNICATION)
        # From the end: what reads a wait may be a wait that moves itself.
        for node in [n for n in reversed(graph.nodes) if is_wait(n)]:
            first = _first_reader(node)
            if first is not None and not _only_waits_between(node, first):
                with ctx.rewrite("wait where it is read", node):
                    first.prepend(node)


def _first_reader(node: fx.Node) -> fx.Node | None:
    return min(node.users, default=None)


def _only_waits_between(node: fx.Node, last: fx.Node) -> bool:
    between = node.next
    while between is not last and is_wait(between):
        between = between.next
    return between is last
