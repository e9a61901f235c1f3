"""Batches: one shape, every user once, nothing held out is trained on, resumed exactly, ranks in step."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.errors import OptionError
from turbogr_compile.runtime.balance import BalancedBatchSampler
from turbogr_compile.training.data import Batches, DataError, Histories
from turbogr_compile.training.data.orders import ORDERS


def histories_of(lengths: list[int]) -> Histories:
    """Item numbers are all different, so that each says whose it is."""
    total = sum(lengths)
    offsets = np.cumsum([0, *lengths])
    return Histories(
        np.arange(1, total + 1, dtype=np.int32), np.arange(total, dtype=np.int64) + 10**9, offsets,
        np.arange(len(lengths)), np.arange(total),
    )  # fmt: skip


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


LENGTHS = st.lists(st.integers(1, 20), min_size=12, max_size=60)
ORDER = st.sampled_from(sorted(ORDERS))


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS, order=ORDER, batch=st.integers(1, 3), world=st.integers(1, 3), hold_out=st.integers(0, 2),
    max_len=st.integers(2, 24), seed=st.integers(0, 99), long=st.sampled_from(["last", "random", "chunks"]),
)  # fmt: skip
def test_an_epoch(
    lengths: list[int], order: str, batch: int, world: int, hold_out: int, max_len: int, seed: int, long: str
) -> None:
    histories = histories_of(lengths)
    options: dict[str, Any] = {
        "batch": batch, "max_len": max_len, "seed": seed, "order": order, "world": world, "hold_out": hold_out,
        "long": long,
    }  # fmt: skip
    trained = [user for user, length in enumerate(lengths) if length - hold_out >= 2]
    chunked = sum(lengths[user] - hold_out - 1 for user in trained)  # as short as they can be, if need be
    if (chunked if long == "chunks" else len(trained)) < batch * world:
        with pytest.raises(OptionError, match="smaller batch"):
            Batches(histories, **options)
        return
    ranks = [Batches(histories, rank=rank, **options) for rank in range(world)]
    if long != "chunks":
        assert {len(of) for of in ranks} == {len(trained) // (batch * world)}
    predicted: set[tuple[int, int]] = set()
    seen: list[int] = []
    for number, step in enumerate(zip(*ranks, strict=True)):
        assert np.mean([of.weight(number, 0) for of in ranks]) == pytest.approx(1)
        for of, one in zip(ranks, step, strict=True):
            assert one["ids"].shape == one["times"].shape == (batch, max_len)
            assert one["ids"].dtype == one["times"].dtype == torch.int64
            users = of.users(0, number)
            for user, ids, times in zip(users.tolist(), one["ids"], one["times"], strict=True):
                items, when = histories.of(user)
                valid = int((ids != 0).sum())
                assert long == "chunks" or valid == min(len(items) - hold_out, max_len)
                assert not ids[valid:].any() and not times[valid:].any()  # pads are on the right
                at = int(ids[0] - items[0])
                assert at + valid <= len(items) - hold_out
                np.testing.assert_array_equal(ids[:valid], items[at : at + valid])
                np.testing.assert_array_equal(times[:valid], when[at : at + valid])
                assert long != "last" or at + valid == len(items) - hold_out
                clicks = {(user, click) for click in range(at + 1, at + valid)}
                assert clicks and predicted.isdisjoint(clicks)  # none is predicted twice
                predicted |= clicks
            seen += users.tolist()
    assert {of.epoch for of in ranks} == {1}
    if long == "chunks":
        every = {(user, click) for user in trained for click in range(1, lengths[user] - hold_out)}
        # Where chunks of two clicks alone do not fill the last step, some are left.
        assert len(every - predicted) in (0, len(every) % (batch * world))
        return
    assert len(seen) == len(set(seen)) == len(ranks[0]) * batch * world and set(seen) <= set(trained)
    assert {of.epoch for of in ranks} == {1}


@settings(max_examples=60, deadline=None)
@given(
    order=ORDER, seed=st.integers(0, 9), before=st.integers(0, 40), long=st.sampled_from(["last", "random", "chunks"]),
    world=st.integers(1, 2),
)  # fmt: skip
def test_resume_is_exact(order: str, seed: int, before: int, long: str, world: int) -> None:
    lengths = np.random.default_rng(seed).integers(3, 40, 57).tolist()

    def new() -> Batches:
        return Batches(
            histories_of(lengths), batch=3, max_len=16, seed=seed, order=order, long=long, rank=world - 1, world=world
        )

    one = new()
    for _ in range(before):
        next(one)
    state = json.loads(json.dumps(one.state_dict()))
    rest = list(itertools.islice(one.forever(), 25))
    other = new()
    other.load_state_dict(state)
    assert other.taken == before and other.weight(other.step) == new().weight(before % len(one), before // len(one))
    assert all(map(same, rest, itertools.islice(other.forever(), 25)))
    ahead = new()
    for _ in range(before + 3):
        next(ahead)
    assert ahead.state_dict(taken=before) == state


def test_a_loop_is_an_epoch_and_epochs_differ() -> None:
    batches = Batches(histories_of([5] * 20), batch=4)
    first, second = list(batches), list(batches)
    assert len(first) == len(second) == len(batches) == 5 and batches.epoch == 2
    assert not same(first[0], second[0])
    batches.load_state_dict({**batches.state_dict(), "epoch": 0, "step": 3})
    assert all(map(same, batches, first[3:]))
    assert same(Batches(histories_of([5] * 20), batch=4).at(1, 2), second[2])


def test_a_state_of_other_batches_is_refused() -> None:
    histories = histories_of([5] * 20)
    state = Batches(histories, batch=4, seed=1).state_dict()
    for other in ({"batch": 5}, {"seed": 2}, {"order": "bucketed"}, {"world": 2}):
        with pytest.raises(OptionError, match=f"with {next(iter(other))}="):
            Batches(histories, **{"batch": 4, "seed": 1, **other}).load_state_dict(state)


def spread(batches: list[Batches]) -> float:
    """How much more the busiest rank has to do than the mean, over an epoch."""
    steps = [[int((one["ids"] != 0).sum()) for one in step] for step in zip(*batches, strict=True)]
    return sum(map(max, steps)) / (sum(map(sum, steps)) / len(batches)) - 1


def test_what_orders_are_for() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1.2, 1024), 3, 400).astype(int).tolist()
    histories = histories_of(lengths)

    def ranks(order: str) -> list[Batches]:
        return [Batches(histories, batch=8, max_len=400, order=order, rank=rank, world=4) for rank in range(4)]

    assert spread(ranks("balanced")) < 0.5 * spread(ranks("shuffled"))
    assert spread(ranks("window")) < spread(ranks("balanced"))

    def longest(order: str) -> int:
        return sum(int((one["ids"] != 0).sum(1).max()) for one in ranks(order)[0])

    assert longest("bucketed") < 0.6 * longest("shuffled")


def test_balanced_is_what_the_sampler_does() -> None:
    lengths = np.random.default_rng(1).integers(3, 60, 100)
    histories = histories_of(lengths.tolist())
    for rank in range(2):
        batches = Batches(histories, batch=5, max_len=50, seed=4, order="balanced", rank=rank, world=2)
        sampler = BalancedBatchSampler(np.minimum(lengths - 1, 50), per_rank=5, world=2, rank=rank, seed=4)
        for step in range(len(batches)):
            assert batches.users(0, step).tolist() == sampler.indices(step)


def test_weights_make_the_mean_over_all_predictions() -> None:
    histories = histories_of([3, 30, 4, 9, 12, 7, 20, 5])
    ranks = [Batches(histories, batch=2, rank=rank, world=2) for rank in range(2)]
    for step in range(len(ranks[0])):
        losses = [one.at(0, step)["ids"][:, 1:].double().sqrt() for one in ranks]
        valid = [one != 0 for one in losses]
        means = [loss[v].mean() for loss, v in zip(losses, valid, strict=True)]
        weighted = sum(one.weight(step) * mean for one, mean in zip(ranks, means, strict=True)) / 2
        together = torch.cat([loss[v] for loss, v in zip(losses, valid, strict=True)]).mean()
        torch.testing.assert_close(weighted, together)


def test_jagged_is_padded_without_the_pads() -> None:
    histories = histories_of([3, 30, 4, 9, 12, 7, 20, 5])
    padded, jagged = (Batches(histories, batch=4, max_len=8, layout=layout) for layout in ("padded", "jagged"))
    for wide, packed in zip(padded, jagged, strict=True):
        valid = wide["ids"] != 0
        assert torch.equal(packed["ids"], wide["ids"][valid]) and torch.equal(packed["times"], wide["times"][valid])
        assert torch.equal(packed["offsets"].diff(), valid.sum(1)) and packed["offsets"][0] == 0


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, batch=st.integers(1, 4), world=st.integers(1, 3), count=st.none() | st.integers(1, 70))
def test_evaluation(lengths: list[int], batch: int, world: int, count: int | None) -> None:
    histories = histories_of([length + 2 for length in lengths])
    ranks = [Batches(histories, batch=batch, max_len=10, rank=rank, world=world) for rank in range(world)]
    evaluated = [list(of.evaluation(count)) for of in ranks]
    assert len({len(of) for of in evaluated}) == 1
    last = {int(histories.items[end - 1]): end - 1 for end in histories.offsets[1:]}
    targets = []
    for one in itertools.chain(*evaluated):
        assert one["ids"].shape == one["times"].shape == (batch, 10) and one["target"].shape == (batch,)
        assert (one["ids"][:, 0] != 0).all()  # rows that fill up are no empty ones
        for ids, target in zip(one["ids"], one["target"].tolist(), strict=True):
            if target:
                targets.append(target)
                newest = ids[ids != 0]
                assert int(newest[-1]) == target - 1 and target in last
    assert len(targets) == len(set(targets)) == min(len(lengths), count or len(lengths))
    trained = {int(i) for of in ranks for one in of for i in one["ids"].flatten()}
    assert not trained & set(targets)
    assert all(map(same, evaluated[0], ranks[0].evaluation(count)))  # also after training


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"order": "shuffle"}, "did you mean 'shuffled'"),
        ({"long": "old"}, "last, random, chunks"),
        ({"layout": "padding"}, "did you mean 'padded'"),
        ({"rank": 2, "world": 2}, "rank 2 is not one of 2"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"max_len": 1}, "max_len must be at least 2"),
        ({"hold_out": -1}, "hold_out"),
        ({"batch": 21}, "20 users with 2 items .* smaller batch"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Batches(histories_of([5] * 20), **{"batch": 2, **wrong})


def test_arrays_that_do_not_go_together() -> None:
    good = histories_of([2, 3])
    with pytest.raises(DataError, match="one more than users"):
        Histories(good.items, good.times, good.offsets[:-1], good.users, good.item_ids)
    with pytest.raises(DataError, match="one time for each item"):
        Histories(good.items, good.times[:-1], good.offsets, good.users, good.item_ids)
