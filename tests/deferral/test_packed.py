"""Losses outside of the model, however they are written: the FLOPs of the same step with the loss inside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from turbogr_compile.testing import Flops

from .programs import IDS, MASK, Broken, BrokenInALoop, SASRec, Y, compiled, cross_entropy, made, worst

LAST = (IDS != 0).sum(1) - 1


def rows_by_index(z):
    return F.cross_entropy(z[torch.arange(4), LAST], IDS[:, 0])


def gathered(z):
    return F.cross_entropy(z.gather(1, LAST[:, None, None].expand(-1, 1, z.size(-1))).squeeze(1), IDS[:, 0])


def last_column(z):
    return F.cross_entropy(z[:, -1], IDS[:, 0])


def rows_by_mask(z):
    return F.cross_entropy(z[MASK], Y[MASK])


def masked_afterwards(z):
    return (F.cross_entropy(z.transpose(1, 2), Y, reduction="none") * MASK).sum() / MASK.sum()


def smoothed(z):
    return nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0)(z.view(-1, z.size(-1)), Y.view(-1))


def rows_by_masked_select(z):
    return F.cross_entropy(z.masked_select(MASK[..., None]).view(-1, z.size(-1)), Y[MASK])


def rows_by_a_one_hot_matrix_made_outside(z):
    """As BERT4Rec of RecBole picks what it has masked."""
    return F.cross_entropy(torch.bmm(F.one_hot(LAST[:, None], z.size(1)).to(z.dtype), z)[:, 0], IDS[:, 0])


LOSSES = (
    cross_entropy, rows_by_index, gathered, last_column, rows_by_mask, masked_afterwards, smoothed,
    rows_by_masked_select, rows_by_a_one_hot_matrix_made_outside,
)  # fmt: skip


def counted(step, after=1):
    for _ in range(after):  # compiled
        step()
    with Flops() as flops:
        step()
    return flops.total


def steps(model, called, loss):
    def step():
        model.zero_grad()
        logits = called(IDS)
        loss(logits).backward()

    return step


@pytest.fixture(autouse=True)
def compiled_anew():
    torch._dynamo.reset()


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_as_with_the_loss_inside(loss):
    theirs, ours, inside = (made(SASRec, layers=2) for _ in range(3))
    whole = compiled(lambda ids: loss(inside(ids)), deferral=False)
    eager = counted(steps(theirs, theirs, loss))
    deferred = counted(steps(ours, compiled(ours), loss))
    assert deferred <= 1.02 * counted(lambda: whole(IDS).backward()) and eager > 2 * deferred
    assert worst([p.grad for p in theirs.parameters()], [p.grad for p in ours.parameters()]) < 1e-12


@pytest.mark.parametrize("kind", [Broken, BrokenInALoop])
def test_a_graph_break_costs_nothing(kind):
    theirs, ours = made(kind, layers=2), made(kind, layers=2)
    called = compiled(ours)
    eager, deferred = (counted(steps(m, c, cross_entropy), after=4) for m, c in ((theirs, theirs), (ours, called)))
    assert eager > 2 * deferred
    assert worst([p.grad for p in theirs.parameters()], [p.grad for p in ours.parameters()]) < 1e-12


def test_a_metric_beside_the_loss_costs_nothing():
    model = made(SASRec, layers=2)
    called = compiled(model)

    def step():
        logits = called(IDS)
        hits = ((logits.argmax(-1) == Y) & MASK).sum()
        loss = cross_entropy(logits)
        loss.backward()
        assert hits.item() >= 0

    assert counted(step) == counted(steps(model, called, cross_entropy))


def hits(logits):
    return ((logits.argmax(-1) == Y) & MASK).sum().item()


def at_the_last(logits):
    return logits.detach()[torch.arange(4), LAST - 1].topk(3).indices.tolist()


def test_a_metric_read_before_the_loss_costs_one_forward_of_its_rows():
    model = made(SASRec, layers=2)
    called = compiled(model)

    def step():
        logits = called(IDS)
        hits(logits)
        cross_entropy(logits).backward()

    assert counted(step) <= 1.34 * counted(steps(model, called, cross_entropy))


@pytest.mark.parametrize("metric", [hits, at_the_last])
def test_a_metric_read_after_the_step_is_served_from_its_rows(metric):
    theirs, ours = made(SASRec, layers=2), made(SASRec, layers=2)
    called = compiled(ours)
    seen = {}

    def stepping(name, model, call):
        optimizer, seen[name] = torch.optim.SGD(model.parameters(), lr=0.1), []

        def step():
            optimizer.zero_grad()
            logits = call(IDS)
            cross_entropy(logits).backward()
            optimizer.step()
            seen[name].append(metric(logits))

        return step

    counted(stepping("eager", theirs, theirs), after=4)
    flops = counted(stepping("ours", ours, called), after=4)
    assert seen["ours"] == seen["eager"]
    assert worst(list(theirs.parameters()), list(ours.parameters())) < 1e-12
    assert flops <= 1.05 * counted(steps(ours, called, cross_entropy))


def test_rows_that_were_not_kept_are_computed():
    """Pads, after a loss that ignores them; and no more rows are kept for a reader who wants others."""
    theirs, ours = made(SASRec, layers=2), made(SASRec, layers=2)
    called = compiled(ours)

    def seen(call):
        found = []
        for _ in range(8):
            logits = call(IDS)
            cross_entropy(logits).backward()
            found += [hits(logits), logits.detach().tolist(), logits[:, -1].argmax(-1).tolist()]
        return found

    assert worst(seen(theirs), seen(called)) < 1e-12


def test_outputs_that_are_taken_as_they_are_take_one_forward():
    model = made(SASRec, layers=2)
    two = nn.Sequential(model, Pair())
    called = compiled(two)

    def step():
        first, second = called(IDS)
        memory = first.detach().numpy().sum()
        (second.square().mean() + first.mean()).backward()
        assert memory != 0

    def eagerly():
        first, second = two(IDS)
        (second.square().mean() + first.mean()).backward()

    assert counted(step) <= counted(eagerly)


class Pair(nn.Module):
    def forward(self, rows):
        return rows * 2, rows.tanh()
