"""Remove values nobody reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..graph.nodes import is_collective
from ..graph.phases import Phase
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass


@register
@dataclass(frozen=True)
class EliminateDeadCode(Pass):
    """Remove values nobody reads."""

    name = "eliminate-dead-code"
    phase = Phase.PRE_GRAD
    after = (
        "remove-noops", "fold-masks", "fold-views", "eliminate-common", "simplify-masks", "recognize-activations",
    )  # fmt: skip

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for node in reversed(graph.nodes):
            # fx calls random ops impure: dropping one would shift the numbers that later ops draw.
            if node.users or node.op in ("placeholder", "output") or node.is_impure() or is_collective(node):
                continue
            with ctx.rewrite("dead", node):
                graph.erase_node(node)
