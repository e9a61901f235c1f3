"""Compute only the rows of padded batches that can influence a result."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .. import kernels  # noqa: F401  (defines the ops)
from .. import _torch
from ..catalogue import register
from ..context import Context
from ..pass_base import Pass, Phase, Role
from ..prologue import keep_original
from ..provenance import Origin, inherit, line_of
from ._rows.analysis import RowAnalysis, analyse
from ._rows.emit import Emitter
from ._rows.ops import op
from ._rows.program import Program

CLOSURE_GROWTH = 1.25  # keys of causal attention may exceed its queries by this much before pads must be among them


@register
@dataclass(frozen=True)
class PackRows(Pass):
    """Compute only the rows of padded batches that can influence a result."""

    name = "pack-rows"
    phase = Phase.PRE_GRAD
    after = ("remove-noops", "fold-views")
    before = ("fold-masks", "eliminate-common", "simplify-masks", "recognize-activations")
    roles = frozenset({Role.CAPTURED})

    dropout: str = "packed"  # or 'padded': draw dropout masks as eager does, for every padded element

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        _see_through_offsets(graph, ctx)
        unspecified = getattr(ctx.options, "padded_outputs", "strict") == "unspecified"
        with _torch.outside_compilation():
            found = analyse(graph, ctx.examples, unspecified_outputs=unspecified)
        emitter = Emitter(graph, found.demand, parity=self.dropout == "padded")
        if not any(emitter.lives_packed(n) for n in found.demand.wanted):
            self._missed(ctx, found)
            return
        keep_original(graph)
        original, copies = _copy(graph)
        before = [n for n in graph.nodes if n.op == "call_function"]
        with ctx.rewrite("pack", *before):
            emitter.run()
            _erase_unused(graph, emitter)
            program = emitter.program(original, copies)
            for node, source in emitter.origin.items():
                if not _torch.is_erased(node):
                    inherit(node, [source], Origin(self.name, "pack", (source.name,)))
        self._applied(ctx, found, emitter, program)
        self._missed(ctx, found)

    def _applied(self, ctx: Context, found: RowAnalysis, emitter: Emitter, program: Program) -> None:
        for chosen in program.sets:
            if chosen.terms is not None:
                ctx.applied("packed", f"row set {chosen.number}: {chosen}")

    def _missed(self, ctx: Context, found: RowAnalysis) -> None:
        for miss in found.demand.missed:
            ctx.missed(miss.id, miss.text, miss.node, miss.hint)


def _see_through_offsets(graph: fx.Graph, ctx: Context) -> None:
    """dense_to_jagged hands back the offsets it was given."""
    for node in list(graph.nodes):
        if op(node) != "getitem" or op(node.args[0]) != "getitem":
            continue
        source, which = node.args[0].args
        if op(source) == "fbgemm::dense_to_jagged" and which == 1:
            with ctx.rewrite("offsets", node):
                node.replace_all_uses_with(source.args[1][node.args[1]])
                graph.erase_node(node)


def _copy(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    copied = fx.Graph(owning_module=graph.owning_module)
    copies: dict[fx.Node, fx.Node] = {}
    copied.graph_copy(graph, copies)
    return copied, copies


def _erase_unused(graph: fx.Graph, emitter: Emitter) -> None:
    """Drawing random numbers is an effect, except where a packed op draws instead."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if node in emitter.superseded or not node.is_impure():
            graph.erase_node(node)


__all__ = ["PackRows", "line_of", "torch"]
