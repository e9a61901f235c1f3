"""Sampled losses through ascend-sim: SampledSoftmax and its backward are in the GE graphs, and the step is eager's."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from turbogr_compile.losses import sampled_losses
from turbogr_compile.lowering.torchair import native

from .simulator import needs_torchair

pytestmark = needs_torchair
ITEMS, WIDTH, NEGATIVES = 40, 16, 6
SMALL = "fuse-sampling{form=rows, multiple=16, min_numbers=0}"


class Sampled(nn.Module):
    """Padded ids, unit rows, a softmax of the next item against negatives from outside."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.items, self.mix = nn.Embedding(ITEMS, width, padding_idx=0), nn.Linear(width, width)

    def queries(self, ids: Tensor) -> Tensor:
        x = self.items(ids)
        return x + torch.relu(self.mix(x))

    def forward(self, ids: Tensor, negatives: Tensor) -> Tensor:
        x, targets = self.queries(ids[:, :-1]), ids[:, 1:]
        own = (x * F.normalize(self.items(targets), dim=-1)).sum(-1, keepdim=True)
        others = torch.einsum("bnd,bnkd->bnk", x, F.normalize(self.items(negatives), dim=-1))
        others = others.masked_fill(negatives == targets.unsqueeze(-1), -1e9)
        losses = -F.log_softmax(torch.cat([own, others], -1) / 0.2, -1)[..., 0]
        valid = (targets != 0).to(losses.dtype)
        return (losses * valid).sum() / valid.sum()


class Shared(Sampled):
    """What sharing makes of it, by hand: packed rows, groups of four."""

    def forward(self, ids: Tensor, negatives: Tensor) -> Tensor:
        x, targets = self.queries(ids[:, :-1]), ids[:, 1:]
        real = targets != 0
        losses = sampled_losses(
            x[real], self.items.weight, targets[real], negatives[real], temperature=0.2, normalize_eps=1e-12, share=4
        )
        return losses.mean()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (4, 1), generator=generator)
    lengths[1] = 8
    ids = torch.randint(1, ITEMS, (4, 8), generator=generator)
    negatives = torch.randint(1, ITEMS, (4, 7, NEGATIVES), generator=generator)
    return torch.where(torch.arange(8) < lengths, ids, 0), negatives


def step(run, model: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    model.zero_grad()
    loss = run(*given)
    loss.backward()
    return (loss.detach(), *(p.grad.clone() for p in model.parameters()))


def simulated(model: nn.Module, spec: str):
    torch._dynamo.reset()
    options = {"target": "ascend-sim", "on_error": "raise", "passes": [spec]}
    return torch.compile(model, backend="turbogr", options=options)


@pytest.mark.parametrize(
    "spec, eager", [(SMALL, Sampled), (SMALL.replace("}", ", share=4}"), Shared)], ids=["own", "shared"]
)
def test_a_step_equals_eager(spec: str, eager: type[Sampled]):
    torch.manual_seed(0)
    model, other = Sampled(), eager()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    run = simulated(model, spec)
    with native.watching() as graphs:
        for seed in (1, 2):  # other lengths, the same graphs
            found, expected = step(run, model, batch(seed)), step(other, other, batch(seed))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(graphs) == 2
    types = [loaded.graph.types for loaded in graphs]
    assert "SampledSoftmax" in types[0] and "SampledSoftmaxBackward" in types[1]
    assert not any("LogSoftmax" in t or "BatchMatMul" in t for t in set().union(*types))


class Drawn(Sampled):
    """Negatives are drawn where the loss needs them."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids, torch.randint(1, ITEMS, (ids.shape[0], ids.shape[1] - 1, NEGATIVES)))


def test_draws_of_the_host_are_inputs_of_the_graph():
    found = []
    for target in ("ascend-sim", "cpu"):
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        model = Drawn()
        options = {"target": target, "on_error": "raise", "passes": [SMALL, "offload-sampling"]}
        with native.watching() as graphs:
            run = torch.compile(model, backend="turbogr", options=options)
            found.append(step(run, model, batch(1)[:1]))
        if target == "ascend-sim":
            types = set().union(*(loaded.graph.types for loaded in graphs))
            assert "SampledSoftmax" in types and not any("Random" in t for t in types)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
