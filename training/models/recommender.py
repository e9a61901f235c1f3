"""What the models have in common: item and position embeddings below, sampled softmax above."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .losses import sampled_softmax


@torch.no_grad()
def draw_items(rows: Tensor, generator: torch.Generator | None = None) -> None:
    """What rows of items begin as."""
    rows.normal_(std=0.02, generator=generator)


class Recommender(nn.Module):
    """Next-item recall over histories padded on the right; item 0 is padding, and every layer sees (B, N, D)."""

    def __init__(
        self, layers: Iterable[nn.Module], items: int, dim: int, max_len: int, *,
        negatives: int = 64, temperature: float = 0.1, dropout: float = 0.0, table: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.catalogue, self.negatives, self.temperature = items, negatives, temperature
        self.items = nn.Embedding(items + 1, dim, padding_idx=0, device=table)  # "meta": drawn by whoever places it
        self.positions = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)
        draw_items(self.items.weight)
        nn.init.normal_(self.positions.weight, std=0.02)
        with torch.no_grad():
            self.items.weight[0] = 0

    def forward(self, ids: Tensor, times: Tensor) -> Tensor:
        valid = ids != 0
        position = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.items(ids) * self.items.embedding_dim**0.5 + self.positions(position))
        x = x * valid.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, valid, times) * valid.unsqueeze(-1)
        return F.normalize(self.norm(x), dim=-1)

    def loss(self, ids: Tensor, times: Tensor) -> Tensor:
        size, length = ids.shape
        drawn = torch.randint(1, self.catalogue + 1, (size, length - 1, self.negatives), device=ids.device)
        return self.loss_against(drawn, ids, times)

    def loss_against(self, drawn: Tensor, ids: Tensor, times: Tensor) -> Tensor:
        hidden = self(ids, times)[:, :-1]
        return sampled_softmax(hidden, ids[:, 1:], drawn, self.items, self.temperature)

    def last(self, ids: Tensor, times: Tensor) -> Tensor:
        """(B, D): the product with an item's row says how well it would follow the history."""
        place = (ids != 0).sum(1) - 1
        return self(ids, times)[torch.arange(ids.shape[0], device=ids.device), place]

    def scores(self, ids: Tensor, times: Tensor, items: Tensor) -> Tensor:
        """(B, items): how well each item would follow the history; `items` are rows of all items, (items, D)."""
        return self.last(ids, times) @ items.T
