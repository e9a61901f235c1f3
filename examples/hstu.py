"""A small HSTU-like generative recommender, written the padded way a practitioner would write it.

Nothing in this file knows about turbogr. Histories are item ids padded on the right with 0; every layer sees (B, N, D).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HSTULayer(nn.Module):
    """Pointwise SiLU attention with a learned relative position bias, gated output, residual."""

    def __init__(self, dim: int, heads: int, max_len: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.uvqk = nn.Linear(dim, 4 * dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(2 * max_len - 1))
        self.out_norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        B, N, D = x.shape
        u, v, q, k = F.silu(self.uvqk(self.norm(x))).chunk(4, dim=-1)
        q, k, v = (t.reshape(B, N, self.heads, D // self.heads).transpose(1, 2).contiguous() for t in (q, k, v))
        position = torch.arange(N, device=x.device)
        distance = position[:, None] - position[None, :] + self.bias.numel() // 2
        scores = F.silu(q @ k.transpose(-1, -2) + self.bias[distance]) / N
        causal = torch.tril(torch.ones(N, N, dtype=torch.bool, device=x.device))
        scores = scores * (causal & valid[:, None, None, :])
        mixed = (scores @ v).transpose(1, 2).reshape(B, N, D)
        return x + self.dropout(self.out(u * self.out_norm(mixed)))


class Recommender(nn.Module):
    """Next-item prediction: embeddings, HSTU layers, cross-entropy over all items where there is a next one."""

    def __init__(
        self, items: int = 2000, dim: int = 64, heads: int = 2, layers: int = 2, max_len: int = 128, dropout: float = 0
    ) -> None:
        super().__init__()
        self.items = nn.Embedding(items + 1, dim, padding_idx=0)
        self.positions = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(HSTULayer(dim, heads, max_len, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.items.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        valid = ids != 0
        position = torch.arange(ids.shape[1], device=ids.device)
        x = self.items(ids) * self.items.embedding_dim**0.5 + self.positions(position)
        x = self.dropout(x) * valid.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, valid) * valid.unsqueeze(-1)
        return self.norm(x)

    def loss(self, ids: Tensor) -> Tensor:
        hidden = self(ids)
        logits = hidden[:, :-1] @ self.items.weight.T
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0)


def histories(batch: int, max_len: int, items: int, seed: int) -> Tensor:
    """Heavy-tailed histories with structure to learn: each user walks through the catalogue with their own stride."""
    g = torch.Generator().manual_seed(seed)
    lengths = (torch.randn(batch, generator=g).exp() * 0.18 * max_len).long().clamp(3, max_len)
    start = torch.randint(0, items, (batch, 1), generator=g)
    stride = torch.randint(1, 4, (batch, 1), generator=g)
    column = torch.arange(max_len)
    ids = (start + stride * column) % items + 1
    return torch.where(column < lengths[:, None], ids, 0)
