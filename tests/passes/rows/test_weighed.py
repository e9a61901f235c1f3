"""Products over rows with weights that are no scores: given by the batch, by positions, or learned."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import turbogr_compile
from turbogr_compile.testing import Flops

ITEMS, DIM, B, N = 30, 8, 4, 12
LENGTHS = torch.tensor([3, 12, 1, 5])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.put, self.out = nn.Embedding(ITEMS, DIM), nn.Linear(DIM, DIM), nn.Linear(2 * DIM, DIM)
        self.learned, self.by_distance = nn.Parameter(torch.randn(N, N)), nn.Parameter(torch.randn(2 * N - 1))

    def loss(self, weigh, ids, pairs):
        x = self.items(ids)
        y = self.out(torch.cat([weigh(self, self.put(x), ids != 0, pairs), x], -1))
        return F.cross_entropy((y @ self.items.weight.T).flatten(0, 1), ids.flatten(), ignore_index=0)


def given(model, x, valid, pairs):
    """Edges of a graph of each sequence, in and out, side by side in one tensor."""
    return pairs[:, :, :N] @ x + pairs[:, :, N:] @ x.tanh()


def given_from_behind(model, x, valid, pairs):
    return (x.mT @ pairs[:, :, :N]).mT


def given_to_heads(model, x, valid, pairs):
    weights = torch.stack([pairs[:, :, :N], pairs[:, :, N:]], 1)
    return torch.einsum("bhnm,bmhd->bnhd", weights, x.unflatten(-1, (2, -1))).flatten(2)


def of_positions(model, x, valid, pairs):
    weights = torch.ones(N, N).tril()
    return (weights / weights.sum(-1, keepdim=True)) @ x


def by_distance(model, x, valid, pairs):
    at = torch.arange(N)
    return (model.by_distance[at[:, None] - at + N - 1].tril() * valid[:, None]) @ x


def learned(model, x, valid, pairs):
    return model.learned @ (x * valid[..., None])


def learned_under_a_mask(model, x, valid, pairs):
    return torch.where(valid[:, None], model.learned.softmax(-1), 0.0) @ x


def learned_beside_given(model, x, valid, pairs):
    """A weight that is zero has a gradient, so that nothing is hidden by the batch's zeros."""
    return (model.learned + pairs[:, :, :N]) @ (x * valid[..., None])


def of_pads_too(model, x, valid, pairs):
    return model.learned.tanh() @ x


PACKED = [
    given, given_from_behind, given_to_heads, of_positions, by_distance, learned, learned_under_a_mask,
    learned_beside_given,
]  # fmt: skip


def batch(seed):
    g = torch.Generator().manual_seed(seed)
    valid = torch.arange(N) < LENGTHS[torch.randperm(B, generator=g), None]
    pairs = torch.randn(B, N, 2 * N, generator=g) * (torch.rand(B, N, 2 * N, generator=g) < 0.4)
    return torch.randint(1, ITEMS, (B, N), generator=g) * valid, pairs * valid[:, :, None] * valid.repeat(1, 2)[:, None]


def gradients(model, loss_of, *inputs):
    model.zero_grad()
    loss = loss_of(*inputs)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("weigh", [*PACKED, of_pads_too], ids=lambda f: f.__name__)
def test_weights_that_are_no_scores(weigh, fresh):
    model = Model()
    run = turbogr_compile.compile(model.loss, target="eager", on_error="raise", worth="always")
    for seed in range(3):
        wanted = gradients(model, model.loss, weigh, *batch(seed))
        torch.testing.assert_close(gradients(model, run, weigh, *batch(seed)), wanted, rtol=1e-4, atol=1e-6)
    executed = []
    for loss_of in (model.loss, run):
        with Flops() as flops:
            gradients(model, loss_of, weigh, *batch(0))
        executed.append(flops.total)
    packed = executed[1] / executed[0] <= int(LENGTHS.sum()) / (B * N)
    assert packed == (weigh is not of_pads_too)


def test_an_edge_to_a_pad_is_read(fresh):
    """Which rows are neighbours is decided by each batch: here one of them is a pad."""
    model = Model()
    run = turbogr_compile.compile(model.loss, target="eager", on_error="raise", worth="always")
    gradients(model, run, given, *batch(0))
    ids, pairs = batch(0)
    pairs[:, 0, N - 1] = 2.0
    wanted = gradients(model, model.loss, given, ids, pairs)
    torch.testing.assert_close(gradients(model, run, given, ids, pairs), wanted, rtol=1e-4, atol=1e-6)
