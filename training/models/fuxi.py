"""A model in the manner of FuXi-alpha: a channel of attention each for meaning, time and position, a gate over them.

In FuXi-alpha times and positions weigh values by themselves. Here each is added to the scores, in its own channel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .biases import PositionBias, TimeBias


class FuXiLayer(nn.Module):
    """Three channels read the same values, a gate weighs them; then a feed-forward part with a gate of its own."""

    def __init__(self, dim: int, heads: int, max_len: int, buckets: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.channel_norm, self.feed_norm = nn.LayerNorm(dim), nn.LayerNorm(3 * dim), nn.LayerNorm(dim)
        self.gate, self.vqk = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(3 * dim, dim)
        self.feed_gate, self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.position, self.time = PositionBias(max_len), TimeBias(buckets)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, valid: Tensor, times: Tensor) -> Tensor:
        B, N, D = x.shape
        normed = self.norm(x)
        v, q, k = F.silu(self.vqk(normed)).chunk(3, dim=-1)
        q, k, v = (t.reshape(B, N, self.heads, D // self.heads).transpose(1, 2) for t in (q, k, v))
        causal = torch.tril(torch.ones(N, N, dtype=torch.bool, device=x.device))
        seen = causal & valid[:, None, None, :]
        meaning = F.silu(q @ k.transpose(-1, -2)) / N * seen @ v
        time = F.silu(q @ k.transpose(-1, -2) + self.time(times).unsqueeze(1)) / N * seen @ v
        position = F.silu(q @ k.transpose(-1, -2) + self.position(N)) / N * seen @ v
        mixed = torch.cat([c.transpose(1, 2).reshape(B, N, D) for c in (meaning, time, position)], dim=-1)
        x = x + self.dropout(self.out(self.channel_norm(mixed) * F.silu(self.gate(normed))))
        normed = self.feed_norm(x)
        return x + self.dropout(self.down(F.silu(self.feed_gate(normed)) * self.up(normed)))
