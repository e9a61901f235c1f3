"""Packed, fused, drawn one batch ahead, all at once: the numbers are those of the same step without the worker."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import turbogr_compile
from turbogr_compile import Instrument
from turbogr_compile.graph.phases import Role
from turbogr_compile.graph.text import graph_text
from turbogr_compile.losses import sampled_losses

ITEMS, WIDTH, LENGTH, NEGATIVES = 60, 16, 12, 6


class SASRec(nn.Module):
    """Padded ids, one block of attention, negatives drawn where the loss needs them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.items, self.places = nn.Embedding(ITEMS, WIDTH, padding_idx=0), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def encode(self, ids):
        size, length = ids.shape
        x = self.items(ids) + self.places(torch.arange(length))
        q, k, v = self.qkv(self.norm(x)).view(size, length, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        seen = torch.ones(length, length, dtype=torch.bool).tril() & (ids != 0)[:, None, None, :]
        weights = (q @ k.transpose(-1, -2) * 0.35).masked_fill(~seen, -1e9).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).reshape(size, length, -1))

    def forward(self, ids):
        x, targets = self.encode(ids[:, :-1]), ids[:, 1:]
        negatives = torch.randint(1, ITEMS, (*targets.shape, NEGATIVES))
        own = (x * self.items(targets)).sum(-1, keepdim=True)
        others = torch.einsum("bnd,bnkd->bnk", x, self.items(negatives))
        others = others.masked_fill(negatives == targets.unsqueeze(-1), -1e9)
        losses = -F.log_softmax(torch.cat([own, others], -1), -1)[..., 0]
        valid = (targets != 0).to(losses.dtype)
        return (losses * valid).sum() / valid.sum()


def batches(count=4):
    generator = torch.Generator().manual_seed(2)
    found = []
    for _ in range(count):
        lengths = torch.randint(2, LENGTH + 1, (6, 1), generator=generator)
        ids = torch.randint(1, ITEMS, (6, LENGTH), generator=generator)
        found.append(torch.where(torch.arange(LENGTH) < lengths, ids, 0))
    return found


class Watch(Instrument):
    """The captured graph when all passes have run, and what the prologue handed over."""

    def __init__(self):
        self.text = ""

    def finish(self, run):
        if run.role is Role.CAPTURED:
            self.text = graph_text(run.graph)


def train(spec, loop):
    """Losses of a run, and what was compiled for it."""
    torch._dynamo.reset()
    gc.collect()
    model, watch = SASRec(), Watch()
    older = set(turbogr_compile.statistics())
    step = turbogr_compile.compile(model, passes=[spec, "offload-sampling"], on_error="raise", instruments=(watch,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for ids in loop(batches()):
        optimizer.zero_grad()
        loss = step(ids)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    (counts,) = (s for s in turbogr_compile.statistics() if s not in older)
    return losses, watch.text, counts


@pytest.mark.parametrize("options", ["", ", share=4, half=true"], ids=["exact", "shared and half"])
def test_the_worker_changes_no_bit(options):
    spec = f"fuse-sampling{{min_numbers=0{options}}}"
    plain, text, counts = train(spec, lambda found: found)
    assert counts.ahead == 0 and "jagged_attention" in text
    assert "sampled_loss_total" in text and "randint" not in text.replace("ahead_randint", "")
    ahead, _, counts = train(spec, turbogr_compile.ahead)
    assert ahead == plain and counts.ahead == len(plain) - 1


class Given(SASRec):
    """The same with negatives from outside, so that two runs have the same."""

    def forward(self, ids, negatives):
        x, targets = self.encode(ids[:, :-1]), ids[:, 1:]
        own = (x * self.items(targets)).sum(-1, keepdim=True)
        others = torch.einsum("bnd,bnkd->bnk", x, F.embedding(negatives, self.items.weight))
        losses = -F.log_softmax(torch.cat([own, others], -1), -1)[..., 0]
        valid = (targets != 0).to(losses.dtype)
        return (losses * valid).sum() / valid.sum()


def test_a_shared_step_is_the_twin_on_packed_rows():
    """Groups are runs of packed rows, also across sequences: what a mask picks, in order."""
    torch._dynamo.reset()
    model, ids = Given().double(), batches(1)[0]
    targets, negatives = ids[:, 1:], torch.randint(1, ITEMS, (6, LENGTH - 1, NEGATIVES))
    step = turbogr_compile.compile(model, passes=["fuse-sampling{share=4}"], on_error="raise")

    def by_hand(ids, negatives):
        real = targets != 0
        query = model.encode(ids[:, :-1])[real]
        return sampled_losses(query, model.items.weight, targets[real], negatives[real], share=4).mean()

    results = []
    for call in (step, by_hand):
        model.zero_grad()
        loss = call(ids, negatives)
        loss.backward()
        results.append((loss.detach(), *(p.grad.clone() for p in model.parameters())))
    torch.testing.assert_close(*results)
