"""What a step has to compute: FLOPs of the model on histories without padding, each pair of positions counted once.

A matrix product of sizes m, k, n counts 2mkn; norms, activations, lookups and the update count nothing. Position i sees
positions up to i, so n positions make n (n + 1) / 2 pairs. The backward is twice the forward.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from ..runtime.balance import Cost
from .config import Config

LINEAR = {"hstu": 5, "sasrec": 12, "fuxi": 12}  # squares of the width, in weights of a layer
CHANNELS = {"hstu": 1, "sasrec": 1, "fuxi": 3}  # of attention in a layer


def forward_flops(config: Config, positions: float, pairs: float) -> float:
    """Of the forward, for so many positions that predict something and pairs of them that see each other."""
    layer = 2 * LINEAR[config.model] * config.dim**2 * positions + CHANNELS[config.model] * 4 * config.dim * pairs
    return config.layers * layer + 2 * config.dim * config.negatives * positions


def step_flops(config: Config, lengths: np.ndarray) -> float:
    """Of forward and backward; the last item of each history is predicted and predicts nothing."""
    positions = np.maximum(np.asarray(lengths, dtype=np.float64) - 1, 0)
    return 3 * forward_flops(config, positions.sum(), (positions * (positions + 1) / 2).sum())


def step_cost(config: Config) -> Cost:
    """Of a history by its length, for balancing: what all positions are multiplied with, and pairs of them."""
    if config.cost == "tokens":
        return Cost()
    one, two = (3 * forward_flops(config, n, n * (n + 1) / 2) for n in (1, 2))
    quadratic = (two - 2 * one) / 2
    return Cost(linear=one - quadratic, quadratic=quadratic)


def gemm_peak(size: int = 1024, seconds: float = 0.3) -> float:
    """FLOPs a second of the fastest product of two matrices, on the threads that torch has now."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until or best == float("inf"):
        began = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best
