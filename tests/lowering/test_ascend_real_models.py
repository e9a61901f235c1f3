"""Published models, unmodified, on the road to an NPU: torchair's graphs, AscendC sources, eager's loss and gradients.

Third-party code, as in tests/packing/test_real_models.py: set GR_HARNESS and GR_ROOT, or there is nothing to run.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys

import pytest
import torch

import turbogr_compile
from turbogr_compile.kernels.twin.launch import reports

from .simulator import needs_torchair

HARNESS = os.environ.get("GR_HARNESS", "")
pytestmark = [
    needs_torchair,
    pytest.mark.skipif(not (HARNESS and os.environ.get("GR_ROOT")), reason="set GR_HARNESS and GR_ROOT"),
]
PACKED = ("recbole_sasrec", "recbole_bert4rec", "minionerec_qwen", "meta_sasrec", "meta_hstu", "meta_stu")
DRAWS = 40


def built(name: str, dropout: float):
    """Model, maker of batches, and a step that returns the loss alone, in eager and compiled."""
    if HARNESS not in sys.path:
        sys.path.insert(0, HARNESS)
    model, batches, whole = importlib.import_module(name).build(dropout=dropout)
    model.train()
    torch._dynamo.reset()

    def step(batch):
        return whole(model, batch)[0]

    return model, batches, step, turbogr_compile.compile(step, target="ascend-sim", on_error="raise")


def taken(model, step, batch, seed: int = 0):
    """Loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = step(copy.deepcopy(batch))
    loss.backward()
    return loss.detach(), {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sizes", ["static", "dynamic"])
@pytest.mark.parametrize("name", PACKED)
def test_a_step_equals_eager(name: str, sizes: str):
    model, batches, step, run = built(name, dropout=0.0)
    many = {"static": (0, 0, 0), "dynamic": (16, 12, 9, 20)}[sizes]
    with reports() as launched:
        for seed, size in enumerate(many):
            batch = batches(seed=seed, **({"batch_size": size} if size else {}))
            expected, wanted = taken(model, step, batch)
            actual, found = taken(model, run, batch)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
            assert wanted.keys() == found.keys()
            for key, gradient in wanted.items():
                assert (gradient - found[key]).norm() <= 1e-4 * gradient.norm().clamp(min=1e-6), key
    assert {"jagged_attention", "jagged_attention_backward"} <= {r.op for r in launched}
    assert not any(s.fallbacks for s in turbogr_compile.statistics())


@pytest.mark.parametrize("name", PACKED)
def test_dropout_has_eagers_distribution(name: str):
    """Packed rows draw other numbers than padded ones: the loss and the gradient's norm agree in the mean."""
    model, batches, step, run = built(name, dropout=0.3)
    batch = batches(seed=0)

    def drawn(step, first: int):
        found = [taken(model, step, batch, first + n) for n in range(DRAWS)]
        losses = torch.stack([loss for loss, _ in found])
        norms = torch.stack([sum(g.square().sum() for g in gradients.values()).sqrt() for _, gradients in found])
        return torch.stack([losses, norms]).double()

    eager, ours = drawn(step, 1000), drawn(run, 2000)
    assert (ours.std(1) > 0).all(), "nothing was dropped"
    error = (eager.var(1) / DRAWS + ours.var(1) / DRAWS).sqrt()
    assert ((eager.mean(1) - ours.mean(1)).abs() <= 4.5 * error).all(), (eager.mean(1), ours.mean(1), error)
