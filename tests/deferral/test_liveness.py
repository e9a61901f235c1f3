"""Which variables are proven dead; whatever may be read must be kept."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from turbogr_compile.deferral import liveness
from turbogr_compile.deferral.record import WAITING

from .programs import IDS, cross_entropy, fresh

pytestmark = pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="bytecode is read for Python 3.11 only")


class Out(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__.update(items)


def plain(called, step):
    for _ in range(2):
        logits = called(IDS)
        loss = cross_entropy(logits)
        loss.backward()
        step()


def flat_too(called, step):
    for _ in range(2):
        logits = called(IDS)
        flat = logits.view(-1, 50)
        loss = flat.square().mean()
        loss.backward()
        step()


def in_a_helper(called, step):
    def inner(logits):
        cross_entropy(logits).backward()

    for _ in range(2):
        logits = called(IDS)
        inner(logits)
        step()


def model_output(called, step):
    for _ in range(2):
        out = Out(logits=called(IDS))
        cross_entropy(out.logits).backward()
        step()


def read_later(called, step):
    for _ in range(2):
        logits = called(IDS)
        cross_entropy(logits).backward()
        step()
    return logits.sum().item()


def in_a_list(called, step, kept=None):
    kept = []
    for _ in range(2):
        logits = called(IDS)
        kept.append(logits)
        cross_entropy(logits).backward()
        step()
    return [k.sum().item() for k in kept]


def in_a_closure(called, step):
    for _ in range(2):
        logits = called(IDS)
        read = lambda: logits.sum()  # noqa: B023, E731
        cross_entropy(logits).backward()
        step()
    return read().item()


def in_a_handler(called, step):
    for _ in range(2):
        logits = torch.zeros(())
        try:
            logits = called(IDS)
            cross_entropy(logits).backward()
            step()
            raise ValueError
        except ValueError:
            assert logits.sum().item()


def through_locals(called, step):
    for _ in range(2):
        logits = called(IDS)
        cross_entropy(logits).backward()
        step()
    return locals()["logits"].sum().item()


def output_that_others_have(called, step):
    kept = []
    for _ in range(2):
        out = Out(logits=called(IDS))
        kept.append(out)
        cross_entropy(out.logits).backward()
        step()
    return kept[0].logits.sum().item()


DEAD, KEPT = (plain, flat_too, in_a_helper, model_output), (
    read_later, in_a_list, in_a_closure, in_a_handler, through_locals, output_that_others_have,
)  # fmt: skip


@pytest.mark.parametrize("code", [*DEAD, *KEPT], ids=lambda f: f.__name__)
def test_proven_dead_or_kept(code):
    _, model, called = fresh()
    optimizer, waiting = torch.optim.SGD(model.parameters(), lr=0.1), []
    gc.collect()
    of_others = len(WAITING)  # of tests before this one

    def step():
        waiting.append(len(WAITING) - of_others)
        optimizer.step()

    code(called, step)
    assert all(n == 0 for n in waiting) if code in DEAD else any(waiting), waiting


def test_jumps_back_are_followed():
    def code():
        x = 1
        for _ in range(2):
            print(x)
            x = 2

    call = next(i for i in __import__("dis").get_instructions(code) if i.opname == "STORE_FAST" and i.argval == "_")
    assert liveness._live(code.__code__, call.offset, "x")
