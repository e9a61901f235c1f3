"""The copy in FP16 of a table with gradients of rows: kept from step to step, and always that of the table as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import turbogr_compile as turbogr
from turbogr_compile import Instrument
from turbogr_compile.kernels.half_copy import HalfCopy
from turbogr_compile.kernels.half_rows import BLOCK
from turbogr_compile.runtime.sharding import halves

from .test_row_gradients import Model, ids

ops = torch.ops.turbogr
HALF = "fuse-sampling{half=true, min_numbers=0}"
WHOLE = -1  # rows that were narrowed, where it was all of them


@pytest.fixture
def followed(monkeypatch) -> list[int]:
    """How many rows each step had to narrow; what it then reads is a new copy, to the bit."""
    counts: list[int] = []
    follow, refresh = HalfCopy.follow, halves.KeptHalf.refresh

    def counting(self, table, rows=None):
        counts[-1] = WHOLE if rows is None else len(rows)
        follow(self, table, rows)

    def comparing(self, table):
        counts.append(0)
        refresh(self, table)
        half, scales = ops.half_rows(table, BLOCK)
        assert torch.equal(self.copy.half, half) and torch.equal(self.copy.scales, scales)

    monkeypatch.setattr(HalfCopy, "follow", counting)
    monkeypatch.setattr(halves.KeptHalf, "refresh", comparing)
    return counts


class Training:
    def __init__(self, *passes: str, optimizer: Any = turbogr.RowWiseAdagrad, **options) -> None:
        torch._dynamo.reset()
        self.model = turbogr.row_gradients(Model())
        self.rows = optimizer(self.model, lr=0.1)
        self.loss = turbogr.compile(self.model, passes=[HALF, *passes], **options)

    def __call__(self, batches, between=lambda step, model: None) -> list[float]:
        losses = []
        torch.manual_seed(3)
        for step, batch in enumerate(batches):
            loss = self.loss(batch)
            loss.backward()
            self.rows.step()
            self.rows.zero_grad()
            between(step, self.model)
            losses.append(loss.item())
        return losses


class Targets(Instrument):
    def __init__(self) -> None:
        self.found: set[str] = set()

    def finish(self, run) -> None:
        self.found |= {str(n.target) for n in run.graph.nodes}


def test_a_step_narrows_nothing_that_the_update_has_narrowed(followed):
    seen = Targets()
    kept = Training(instruments=[seen])([ids(i) for i in range(5)])
    # While the first call is compiled and compared, weights are written to, and put back.
    assert followed[0] == WHOLE and followed[2:] == [0] * 3
    assert "turbogr.half_of_table.default" in seen.found
    assert not {"turbogr.half_rows.default", "turbogr.quantize_rows.default"} & seen.found
    followed.clear()

    def forget(step: int, model: nn.Module) -> None:
        model.items.table.half._state = None

    assert Training()([ids(i) for i in range(5)], forget) == kept and followed == [WHOLE] * 5


def test_after_other_optimizers_rows_that_changed_are_narrowed(followed):
    Training(optimizer=turbogr.RowSGD)([ids(i) for i in range(4)])
    assert followed[0] == WHOLE and all(1000 < count < 5000 for count in followed[2:]) and len(followed) == 4


def test_other_writes_are_seen(followed):
    def write(step: int, model: nn.Module) -> None:
        with torch.no_grad():
            if step == 0:
                model.items.weight[17] *= 100
            if step == 1:
                model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()})
            if step == 2:
                model.items.weight.data = model.items.weight.data.clone()

    Training()([ids(i) for i in range(5)], write)
    assert followed[:4] == [WHOLE] * 4 and followed[4] == 0


def test_a_table_that_stays_is_narrowed_once(followed):
    training = Training()
    with torch.no_grad():
        for _ in range(3):
            training.loss(ids(1))
    assert followed[0] == WHOLE and not any(followed[2:])


def test_one_batch_ahead_it_is_the_copy_of_the_step(followed):
    batches = [ids(i) for i in range(5)]
    plain = Training("offload-sampling")
    expected = plain(batches)
    ahead = Training("offload-sampling")
    assert ahead(turbogr.ahead(batches)) == expected
    assert sum(s.ahead for s in turbogr.statistics()) > 0


def test_updates_that_nobody_reads_do_not_gather():
    table = torch.zeros(100, 4)
    kept = halves.KeptHalf(table)
    kept.refresh(table)
    for _ in range(50):
        before = table._version
        table[:30] += 1
        kept.note(table, torch.arange(30), before)
    assert len(kept._changed) <= 3
    kept.refresh(table)
    assert torch.equal(kept.copy.half, ops.half_rows(table, BLOCK)[0])
