"""Draw negatives, and do what else depends on no parameter, before the step: on a worker, one batch ahead.

    torch.compile(model, backend="turbogr", options={"passes": ["offload-sampling"]})
    for batch in turbogr_compile.ahead(loader): ...

What is drawn at random, what sorts or deduplicates indices, and what follows from it without a parameter is cut out of
the graph; its results come in as inputs. A loop over `ahead` has them computed during the step before. Without one they
are computed when the step is called, with the same numbers: every call has a seed of its own (runtime/draws.py).
Dropout stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ..graph.phases import Phase, Role
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from .common.cut import Cut
from .common.draws import Held, is_draw

aten = torch.ops.aten
INDEX_WORK = {
    aten.sort, aten.argsort, aten.topk, aten.nonzero, aten.bincount, aten._unique2, aten._unique, aten.unique_dim,
    aten.unique_consecutive, aten.unique_dim_consecutive,
}  # fmt: skip


@register
@dataclass(frozen=True)
class OffloadSampling(Pass):
    """Draw negatives, and do what else depends on no parameter, before the step: on a worker, one batch ahead."""

    name = "offload-sampling"
    phase = Phase.PRE_GRAD
    after = (
        "pack-rows", "fold-masks", "eliminate-common", "simplify-masks", "recognize-activations", "fuse-loss",
        "fuse-sampling", "fuse-silu-split", "fuse-norm-gate", "fuse-embedding",
    )  # fmt: skip
    before = ("eliminate-dead-code",)
    roles = frozenset({Role.CAPTURED})

    index_work: bool = True  # also sorting, deduplicating and counting of what was not drawn

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        held = Held(graph)
        roots = [n for n in graph.nodes if n.op == "call_function" and self._wanted(n)]
        for node in roots:
            if node in held and is_draw(node):
                held.explain(node, ctx)
        free = [n for n in roots if n not in held]
        if not free:
            if not any(map(is_draw, roots)):
                ctx.missed("nothing-drawn", "nothing that could run before the step is drawn or sorted in this graph")
            return
        cut = Cut(graph, free, held)
        with ctx.rewrite("offload", *cut.moved):
            added = cut.apply()
        draws = sum(map(is_draw, cut.moved))
        given = ", ".join(f"%{n.name}" for n in added)
        ctx.applied("offloaded", f"{len(cut.moved)} ops, {draws} of them draws, run before the step: {given}", free[0])

    def _wanted(self, node: fx.Node) -> bool:
        sorts = getattr(node.target, "overloadpacket", None) in INDEX_WORK
        return is_draw(node) or (self.index_work and sorts)
