"""SASRec: a causal Transformer over the history."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SASRecLayer(nn.Module):
    """Softmax attention, then two linear layers, each with a residual."""

    def __init__(self, dim: int, heads: int, max_len: int, buckets: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.feed_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, valid: Tensor, times: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.reshape(B, N, self.heads, D // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) / (D // self.heads) ** 0.5
        causal = torch.tril(torch.ones(N, N, dtype=torch.bool, device=x.device))
        scores = scores.masked_fill(~(causal & valid[:, None, None, :]), -1e9)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, N, D)
        x = x + self.dropout(self.out(mixed))
        return x + self.dropout(self.down(F.gelu(self.up(self.feed_norm(x)))))
