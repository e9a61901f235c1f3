"""The usual loop with the loss outside: every batch has another width and another number of sequences."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile
from turbogr_compile import Instrument, Role
from turbogr_compile.testing import Flops

from .programs import SASRec, batch, compiled, gradients, made, worst


class Steps(Instrument):
    """How many graphs were compiled, of those that are run: what is only recorded is none."""

    def __init__(self) -> None:
        self.count = 0

    def start(self, run) -> None:
        self.count += run.role is Role.CAPTURED


def at_targets(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def at_masked_rows(logits, targets):
    return F.cross_entropy(logits[targets != 0], targets[targets != 0])


def lengths_of(count: int, width: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [width, *(drawn.randint(2, max(2, width // 2)) for _ in range(count - 1))]


def shapes(ones: int) -> list[tuple[int, int]]:
    drawn, widths, sizes = random.Random(0), list(range(3, 53)), [*[1] * ones, *range(2, 52 - ones)]
    drawn.shuffle(widths)
    drawn.shuffle(sizes)
    return list(zip(sizes, widths, strict=True))


@pytest.mark.parametrize(("loss", "ones"), [(at_targets, 0), (at_masked_rows, 2)])
def test_fifty_batches_of_fifty_shapes(loss, ones):
    torch._dynamo.reset()
    before = turbogr_compile.statistics()
    theirs, ours, graphs = made(SASRec), made(SASRec), Steps()
    called = compiled(ours, instruments=(graphs,))
    most, counted = 4 if ones else 3, 0
    for seed, (count, width) in enumerate(shapes(ones)):
        ids, targets = batch(lengths_of(count, width, seed), width, seed=seed)
        found = []
        for model, call in ((theirs, theirs), (ours, called)):
            model.zero_grad()
            with Flops() as flops:
                loss(call(ids), targets).backward()
            found.append(flops.total)
        assert worst(gradients(theirs), gradients(ours)) < 1e-12, (count, width)
        rows = (ids != 0).sum().item() / ids.numel()
        counted += rows < 0.7
        assert rows >= 0.7 or found[1] < 0.9 * found[0], (count, width, rows)
    assert counted > 25
    assert graphs.count <= most
    assert not any(s.fallbacks for s in turbogr_compile.statistics() if s not in before)
