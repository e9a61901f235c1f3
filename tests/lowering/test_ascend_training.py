"""Training through ascend-sim: the loss curve of the cpu target, and dropout with eager's distribution."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from .models import HSTU, SASRec
from .simulator import Simulated, needs_torchair
from .test_ascend_sim import Recommender, Silu, Softmax, batch

pytestmark = needs_torchair
STEPS = 200


def curve(model: nn.Module, target: str) -> list[float]:
    """Losses of a run over the same few batches, which a model of this size learns by heart."""
    torch._dynamo.reset()
    model = copy.deepcopy(model)
    step = torch.compile(model, backend="turbogr", options={"target": target, "on_error": "raise"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(STEPS):
        loss = step(*batch(4, 20, number % 5))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("layer", [Silu, Softmax])
def test_two_hundred_steps_follow_the_cpu_target(layer: type):
    torch.manual_seed(0)
    model = Recommender(layer)
    ours, theirs = curve(model, "ascend-sim"), curve(model, "cpu")
    assert theirs[-1] < 0.2 * theirs[0], "nothing was learnt, so there is no curve to follow"
    # Roundings of sums differ, and Adam makes much of small gradients: they part slowly.
    torch.testing.assert_close(ours[:20], theirs[:20], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)


def test_plain_torchair_gets_an_hstu_gradient_wrong_and_turbogr_does_not():
    """torchair's defaults lose the transpose of the gate `u`. Where this fails, torchair has been mended."""
    torch.manual_seed(0)
    model = HSTU()
    given = HSTU.batch(3, 12)

    def gradients(run, model: nn.Module) -> list[Tensor]:
        model.zero_grad()
        run(*given).backward()
        return [p.grad.clone() for p in model.parameters()]

    def worst(found: list[Tensor]) -> float:
        return max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(found, eager, strict=True))

    eager = gradients(model, model)
    plain = copy.deepcopy(model)
    assert worst(gradients(Simulated(plain, view_optimize=True), plain)) > 1e-2
    torch._dynamo.reset()
    ours = copy.deepcopy(model)
    run = torch.compile(ours, backend="turbogr", options={"target": "ascend-sim", "on_error": "raise"})
    assert worst(gradients(run, ours)) < 1e-4


def test_dropout_has_eagers_distribution():
    """Each step drops other units, and in the mean the loss is eager's; the backward uses the forward's mask."""
    torch.manual_seed(0)
    model = SASRec(dropout=0.4)
    given = SASRec.batch(6, 12)
    torch._dynamo.reset()
    run = torch.compile(model, backend="turbogr", options={"target": "ascend-sim", "on_error": "raise"})
    draws = 60
    ours = torch.stack([run(*given).detach() for _ in range(draws)]).double()
    eager = torch.stack([model(*given).detach() for _ in range(4 * draws)]).double()
    assert len(set(ours.tolist())) == draws
    error = (ours.var() / draws + eager.var() / (4 * draws)).sqrt()
    assert (ours.mean() - eager.mean()).abs() <= 4.5 * error
    assert 0.6 <= ours.std() / eager.std() <= 1.6
