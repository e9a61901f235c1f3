"""Padded recommenders to measure, beside the one of examples/hstu.py.

`TimedRecommender` adds to its attention what published HSTU models have: a bias by the bucket of the time between two
items. `SASRec` is the usual softmax model on `nn.MultiheadAttention`. Nothing here knows about turbogr.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from hstu import HSTULayer, Recommender

__all__ = ["Recommender", "SASRec", "TimedRecommender", "ragged"]


class TimedLayer(HSTULayer):
    """HSTU attention with position and time biases, each a learned table."""

    def __init__(self, dim: int, heads: int, max_len: int, dropout: float, buckets: int = 128) -> None:
        super().__init__(dim, heads, max_len, dropout)
        self.buckets = buckets
        self.time_bias = nn.Parameter(torch.randn(buckets + 1) * 0.02)

    def bias_of(self, times: Tensor) -> Tensor:
        """(B, N, N): by distance, and by time from a key to the item after the query."""
        B, N = times.shape
        position = torch.arange(N, device=times.device)
        by_position = self.bias[position[:, None] - position[None, :] + self.bias.numel() // 2]
        following = torch.cat([times[:, 1:], times[:, -1:]], dim=1)
        apart = (following.unsqueeze(2) - times.unsqueeze(1)).abs().clamp(min=1)
        bucket = (apart.log() / 0.301).long().clamp(0, self.buckets).detach()
        by_time = self.time_bias.index_select(0, bucket.view(-1)).view(B, N, N)
        return by_position + by_time

    def forward(self, x: Tensor, valid: Tensor, times: Tensor) -> Tensor:  # type: ignore[override]
        B, N, D = x.shape
        u, v, q, k = F.silu(self.uvqk(self.norm(x))).chunk(4, dim=-1)
        q, k, v = (t.reshape(B, N, self.heads, D // self.heads).transpose(1, 2).contiguous() for t in (q, k, v))
        scores = F.silu(q @ k.transpose(-1, -2) + self.bias_of(times).unsqueeze(1)) / N
        causal = torch.tril(torch.ones(N, N, dtype=torch.bool, device=x.device))
        scores = scores * (causal & valid[:, None, None, :])
        mixed = (scores @ v).transpose(1, 2).reshape(B, N, D)
        return x + self.dropout(self.out(u * self.out_norm(mixed)))


class TimedRecommender(Recommender):
    def __init__(
        self, items: int = 2000, dim: int = 64, heads: int = 2, layers: int = 2, max_len: int = 128, dropout: float = 0
    ) -> None:
        super().__init__(items, dim, heads, 0, max_len, dropout)
        self.layers = nn.ModuleList(TimedLayer(dim, heads, max_len, dropout) for _ in range(layers))

    def forward(self, ids: Tensor, times: Tensor) -> Tensor:  # type: ignore[override]
        valid = ids != 0
        position = torch.arange(ids.shape[1], device=ids.device)
        x = self.items(ids) * self.items.embedding_dim**0.5 + self.positions(position)
        x = self.dropout(x) * valid.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, valid, times) * valid.unsqueeze(-1)
        return self.norm(x)

    def loss(self, ids: Tensor, times: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self(ids, times)
        logits = hidden[:, :-1] @ self.items.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


class SASRecLayer(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, dropout, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, dim))

    def forward(self, x: Tensor, future: Tensor, pad: Tensor) -> Tensor:
        y = self.norm(x)
        mixed, _ = self.attention(y, y, y, attn_mask=future, key_padding_mask=pad, need_weights=False)
        x = x + mixed
        return x + self.feed(self.norm2(x))


class SASRec(nn.Module):
    """Next-item prediction with softmax attention over earlier items."""

    def __init__(
        self, items: int = 2000, dim: int = 64, heads: int = 2, layers: int = 2, max_len: int = 128, dropout: float = 0
    ) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, dim, padding_idx=0)
        self.positions = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(SASRecLayer(dim, heads, dropout) for _ in range(layers))
        self.norm, self.dropout = nn.LayerNorm(dim), nn.Dropout(dropout)

    def loss(self, ids: Tensor) -> Tensor:
        N = ids.shape[1]
        x = self.dropout(self.items(ids) + self.positions(torch.arange(N, device=ids.device)))
        future = torch.ones(N, N, dtype=torch.bool, device=ids.device).triu(1)
        for layer in self.layers:
            x = layer(x, future, ids == 0)
        logits = self.norm(x)[:, :-1] @ self.items.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


def ragged(batch: int, max_len: int, items: int, fill: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids padded on the right with 0, and times; lengths have a heavy tail, and sum up to about `fill` of the batch."""
    g = torch.Generator().manual_seed(seed)
    share = torch.randn(batch, generator=g).mul(0.6).exp()
    lengths = share.clone()
    for _ in range(20):  # what the longest may not have goes to the others
        lengths = (lengths * (fill * max_len * batch / lengths.sum())).clamp(3, max_len)
    valid = torch.arange(max_len) < lengths.round().long()[:, None]
    ids = torch.randint(1, items + 1, (batch, max_len), generator=g)
    times = torch.randint(1, 100_000, (batch, max_len), generator=g).cumsum(1)
    return torch.where(valid, ids, 0), torch.where(valid, times, 0)
