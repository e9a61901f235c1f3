"""HSTU: pointwise SiLU attention biased by position and time, a gate, no feed-forward part."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .biases import PositionBias, TimeBias


class HSTULayer(nn.Module):
    """One projection makes gate, values, queries and keys; SiLU takes the place of softmax."""

    def __init__(self, dim: int, heads: int, max_len: int, buckets: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.out_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.uvqk, self.out = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(dim, dim)
        self.position, self.time = PositionBias(max_len), TimeBias(buckets)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, valid: Tensor, times: Tensor) -> Tensor:
        B, N, D = x.shape
        u, v, q, k = F.silu(self.uvqk(self.norm(x))).chunk(4, dim=-1)
        q, k, v = (t.reshape(B, N, self.heads, D // self.heads).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-1, -2) + (self.position(N) + self.time(times)).unsqueeze(1)
        causal = torch.tril(torch.ones(N, N, dtype=torch.bool, device=x.device))
        weights = F.silu(scores) / N * (causal & valid[:, None, None, :])
        mixed = (weights @ v).transpose(1, 2).reshape(B, N, D)
        return x + self.dropout(self.out(u * self.out_norm(mixed)))
