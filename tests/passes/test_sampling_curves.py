"""Training with negatives in FP16 follows training with float32: their curves differ less than those of two seeds."""

from __future__ import annotations

import runpy
import statistics
from pathlib import Path

import pytest
import torch

import turbogr_compile

from .test_sampling_together import ITEMS, LENGTH, SASRec

STEPS, LAST, SEEDS = 200, 40, (0, 1, 2)


histories = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "hstu.py"))["histories"]  # of the demo


def curve(seed: int, spec: str) -> list[float]:
    torch._dynamo.reset()
    model = SASRec()
    torch.manual_seed(seed)
    for layer in (model.items, model.places, model.qkv, model.out):
        layer.reset_parameters()
    step = turbogr_compile.compile(model, passes=[spec], on_error="raise")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for number in range(STEPS):
        loss = step(histories(16, LENGTH, ITEMS - 1, seed=STEPS * seed + number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def end_of(losses: list[float]) -> float:
    return statistics.fmean(losses[-LAST:])


@pytest.mark.slow
def test_halves_follow_float32():
    plain, half = (
        [curve(seed, f"fuse-sampling{{min_numbers=0{option}}}") for seed in SEEDS] for option in ("", ", half=true")
    )
    assert all(end_of(x) < 0.7 * x[0] for x in plain), "nothing was learnt, so there is no curve to follow"
    assert plain != half
    noise = statistics.stdev(map(end_of, plain))
    differences = [abs(end_of(a) - end_of(b)) for a, b in zip(plain, half, strict=True)]
    assert max(differences) < noise, (noise, differences)
