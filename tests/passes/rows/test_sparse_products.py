"""Rows times a matrix of the batch that leaves most of them out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import turbogr_compile
from turbogr_compile.testing import Flops

ITEMS, DIM, B, N, M = 30, 8, 4, 12, 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.up = nn.Embedding(ITEMS, DIM), nn.Linear(DIM, DIM)

    def forward(self, ids):
        x = self.items(ids)
        mean = (x * (ids != 0)[..., None]).mean(1, keepdim=True)  # says that ids have pads
        return torch.tanh(self.up(x)) + mean


def from_left(rows, places):
    return torch.bmm(places, rows)


def from_right(rows, places):
    return rows.mT @ places.mT


def places(columns):
    """One row for each picked column; a column that is picked twice, and weights that are no ones."""
    found = torch.zeros(B, M, N, dtype=torch.float64)
    found[torch.arange(B)[:, None], torch.arange(M), torch.tensor(columns)] = 0.5
    return found


BATCHES = [places([[0, 1, 1], [3, 4, 0], [2, 2, 2], [0, 0, 5]]), places([[9, 1, 10], [3, 4, 5], [6, 7, 8], [11, 0, 2]])]
EVERYWHERE = torch.arange(1, B * M * N + 1, dtype=torch.float64).view(B, M, N) / 100


@pytest.mark.parametrize("product", [from_left, from_right], ids=lambda f: f.__name__)
def test_rows_that_it_leaves_out_are_not_computed(product):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, ids = Model().double(), torch.randint(1, ITEMS, (B, N)) * (torch.arange(N) < N - 1)

    def step(ids, given):
        return product(model(ids), given).square().sum()

    def gradients(run, given):
        model.zero_grad()
        with Flops() as flops:
            loss = run(ids, given)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())], flops.total

    called = turbogr_compile.compile(step, target="eager", worth="always", verify="validate", on_error="raise")
    called(ids, BATCHES[0])
    for given, most in ((BATCHES[0], 0.4), (BATCHES[1], 0.6), (EVERYWHERE, 1.1)):
        (found, ours), (expected, eager) = gradients(called, given), gradients(step, given)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert ours <= most * eager
