"""Histories of unequal length, padded and packed; what turbogr does to packed ones, and loops over histories."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import turbogr_compile.kernels  # noqa: F401  registers torch.ops.turbogr

EVERYTHING_BEFORE = 2**62


@dataclass(frozen=True)
class Batch:
    """Histories of a batch, padded on the right to the longest."""

    lengths: Tensor  # (B,)

    @staticmethod
    def heavy_tailed(sequences: int, longest: int, fill: float = 0.3, sigma: float = 1.0, seed: int = 0) -> Batch:
        """Log-normal lengths whose sum is about `fill` of the padded batch; one history has the full length."""
        draws = np.random.default_rng(seed).standard_normal(sequences)
        low, high = -5.0, math.log(longest) + 3
        for _ in range(60):
            middle = (low + high) / 2
            lengths = np.clip(np.exp(middle + sigma * draws).round(), 1, longest)
            lengths[np.argmax(lengths)] = longest
            low, high = (middle, high) if lengths.mean() < fill * longest else (low, middle)
        return Batch(torch.from_numpy(lengths.astype(np.int64)))

    @cached_property
    def sequences(self) -> int:
        return len(self.lengths)

    @cached_property
    def longest(self) -> int:
        return int(self.lengths.max())

    @cached_property
    def rows(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def sizes(self) -> list[int]:
        return self.lengths.tolist()

    @cached_property
    def offsets(self) -> Tensor:
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    @cached_property
    def valid(self) -> Tensor:
        """bool (B, N)."""
        return torch.arange(self.longest) < self.lengths[:, None]

    @cached_property
    def columns(self) -> Tensor:
        """Where in its history each row stands, (T,)."""
        return self.packed(torch.arange(self.longest).expand(self.sequences, -1))

    def packed(self, x: Tensor) -> Tensor:
        """(B, N, …) -> (T, …)."""
        return x[self.valid]

    def padded(self, x: Tensor) -> Tensor:
        """(T, …) -> (B, N, …), with zeros."""
        result = x.new_zeros(self.sequences, self.longest, *x.shape[1:])
        result[self.valid] = x
        return result

    @cached_property
    def fill(self) -> float:
        return self.rows / (self.sequences * self.longest)

    @cached_property
    def causal_pairs(self) -> int:
        return int((self.lengths * (self.lengths + 1) // 2).sum())

    @cached_property
    def padded_pairs(self) -> int:
        return self.sequences * self.longest**2


# --- one history after the other ---------------------------------------------------------------------


def each_history(one: Callable[..., Tensor], batch: Batch, *packed: Tensor) -> Tensor:
    """`one(number, …)` of each history's (H, n, d), put together again as (T, H, d)."""
    # Splits, not slices: the backward of a slice fills all rows with zeros, for every history anew.
    parts = zip(*(x.split(batch.sizes) for x in packed), strict=True)
    results = [one(number, *(x.transpose(0, 1) for x in part)) for number, part in enumerate(parts)]
    return torch.cat([result.transpose(0, 1) for result in results])


def silu_loop(batch: Batch, bias: Callable[[int], Tensor] | None = None) -> Callable[..., Tensor]:
    """HSTU's attention of (T, H, d); `bias(number)` is added to the scores of a history."""
    N = batch.longest
    causal = torch.ones(N, N).tril()

    def one(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, width = q.shape[1:]
        scores = torch.bmm(q, k.transpose(1, 2)) * width**-0.5
        scores = scores if bias is None else scores + bias(number)
        return torch.bmm(F.silu(scores) / N * causal[:n, :n], v)

    return lambda q, k, v: each_history(one, batch, q, k, v)


def softmax_loop(batch: Batch) -> Callable[..., Tensor]:
    def one(number: int, *heads_first: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*(x.unsqueeze(0) for x in heads_first), is_causal=True)[0]

    return lambda q, k, v: each_history(one, batch, q, k, v)


# --- turbogr -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Biases:
    """Arguments of the biases by distance and by time, packed."""

    by_distance: Tensor  # (2M - 1,): entry query column - key column + M - 1
    by_time: Tensor  # (K + 1,)
    bounds: Tensor  # (K,)
    query_times: Tensor  # (T,)
    key_times: Tensor  # (T,)


def attend(
    query: Tensor, key: Tensor, value: Tensor, batch: Batch, activation: str, scale: float, post_scale: float = 1.0,
    biases: Biases | None = None,
) -> Tensor:  # fmt: skip
    """turbogr's causal attention of packed rows (T, H, D)."""
    rows = (batch.offsets, batch.offsets, batch.columns, batch.columns)
    tables: tuple[Tensor | None, ...] = (None,) * 5
    if biases is not None:
        tables = (biases.by_distance[None], biases.by_time[None], biases.bounds, biases.query_times, biases.key_times)
    result = torch.ops.turbogr.jagged_attention(
        query, key, value, *rows, None, None, None, *tables, None,
        activation, scale, post_scale, 0, EVERYTHING_BEFORE, 0.0,
    )  # fmt: skip
    return result[0]


def silu_split(x: Tensor, parts: int = 4) -> list[Tensor]:
    return torch.ops.turbogr.silu_split(x, [x.shape[-1] // parts] * parts)


def norm_gate(x: Tensor, norm: nn.LayerNorm, gate: Tensor) -> Tensor:
    return torch.ops.turbogr.norm_gate(x, gate, norm.weight, norm.bias, norm.eps)[0]


def lookup(table: Tensor, rows: Tensor) -> Tensor:
    return torch.ops.turbogr.embedding(table, rows, -1)
