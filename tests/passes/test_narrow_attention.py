"""Attention as the AscendC kernels take it computes what it did before."""

from __future__ import annotations

import pytest
import torch

import turbogr_compile.kernels  # noqa: F401  (registers the ops)

ops = torch.ops.turbogr
NARROW = {"target": "eager", "pipeline": "narrow-attention", "on_error": "raise"}
LENGTHS = torch.tensor([3, 0, 5, 1])
OFFSETS = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
COLUMNS = torch.cat([torch.arange(int(n)) for n in LENGTHS])
ROWS = int(LENGTHS.sum())


def attention(q, k, v, bias, bounds, times, activation="silu"):
    return ops.jagged_attention(
        q, k, v, OFFSETS, OFFSETS, COLUMNS, COLUMNS, None, None, None, None, bias, bounds, times, times, None,
        activation, 0.3, 0.5, 0, 1 << 40, 0.0,
    )[0]  # fmt: skip


def inputs(seed: int = 0):
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, ROWS, 2, 4)
    times = 1_700_000_000 + torch.randint(0, 10_000_000, (ROWS,)).sort().values
    bounds = torch.tensor([0, 60, 3600, 86_400, 1_000_000, 2**40])
    return q, k, v, torch.randn(2, 7), bounds, times


@pytest.mark.parametrize("activation", ["silu", "softmax"])
def test_results_stay_and_times_become_narrow(activation: str):
    def f(*arguments):
        return attention(*arguments, activation=activation)

    given = inputs()
    compiled = torch.compile(
        f,
        backend="turbogr",
        options={**NARROW, "expect": {"narrow-attention": 1}},
    )
    torch.testing.assert_close(compiled(*given), f(*given), rtol=1e-5, atol=1e-6)


def test_gradients_stay():
    given = inputs(1)
    results = []
    for run in (attention, torch.compile(attention, backend="turbogr", options=NARROW)):
        leaves = [x.clone().requires_grad_() for x in given[:4]]
        run(*leaves, *given[4:]).square().sum().backward()
        results.append([x.grad for x in leaves])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_what_is_narrow_already_is_left_alone():
    q, k, v, *_ = inputs()

    def f(q, k, v):
        return ops.jagged_attention(
            q, k, v, OFFSETS, OFFSETS, COLUMNS, COLUMNS, *[None] * 9, "silu", 0.3, 0.5, 0, 1 << 40, 0.0
        )[0]

    compiled = torch.compile(f, backend="turbogr", options={**NARROW, "expect": {"narrow-attention": 0}})
    torch.testing.assert_close(compiled(q, k, v), f(q, k, v))
