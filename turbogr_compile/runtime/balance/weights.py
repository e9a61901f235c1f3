"""Factors for local losses, so that gradients averaged over ranks are those of the whole batch.

After balancing, ranks hold different numbers of tokens, and the mean of means is not the mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import OptionError
from .plan import Plan

OVER = ("tokens", "sequences")


def loss_weight(plan: Plan, rank: int, over: str = "tokens", tokens: Any = None) -> float:
    """What a rank multiplies its mean loss with, where gradients are averaged over ranks (as DDP does).

    The result is the gradient of the mean over all tokens, or all sequences, of the global batch, whoever holds them.
    `tokens` are those that count in the loss, of each sample of the global batch; by default its lengths.
    """
    counts = np.bincount(plan.ranks, _counted(plan, over, tokens), plan.world)
    if counts.sum() == 0:
        raise OptionError(f"no {over} in the batch: its mean loss is not defined")
    return float(plan.world * counts[rank] / counts.sum())


def sample_weights(plan: Plan, rank: int, over: str = "tokens", tokens: Any = None) -> Tensor:
    """What a rank multiplies the summed loss of each of its samples with, to repeat the step as it was given.

    For jobs that must stay comparable with an unbalanced run in which every rank took the mean of its own batch: each
    sample keeps the weight that it had on the rank where it was.
    """
    counted = _counted(plan, over, tokens)
    before = np.bincount(plan.given, counted, plan.world)
    weights = 1.0 / np.maximum(before[plan.given], 1)
    return torch.from_numpy(weights[plan.samples(rank)])


def _counted(plan: Plan, over: str, tokens: Any) -> np.ndarray:
    if over not in OVER:
        raise OptionError(f"over={over!r}: a mean is over {' or '.join(OVER)}")
    if over == "sequences":
        return np.ones(len(plan.ranks))
    counted = plan.lengths if tokens is None else np.asarray(tokens)
    if counted.shape != plan.ranks.shape:
        raise OptionError(f"{counted.size} numbers of tokens for {len(plan.ranks)} samples")
    return counted
