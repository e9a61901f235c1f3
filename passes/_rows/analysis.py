"""Row-space analysis of one graph, and its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .axes import Typing
from .demand import ALL, DemandAnalysis
from .meaning import Meanings
from .ops import is_tensor
from .program import Examples, batch_of, size_symbols
from .zeros import Zeros


@dataclass
class RowAnalysis:
    graph: fx.Graph
    demand: DemandAnalysis
    examples: Examples

    def undemanded(self, inputs: Sequence[Any]) -> dict[fx.Node, torch.Tensor]:
        """For each value that is demanded on some rows only: True where an element is not, shaped to broadcast."""
        known = Examples(self.graph, inputs)
        an, typing = self.demand, self.demand.typing

        class Lazy(dict[fx.Node, torch.Tensor]):
            def __missing__(self, node: fx.Node) -> torch.Tensor:
                value = known(node)
                assert value is not None, node
                return value

        batch = batch_of(typing, Lazy(), size_symbols(self.graph.find_nodes(op="placeholder")), inputs)
        out = {}
        for node, wanted in an.wanted.items():
            space = an.space_of(node)
            if wanted is ALL or space is None or not is_tensor(node) or node.op != "call_function":
                continue
            keep = batch.union(wanted)  # type: ignore[arg-type]
            flat = typing.flat(node)
            order = [a for a in flat if a in space.axes]
            keep = keep.reshape([batch.size(a) for a in space.axes]).permute([space.axes.index(a) for a in order])
            keep = keep.reshape([batch.size(a) if a in space.axes else 1 for a in flat])
            keep = keep.expand([batch.size(a) for a in flat])
            out[node] = ~keep.reshape([batch.number(s) for s in _shape(node)])
        return out


def _shape(node: fx.Node) -> list[Any]:
    from .ops import shape

    return shape(node)


def analyse(
    graph: fx.Graph, inputs: Sequence[Any] | None = None, *, unspecified_outputs: bool = False,
    refused: frozenset[fx.Node] = frozenset(),
) -> RowAnalysis:  # fmt: skip
    """Axes, meanings, zeros and demand of a captured graph; `inputs` are real ones, where they are known."""
    examples = Examples(graph, inputs)
    typing = Typing(graph)
    meanings = Meanings(graph, typing, examples)
    zeros = Zeros(graph, typing, meanings)
    return RowAnalysis(graph, DemandAnalysis(graph, typing, meanings, zeros, unspecified_outputs, refused), examples)
