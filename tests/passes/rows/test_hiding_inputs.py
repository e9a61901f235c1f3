"""A triangle of -inf that is added to an attention which stays padded: it hides keys, and need not be finite."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import turbogr_compile

IDS = torch.tensor([[3, 4, 5, 0, 0, 0], [6, 7, 0, 0, 0, 0], [1, 2, 3, 4, 0, 0]])
TARGET = torch.tensor([[4, 5, 0, 0, 0, 0], [7, 0, 0, 0, 0, 0], [2, 3, 4, 0, 0, 0]])
SCORES = {
    "softmax": (lambda s, mask: (s + mask).softmax(-1), True),
    "scaled, masked again": (lambda s, mask: ((s + mask[None]) / 2).masked_fill(s > 1e3, -1e9).softmax(2), True),
    "sdpa": (lambda s, mask: F.scaled_dot_product_attention(s, s.flip(0), s.flip(0), attn_mask=mask), True),
    "as a truth value": (lambda s, mask: s * (mask == 0), True),
    "relu": (lambda s, mask: (s + mask).relu(), True),
    "silu": (lambda s, mask: F.silu(s + mask), False),  # -inf times zero
    "over queries": (lambda s, mask: (s + mask).softmax(1), False),
    "subtracted": (lambda s, mask: torch.add(s, mask, alpha=-1).softmax(-1), False),
    "read beside": (lambda s, mask: (s + mask).softmax(-1) + mask.exp() * mask[0, 0], False),
}
SPOILED = {
    "a query sees no key": lambda mask: mask[2].fill_(-math.inf),
    "infinity": lambda mask: mask[3, 1].fill_(math.inf),
    "nan": lambda mask: mask[3, 1].fill_(math.nan),
}


class Model(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.items, self.mix, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))
        self.weights = weights

    def forward(self, ids, target):
        x = self.items(ids)
        # Rounded, so that no rule packs the attention: what is asked for is what happens beside it.
        x = x + self.weights((x @ x.mT).round(decimals=3), self.mask) @ x
        return F.cross_entropy(self.head(torch.tanh(self.mix(x)))[target != 0], target[target != 0])


def losses(weights, spoil=None):
    torch._dynamo.reset()
    torch.manual_seed(0)
    others = turbogr_compile.statistics()  # what other tests left behind
    model = Model(weights).double()
    step = turbogr_compile.compile(model, target="eager", verify="fast", worth="always", on_error="raise")
    step(IDS, TARGET)
    if spoil is not None:
        spoil(model.mask)
    found = step(IDS, TARGET).detach(), model(IDS, TARGET)
    (stats,) = (s for s in turbogr_compile.statistics() if not any(s is other for other in others))
    return found, stats


@pytest.mark.parametrize("name", SCORES)
def test_where_it_only_hides_the_step_is_packed(name):
    weights, packed = SCORES[name]
    (actual, expected), stats = losses(weights)
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert bool(stats.fallbacks) is not packed, stats.fallbacks


@pytest.mark.parametrize("spoiled", SPOILED)
def test_a_mask_that_hides_all_or_more_than_keys_falls_back(spoiled):
    (actual, expected), stats = losses(SCORES["softmax"][0], SPOILED[spoiled])
    torch.testing.assert_close(actual, expected, equal_nan=True)
    assert sum(stats.fallbacks.values()) == 1, stats.fallbacks
