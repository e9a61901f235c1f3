"""Small recommenders written plainly: what the simulator must train as eager does."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ITEMS, WIDTH, HEADS, LENGTH, BUCKETS = 50, 16, 2, 12, 32


class MLP(nn.Module):
    """Mean of item embeddings, two layers, a click or none."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH, padding_idx=0)
        self.inner, self.outer = nn.Linear(WIDTH, 32), nn.Linear(32, 1)

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        hidden = F.relu(self.inner(self.items(ids).mean(1)))
        return F.binary_cross_entropy_with_logits(self.outer(hidden).squeeze(-1), clicked)

    @staticmethod
    def batch(size: int, length: int) -> tuple[Tensor, ...]:
        return torch.randint(0, ITEMS, (size, length)), torch.randint(0, 2, (size,)).float()


class SASRec(nn.Module):
    """One block: masked softmax attention and a feed-forward layer, then a loss over all items."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.items, self.places = nn.Embedding(ITEMS, WIDTH, padding_idx=0), nn.Embedding(LENGTH, WIDTH)
        self.before, self.between, self.after = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        size, length = ids.shape
        x = self.items(ids) * WIDTH**0.5 + self.places(torch.arange(length))
        x = F.dropout(x, self.dropout, self.training)
        q, k, v = self.qkv(self.before(x)).view(size, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        seen = torch.ones(length, length, dtype=torch.bool).tril() & (ids != 0)[:, None, None, :]
        weights = scores.masked_fill(~seen, -1e9).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(size, length, -1))
        x = x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))
        logits = self.after(x) @ self.items.weight.t()
        return F.cross_entropy(logits.view(-1, ITEMS), targets.reshape(-1), ignore_index=0)

    @staticmethod
    def batch(size: int, length: int) -> tuple[Tensor, ...]:
        return torch.randint(0, ITEMS, (size, length)), torch.randint(1, ITEMS, (size, length))


class HSTU(nn.Module):
    """One layer: pointwise SiLU attention with position and time bias, gated by u."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH, padding_idx=0)
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.uvqk, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.by_place = nn.Parameter(torch.randn(2 * LENGTH - 1) * 0.02)
        self.by_time = nn.Parameter(torch.randn(BUCKETS + 1) * 0.02)

    def bias(self, times: Tensor) -> Tensor:
        places = torch.arange(times.shape[1])
        of_place = self.by_place[places[None, :] - places[:, None] + LENGTH - 1]
        gaps = (times[:, :, None] - times[:, None, :]).abs().clamp(min=1)
        bucket = (gaps.float().log() / 0.301).long().clamp(0, BUCKETS)
        return of_place[None] + self.by_time[bucket.view(-1)].view(gaps.shape)

    def forward(self, ids: Tensor, times: Tensor, targets: Tensor) -> Tensor:
        size, length = ids.shape
        x = self.items(ids)
        mixed = F.silu(self.uvqk(self.before(x))).view(size, length, 4, HEADS, -1)
        u, v, q, k = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        weights = F.silu(q @ k.transpose(-1, -2) + self.bias(times)[:, None]) / length
        weights = weights * (torch.ones(length, length, dtype=torch.bool).tril() & (ids != 0)[:, None, None, :])
        attended = (weights @ v).transpose(1, 2).reshape(size, length, -1)
        x = x + self.out(self.after(attended) * u.transpose(1, 2).reshape(size, length, -1))
        logits = x @ self.items.weight.t()
        return F.cross_entropy(logits.view(-1, ITEMS), targets.reshape(-1), ignore_index=0)

    @staticmethod
    def batch(size: int, length: int) -> tuple[Tensor, ...]:
        ids, targets = SASRec.batch(size, length)
        return ids, torch.randint(0, 10**6, (size, length)).sort(-1).values, targets
