"""A table in host memory trains as one on the device; stale only where asked, and then by one update."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from turbogr_compile import ahead
from turbogr_compile.errors import TurbogrError
from turbogr_compile.runtime import HostTable

ITEMS, DIM, RATE = 12, 3, 0.25


def start():
    return torch.randn(ITEMS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def batches(count=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, ITEMS, (2, 4), generator=generator) for _ in range(count)]


def sgd(ids, rows, gradient):
    return rows - RATE * gradient


def loss_of(x, t):
    return (x.sin() * (t + 1)).sum() + x.pow(2).mean()


def with_host_table(loop, **options):
    table = HostTable(start(), **options)
    losses = []
    for t, ids in enumerate(loop):
        rows, places = table.rows(ids)
        loss = loss_of(F.embedding(places, rows), t)
        loss.backward()
        table.apply(sgd)
        losses.append(loss.item())
    return losses, table


def with_device_table(loop, delay=0):
    """Plain training; with a delay, rows are read as they were so many updates ago."""
    history = [start()]
    losses = []
    for t, ids in enumerate(loop):
        seen = history[max(0, len(history) - 1 - delay)].clone().requires_grad_()
        loss = loss_of(F.embedding(ids, seen), t)
        loss.backward()
        history.append(history[-1] - RATE * seen.grad)
        losses.append(loss.item())
    return losses, history[-1]


@pytest.mark.parametrize("loop", [list, ahead], ids=["plain", "ahead"])
def test_results_are_those_of_a_table_on_the_device(loop):
    losses, table = with_host_table(loop(batches()))
    expected, weight = with_device_table(batches())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(table.weight, weight)


def test_rows_are_gathered_ahead_and_those_written_meanwhile_again():
    plain, _ = with_host_table(batches())
    losses, table = with_host_table(ahead(batches()))
    assert losses == plain, "bit by bit"
    assert table.ahead == 7 and table.at_once == 1 and table.refreshed > 0


def test_stale_rows_are_one_update_old_whatever_the_timing():
    losses, table = with_host_table(ahead(batches()), staleness=1)
    expected, weight = with_device_table(batches(), delay=1)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(table.weight, weight)
    assert table.refreshed == 0 and losses != with_host_table(batches())[0]


def test_several_lookups_in_one_step_make_one_update():
    calls = []
    table = HostTable(start())
    a, b = table.rows(torch.tensor([1, 2, 2])), table.rows(torch.tensor([2, 3]))
    (F.embedding(a.places, a.rows).sum() + F.embedding(b.places, b.rows).sum()).backward()

    def update(ids, rows, gradient):
        calls.append((ids.tolist(), gradient[:, 0].tolist()))
        return rows

    table.apply(update)
    table.apply(update)
    assert calls == [([1, 2, 3], [1.0, 3.0, 1.0])]


def test_ids_that_change_after_they_were_announced():
    first, second = torch.tensor([1, 2]), torch.tensor([3, 4])
    table = HostTable(start())
    for t, ids in enumerate(ahead([first, second])):
        if t:
            ids.add_(1)
        rows, places = table.rows(ids)
        assert torch.equal(F.embedding(places, rows), table.weight[ids])
    assert table.ahead == 0


def test_without_gradients_nothing_is_kept():
    table = HostTable(start())
    with torch.no_grad():
        rows, _ = table.rows(torch.tensor([1]))
    assert not rows.requires_grad
    table.apply(lambda *_: pytest.fail("nothing to update"))


def test_bad_ids_fail_in_the_step_that_reads_them():
    table = HostTable(start())
    seen = []
    with pytest.raises(TurbogrError, match="gathering rows ahead failed") as failure:
        for ids in ahead([torch.tensor([1]), torch.tensor([2]), torch.tensor([ITEMS])]):
            table.rows(ids)
            seen.append(ids.item())
    assert seen == [1, 2] and failure.value.__cause__ is not None
    assert not [t for t in threading.enumerate() if t.name.startswith("turbogr-ahead")]


def test_bad_settings_are_named():
    with pytest.raises(TurbogrError, match="staleness is 0"):
        HostTable(start(), staleness=2)
    with pytest.raises(TurbogrError, match="matrix in host memory"):
        HostTable(torch.zeros(3))
