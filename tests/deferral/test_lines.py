"""What deferral says: the first step what it saves, and each reason not to wait once. Values are eager's."""

from __future__ import annotations

import gc
import logging
import warnings

import pytest
import torch
from torch import nn

from turbogr_compile.deferral.tensor import pending
from turbogr_compile.show import console

from .programs import IDS, SASRec, Tower, compiled, cross_entropy, made, worst


@pytest.fixture(autouse=True)
def aloud(monkeypatch):
    monkeypatch.delenv("TURBOGR_QUIET", raising=False)
    monkeypatch.setattr(console, "_told_of_waiting", False)
    monkeypatch.setattr(console, "_said", set())
    torch._dynamo.reset()


def test_the_first_step_says_what_waited_and_what_it_saves(caplog):
    model = compiled(made(SASRec, layers=2))
    with caplog.at_level(logging.WARNING, logger="turbogr_compile"):
        for _ in range(2):
            logits = model(IDS)
            loss = cross_entropy(logits)
            loss.backward()
    (line,) = [r.getMessage() for r in caplog.records if "defers" in r.getMessage()]
    assert "test_lines.py" in line and "2 recorded calls" in line and "x less)" in line


def test_an_empty_batch_is_no_reason_to_say_that_nothing_is_packed(caplog, monkeypatch):
    monkeypatch.setattr(console, "_told", False)
    model, nothing = compiled(made(Tower)), torch.zeros(0, 4, dtype=torch.long)
    with caplog.at_level(logging.WARNING, logger="turbogr_compile"):
        cross_entropy(model(nothing), nothing).backward()
    assert not [r.getMessage() for r in caplog.records if "packs nothing" in r.getMessage()]


def test_silenced(caplog, monkeypatch):
    monkeypatch.setenv("TURBOGR_QUIET", "1")
    with caplog.at_level(logging.WARNING, logger="turbogr_compile"), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = compiled(made(SASRec, layers=2))
        cross_entropy(model(IDS)).backward()
        with torch.no_grad():
            model(IDS)
    assert not [r for r in caplog.records if "defers" in r.getMessage()]


class Normed(Tower):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, ids):
        return self.head(self.norm(self.items(ids).flatten(0, 1)))


class Picks(Tower):
    def forward(self, ids):
        return self.items(ids)[ids != 0]


class Views(Tower):
    def forward(self, ids):
        x = self.items(ids)
        return x, x[:, 0]


class Returns(Tower):
    def forward(self, ids):
        return self.items(ids), ids[:, :2]


def plainly(model):
    return model(IDS)


def without_gradients(model):
    with torch.no_grad():
        return model(IDS)


def in_inference_mode(model):
    with torch.inference_mode():
        return model(IDS).clone()


def checkpointed(model):
    return torch.utils.checkpoint.checkpoint(model, IDS, use_reentrant=False)


def read_three_times(model):
    for _ in range(3):
        model(IDS).detach().numpy()
    return model(IDS)


def looked_at_in_many_ways(model):
    for _ in range(3):
        out = model(IDS)
        for k in range(6):
            (out.detach() * k).tolist()
    return model(IDS)


def written(model):
    model(IDS).mul_(2)
    return model(IDS)


CASES = [
    (without_gradients, Tower, "no_grad are not deferred"),
    (checkpointed, Tower, "saved-tensor hooks"),
    (read_three_times, Tower, "no longer deferred"),
    (written, Tower, "no longer deferred"),
    (looked_at_in_many_ways, Tower, "no longer deferred"),
    (plainly, Normed, "writes to its inputs"),
    (plainly, Picks, "depends on data"),
    (plainly, Views, "share memory"),
    (plainly, Returns, "returns an input"),
]


@pytest.mark.parametrize("code, kind, said", CASES, ids=lambda x: getattr(x, "__name__", None))
def test_computed_at_the_call_with_one_line(code, kind, said):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_line(code, made(kind), made(kind), said)


def test_parameters_in_memory_of_others():
    """As of a model that several processes train together."""
    shared = made(Tower)
    shared.share_memory()
    check_line(plainly, made(Tower), shared, "memory that others write to")


def test_inference_mode_is_never_deferred():
    check_line(in_inference_mode, made(Tower), made(Tower), "inference mode are not deferred", deferral="always")


def test_nothing_is_said_where_nothing_could_wait():
    """In inference mode, of a step that returns its loss, and of rows without gradients."""
    model, frozen = made(Tower), made(Tower).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_inference_mode(compiled(model))
        compiled(lambda ids: cross_entropy(model(ids)))(IDS).backward()
        assert not pending(compiled(frozen)(IDS))


def test_no_grad_is_said_once_in_a_process():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            without_gradients(compiled(made(Tower)))
    assert len(caught) == 1, [str(w.message) for w in caught]


def check_line(code, theirs, ours, said, **options):
    expected = code(theirs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        called = compiled(ours, **options)
        found = code(called)
        again = code(called)
    assert not any(pending(t) for t in (found if isinstance(found, tuple) else (found,)))
    lines = [str(w.message) for w in caught if "turbogr:" in str(w.message) and said in str(w.message)]
    assert len(lines) == 1, [str(w.message) for w in caught]
    assert worst(expected, found) < 1e-12
    assert worst(expected, again) < 1e-12  # in training, statistics of the batch count, not the running ones


def test_nothing_grows_over_steps():
    model = made(Tower)
    called, optimizer = compiled(model), torch.optim.SGD(model.parameters(), lr=0.01)

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            logits = called(IDS)
            loss = cross_entropy(logits)
            hits = (logits.argmax(-1) == IDS).sum()
            loss.backward()
            optimizer.step()
            assert hits.item() >= 0
        gc.collect()
        return len(gc.get_objects())

    before = train(20)
    assert train(200) - before < 100
