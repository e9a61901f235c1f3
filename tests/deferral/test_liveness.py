"""Which variables are proven dead; whatever may be read must be kept."""

from __future__ import annotations

import dis
import gc
import json
import subprocess
import sys
import weakref

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


def after_a_branch(called, step):
    """The value is asked for by the jump itself."""
    total = 0.0
    for _ in range(2):
        logits = called(IDS)
        high = logits > 0
        if not high.any():
            continue
        step()
        total += high.sum().item() + logits.sum().item()
    return total


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


def by_a_weak_reference(called, step):
    known = weakref.WeakValueDictionary()
    for _ in range(2):
        known["logits"] = logits = called(IDS)
        cross_entropy(logits).backward()
        step()
        known["logits"].sum().item()


DEAD, KEPT = (plain, flat_too, in_a_helper, model_output), (
    read_later, in_a_list, in_a_closure, in_a_handler, after_a_branch, through_locals, output_that_others_have,
    by_a_weak_reference,
)  # fmt: skip


def waiting_at_steps(code) -> list[int]:
    _, model, called = fresh()
    optimizer, waiting = torch.optim.SGD(model.parameters(), lr=0.1), []
    gc.collect()
    of_others = len(WAITING)

    def step():
        waiting.append(len(WAITING) - of_others)
        optimizer.step()

    code(called, step)
    return waiting


@pytest.fixture(scope="module")
def waiting() -> dict[str, list[int]]:
    """Counted in a process of its own: torch keeps its frame hook after a compile that raised, in whatever test that
    was, and with the hook a call holds its arguments twice (what a helper was given is kept then)."""
    run = subprocess.run([sys.executable, "-m", "tests.deferral.test_liveness"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [code.__name__ for code in DEAD])
def test_proven_dead(waiting, name):
    assert waiting[name] == [0, 0]


@pytest.mark.parametrize("name", [code.__name__ for code in KEPT])
def test_kept(waiting, name):
    assert any(waiting[name])


def test_jumps_back_are_followed():
    def code():
        x = 1
        for _ in range(2):
            print(x)
            x = 2

    call = next(i for i in dis.get_instructions(code) if i.opname == "STORE_FAST" and i.argval == "_")
    assert liveness._live(code.__code__, call.offset, "x")


if __name__ == "__main__":
    print(json.dumps({code.__name__: waiting_at_steps(code) for code in (*DEAD, *KEPT)}))
