"""The models of padded_models.py as an expert packs them: only rows that hold an item, and no layer knows of pads.

`Ops` are what can be done by plain torch, one history after the other, or by turbogr's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jagged
import torch
import torch.nn.functional as F
from jagged import Batch
from padded_models import HSTULayer, Recommender, SASRecLayer
from torch import Tensor, nn


@dataclass(frozen=True)
class Ops:
    silu_attention: Callable[[Tensor, Tensor, Tensor], Tensor]  # of (T, H, d)
    softmax_attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_split: Callable[[Tensor], Sequence[Tensor]]  # (T, 4·D) -> four times (T, D)
    norm_gate: Callable[[Tensor, nn.LayerNorm, Tensor], Tensor]
    lookup: Callable[[Tensor, Tensor], Tensor]  # rows of a table


def plain(batch: Batch) -> Ops:
    """What torch has."""
    return Ops(
        jagged.silu_loop(batch),
        jagged.softmax_loop(batch),
        lambda x: F.silu(x).chunk(4, dim=-1),
        lambda x, norm, gate: norm(x) * gate,
        lambda table, rows: F.embedding(rows, table),
    )


def kernels(batch: Batch) -> Ops:
    """What turbogr has."""
    N = batch.longest
    return Ops(
        lambda q, k, v: jagged.attend(q, k, v, batch, "silu", q.shape[-1] ** -0.5, 1 / N),
        lambda q, k, v: jagged.attend(q, k, v, batch, "softmax", q.shape[-1] ** -0.5),
        jagged.silu_split,
        jagged.norm_gate,
        jagged.lookup,
    )


@dataclass(frozen=True)
class PackedLoss:
    """`Recommender.loss`, of the rows that a loader has packed before."""

    model: Recommender
    ops: Ops

    def __call__(self, ids: Tensor, columns: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        items, ops = self.model.items.weight, self.ops
        x = ops.lookup(items, ids) + ops.lookup(self.model.positions.weight, columns)
        for layer in self.model.layers:
            x = hstu(layer, x, ops) if isinstance(layer, HSTULayer) else sasrec(layer, x, ops)
        hidden = self.model.norm(x)
        positive = (hidden * ops.lookup(items, targets)).sum(-1, keepdim=True)
        logits = torch.cat([positive, hidden @ ops.lookup(items, negatives).T], dim=-1)
        return (logits.logsumexp(-1) - logits[:, 0]).mean()


def hstu(layer: HSTULayer, x: Tensor, ops: Ops) -> Tensor:
    u, v, q, k = ops.silu_split(layer.uvqk(layer.norm(x)))
    mixed = ops.silu_attention(*(t.view(-1, layer.heads, layer.width) for t in (q, k, v)))
    return x + layer.out(ops.norm_gate(mixed.flatten(1), layer.out_norm, u))


def sasrec(layer: SASRecLayer, x: Tensor, ops: Ops) -> Tensor:
    q, k, v = (t.unflatten(-1, (layer.heads, layer.width)) for t in layer.qkv(layer.norm(x)).split(layer.dim, dim=-1))
    x = x + layer.out(ops.softmax_attention(q, k, v).flatten(1))
    return x + layer.down(F.relu(layer.up(layer.feed_norm(x))))
