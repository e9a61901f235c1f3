"""What a benchmark wants to know about a compilation."""

from __future__ import annotations

import torch

from turbogr_compile import GraphRun, Instrument, Role


class Attentions(Instrument):
    """How many attentions became jagged."""

    def __init__(self) -> None:
        self.jagged = 0

    def finish(self, run: GraphRun) -> None:
        if run.role is Role.CAPTURED:
            op = torch.ops.turbogr.jagged_attention.default
            self.jagged += len(run.graph.find_nodes(op="call_function", target=op))
