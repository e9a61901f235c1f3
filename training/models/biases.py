"""Learned biases of attention by distance in positions and by time between two interactions."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PositionBias(nn.Module):
    """One number for each distance between two positions: (N, N)."""

    def __init__(self, max_len: int) -> None:
        super().__init__()
        self.max_len = max_len
        self.table = nn.Parameter(torch.randn(2 * max_len - 1) * 0.02)

    def forward(self, length: int) -> Tensor:
        position = torch.arange(length, device=self.table.device)
        return self.table[position[:, None] - position[None, :] + self.max_len - 1]


class TimeBias(nn.Module):
    """One number for each bucket of the time between two interactions, wider for longer times: (B, N, N)."""

    def __init__(self, buckets: int) -> None:
        super().__init__()
        self.buckets = buckets
        self.table = nn.Parameter(torch.randn(buckets) * 0.02)

    def forward(self, times: Tensor) -> Tensor:
        apart = (times[:, :, None] - times[:, None, :]).abs().clamp(min=1)
        return self.table[(apart.double().log() / 0.5).long().clamp(0, self.buckets - 1)]
