"""Copy a transposed value before it is viewed, where torchair would lose the transpose.

torchair collapses chains of transposes and views by replaying them on a dense stand-in of the value they start from. If
that value is itself a piece of something larger (`unbind`, `split`, a slice), a view that is legal on its real strides
turns into a copy on the stand-in, and the transpose before it vanishes: wrong numbers, no error. HSTU's gate is such a
chain. A copy in front of the view ends the chain; in GE it is an Identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .. import _torch
from ..graph.phases import Phase
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass

aten = torch.ops.aten
VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
TRANSPOSES = {aten.permute.default, aten.transpose.int, aten.t.default}


@register
@dataclass(frozen=True)
class KeepTransposes(Pass):
    """Copy a transposed value before it is viewed, where torchair would lose the transpose."""

    name = "keep-transposes"
    phase = Phase.LOWERING

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for node in [n for n in graph.nodes if n.target in VIEWS]:
            if _loses_transpose(node):
                with ctx.rewrite("copy before a view", node), graph.inserting_before(node):
                    copy = graph.call_function(
                        aten.clone.default, (node.args[0],), {"memory_format": torch.contiguous_format}
                    )
                    node.update_arg(0, copy)


def _loses_transpose(view: fx.Node) -> bool:
    """Whether its chain has a transpose and starts at a value that is not dense."""
    root, transposed = view.args[0], False
    while isinstance(root, fx.Node) and root.target in VIEWS | TRANSPOSES:
        transposed |= root.target in TRANSPOSES
        root = root.args[0]
    if not (transposed and isinstance(root, fx.Node)) or root.op == "placeholder":
        return False
    value = root.meta.get("val")
    return isinstance(value, torch.Tensor) and not _torch.surely_contiguous(value)
