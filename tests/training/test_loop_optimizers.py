"""Optimizers: bf16 storage that is right on average and the same every time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from turbogr_compile.kernels.adamw import round_by_chance
from turbogr_compile.training.optimizers import StochasticAdamW


def test_rounding_is_right_on_average():
    x = torch.tensor([1 + 2**-9, -3.0001, 1e-20, 7.0]).repeat(40_000, 1)
    chance = torch.randint(0, 1 << 16, x.shape, generator=torch.Generator().manual_seed(0))
    rounded = round_by_chance(x, chance)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - x).abs().le(x.abs() * 2**-7).all()
    torch.testing.assert_close(rounded.double().mean(0), x[0].double(), rtol=1e-4, atol=0)
    assert torch.equal(rounded[:, 3].float(), x[:, 3])


def test_not_finite_stays():
    x = torch.tensor([float("inf"), -float("inf"), float("nan")])
    found = round_by_chance(x, torch.full((3,), 0xFFFF))
    assert found[:2].tolist() == [float("inf"), -float("inf")] and found[2].isnan()


def test_small_updates_arrive():
    """Of 2^-12 each, where bf16 can only move by 2^-8 around 1: to nearest, none would."""
    p = nn.Parameter(torch.ones(2000, dtype=torch.bfloat16))
    optimizer = StochasticAdamW([p], lr=2**-12, weight_decay=0.0)
    for _ in range(64):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p.float().mean().item() == pytest.approx(1 - 64 * 2**-12, abs=1e-3)


def test_follows_adamw():
    torch.manual_seed(0)
    start, gradients = torch.randn(500), torch.randn(30, 500) + 0.5
    plain, stored = nn.Parameter(start.clone()), nn.Parameter(start.bfloat16())
    wide, narrow = torch.optim.AdamW([plain], lr=1e-2), StochasticAdamW([stored], lr=1e-2)
    for gradient in gradients:
        plain.grad, stored.grad = gradient.clone(), gradient.bfloat16()
        wide.step(), narrow.step()
    moved = (plain - start).abs().mean()
    assert (stored.float() - plain).abs().mean() < 0.1 * moved
    assert abs((stored.float() - plain).mean()) < 0.01 * moved


def test_the_same_bits_and_resumes():
    def steps(count: int, p: nn.Parameter, state=None) -> tuple[torch.Tensor, dict]:
        optimizer = StochasticAdamW([p], lr=1e-2, seed=3)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(count):
            p.grad = torch.linspace(-1, 1, 300).bfloat16()
            optimizer.step()
        return p.detach().clone(), optimizer.state_dict()

    start = torch.linspace(1, 2, 300).bfloat16()
    whole, _ = steps(6, nn.Parameter(start.clone()))
    half, state = steps(3, nn.Parameter(start.clone()))
    rest, _ = steps(3, nn.Parameter(half), state)
    assert torch.equal(whole, rest)
