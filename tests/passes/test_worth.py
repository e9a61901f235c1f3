"""Packing is done where it pays, by counts of the batch seen and prices that an option sets; nothing is timed."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import turbogr_compile
from turbogr_compile.errors import OptionError
from turbogr_compile.pipeline.worth import Added, Work, Worth
from turbogr_compile.show import console


class Model(nn.Module):
    def __init__(self, dim: int, items: int = 50) -> None:
        super().__init__()
        self.items, self.up, self.down = nn.Embedding(items, dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, ids):
        x = self.down(self.up(self.items(ids)).relu())
        return F.cross_entropy((x @ self.items.weight.T).flatten(0, 1), ids.flatten(), ignore_index=0)


def batch(sequences: int, columns: int, valid: int) -> torch.Tensor:
    ids = torch.randint(1, 50, (sequences, columns))
    ids[:, valid:] = 0
    return ids


def said(model: nn.Module, ids: torch.Tensor, **options) -> dict[str, str]:
    torch._dynamo.reset()
    report = turbogr_compile.explain(model, ids, **options)
    return {r["id"]: r["text"] for record in report.records for r in record["remarks"]}


def test_what_would_not_pay_is_not_packed_and_a_remark_has_the_counts():
    small = said(Model(32), batch(16, 40, 39), worth="tiny=0")
    assert "packed" not in small and "624 of 640 rows matter" in small["not-worth-it"]
    assert "calls" in small["not-worth-it"]
    large = said(Model(64), batch(64, 64, 16), worth=Worth())
    assert "packed" in large and "not-worth-it" not in large


def test_a_first_batch_that_is_full_is_no_judge_of_those_that_follow():
    full = said(Model(128), batch(64, 64, 64), worth=Worth())
    assert "packed" in full and "not-worth-it" not in full


def test_what_a_full_batch_would_lose_is_bearable():
    """Ragged batches would win more than packing costs, and full ones would lose more than a twentieth."""
    whole, usually, added = Work(flops=1e9), Work(flops=2e8), Added(calls=40)
    prices = Worth(bytes=1e30)
    assert prices.pays(whole, usually, Work(flops=1e8), added)
    assert not prices.pays(whole, usually, Work(), added)
    assert prices.pays(Work(flops=1e11), usually, Work(), added)
    assert not prices.pays(whole, Work(flops=1e8), Work(flops=1e8), added)
    assert not prices.pays(whole, usually, Work(flops=1e8), Added(40, moved=1e8))


class Convolved(nn.Module):
    """Convolutions read each row three times."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Conv1d(64, 64, 3, padding=1) for _ in range(4))

    def forward(self, ids):
        x = self.items(ids)
        for layer in self.layers:
            x = x + layer(x.mT).relu().mT
        return F.cross_entropy((x @ self.items.weight.T).flatten(0, 1), ids.flatten(), ignore_index=0)


def test_rows_that_are_moved_are_weighed():
    full, ragged = batch(64, 64, 64), batch(64, 64, 16)
    assert "packed" not in said(Convolved(), full, worth="step=1e-5")
    assert "packed" in said(Convolved(), full, worth="step=1e-5,moved=1e30")
    assert "packed" in said(Convolved(), ragged, worth=Worth())


def test_a_step_that_is_tiny_when_padded_is_not_weighed():
    tiny = said(Model(8), batch(4, 8, 3), worth=Worth())
    assert "packed" in tiny and "tiny-step" in tiny
    assert "packed" not in said(Model(8), batch(4, 8, 3), worth="tiny=0")


def test_prices_decide():
    ids = batch(4, 8, 3)
    assert "packed" in said(Model(8), ids, worth="always")
    assert "tiny-step" not in said(Model(8), ids, worth="step=1e-9,call=1e-12")
    assert "packed" not in said(Model(64), batch(64, 64, 16), worth="step=10,tiny=0")


def test_what_is_not_packed_is_right():
    model, ids = Model(8), batch(4, 8, 3)
    torch._dynamo.reset()
    compiled = turbogr_compile.compile(model, worth=Worth(tiny=0.0))
    torch.testing.assert_close(compiled(ids), model(ids))
    compiled(batch(4, 8, 5)).backward()


def test_prices_are_read_and_printed():
    prices = Worth.read("flops=1e11, call=2e-5")
    assert prices == Worth(flops=1e11, call=2e-5) == Worth.read(str(prices)) and Worth.read(None) == Worth()
    assert Worth.read(Worth(step=1.0)).step == 1.0 and Worth.read("always").added(Added(100, 1e9)) == 0
    for wrong, told in (("sometimes", "takes 'always' or prices"), ("flop=1", "did you mean"), ("call=", "takes")):
        with pytest.raises(OptionError, match=told):
            turbogr_compile.Options.read({"worth": wrong})
    assert turbogr_compile.Options.read({}, {"TURBOGR_WORTH": "always"}).worth == Worth.read("always")


def test_a_step_that_packs_nothing_says_so_once(monkeypatch, caplog):
    class Mixed(Model):
        def forward(self, ids):
            return self.down(self.up(self.items(ids).mean(1))).pow(2).sum()

    def told(**options) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="turbogr_compile"):
            said(Model(8), batch(4, 8, 3), **options)
        return [r.getMessage() for r in caplog.records if "packs nothing" in r.getMessage()]

    monkeypatch.setattr(console, "_told", False)
    assert not told(worth="tiny=0")  # tests are quiet
    monkeypatch.delenv("TURBOGR_QUIET")
    assert not told(worth="always")
    (line,) = told(worth="tiny=0")
    assert "test_worth.py" in line and "would not pay" in line and "→" in line
    assert not told(worth="tiny=0")
    monkeypatch.setattr(console, "_told", False)
    caplog.clear()
    said(Mixed(8), batch(4, 8, 3))
    assert any("says which rows are padding" in r.getMessage() for r in caplog.records)
