"""Which nodes of a graph are the loss of sampled negatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from .binary import by_labels, sum_of_terms
from .find import Found
from .losses import SampledLoss
from .softmaxes import cross_entropy, difference, picked

aten = torch.ops.aten
Reader = Callable[[fx.Node, Found], SampledLoss | None]


def losses_of(graph: fx.Graph, found: Found) -> list[SampledLoss]:
    return [loss for node in graph.nodes if (loss := _read(node, found)) is not None]


def _read(node: fx.Node, found: Found) -> SampledLoss | None:
    readers = _READERS.get(node.target, ()) if tensor(node) is not None else ()
    return next((loss for read in readers if (loss := read(node, found)) is not None), None)


_READERS: dict[Any, tuple[Reader, ...]] = {
    aten.select.int: (picked,),
    aten.slice.Tensor: (picked,),
    aten.cross_entropy_loss.default: (cross_entropy,),
    aten.nll_loss_nd.default: (cross_entropy,),
    aten.sub.Tensor: (difference, sum_of_terms),
    aten.add.Tensor: (sum_of_terms,),
    aten.binary_cross_entropy_with_logits.default: (by_labels,),
}
