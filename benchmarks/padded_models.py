"""The two recommenders of the training-step benchmark, written padded, the ordinary way.

Ids are padded on the right with 0. Nothing here knows about turbogr, and nothing packs. Attention takes the cheapest
padded form there is: under right padding a causal mask alone keeps pads from being read.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HSTULayer(nn.Module):
    """Pointwise SiLU attention, gated output, residual."""

    def __init__(self, dim: int, heads: int, max_len: int) -> None:
        super().__init__()
        self.dim, self.heads, self.width = dim, heads, dim // heads
        self.norm, self.out_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.uvqk, self.out = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.register_buffer("causal", torch.ones(max_len, max_len).tril())

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        u, v, q, k = F.silu(self.uvqk(self.norm(x))).split(D, dim=-1)
        v, q, k = (t.view(B, N, self.heads, self.width) for t in (v, q, k))
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * self.width**-0.5
        weights = F.silu(scores) / N * self.causal[:N, :N]
        mixed = torch.einsum("bhnm,bmhd->bnhd", weights, v).reshape(B, N, D)
        return x + self.out(self.out_norm(mixed) * u)


class SASRecLayer(nn.Module):
    """Softmax attention, then two linear layers, each with a residual."""

    def __init__(self, dim: int, heads: int, max_len: int) -> None:
        super().__init__()
        self.dim, self.heads, self.width = dim, heads, dim // heads
        self.norm, self.feed_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, D = x.shape
        q, k, v = self.qkv(self.norm(x)).split(D, dim=-1)
        q, k, v = (t.view(B, N, self.heads, self.width).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, N, D))
        return x + self.down(F.relu(self.up(self.feed_norm(x))))


class Recommender(nn.Module):
    """Next-item prediction against the target and negatives that all positions share."""

    def __init__(self, layer: type[nn.Module], items: int, dim: int, heads: int, layers: int, max_len: int) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(items, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(layer(dim, heads, max_len) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids: Tensor) -> Tensor:
        valid = (ids != 0).unsqueeze(-1)
        position = torch.arange(ids.shape[1], device=ids.device)
        x = (self.items(ids) + self.positions(position)) * valid
        for layer in self.layers:
            x = layer(x) * valid
        return self.norm(x)

    def loss(self, ids: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        valid = ids != 0
        hidden = self(ids)
        positive = (hidden * self.items(targets)).sum(-1, keepdim=True)
        logits = torch.cat([positive, hidden @ self.items(negatives).T], dim=-1)
        each = logits.logsumexp(-1) - logits[..., 0]
        return (each * valid).sum() / valid.sum()
