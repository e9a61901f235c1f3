"""Histories with something to learn in them, written as files of KuaiRand's schema, so that everything runs offline.

    folder = generate("data/generated", users=2000, items=1000, mean_length=60, seed=0)

What there is to learn, from easy to hard: some items are popular; items belong to groups, and users have favourite
groups; inside of a group users go from item to item, each in steps of their own; a new session starts with another
favourite, which depends on the time of day; favourites drift. Lengths are log-normal: most users have few items, some
have very many.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import OptionError
from . import kuairand
from .corrupt import spoil_folder
from .write_numbers import write_numbers

SPREAD = 1.2  # standard deviation of the logarithm of lengths
LEAST = 5  # items of a user
GROUP = 40  # items in a group, about
STEPS = (1, 2, 3, 5, 8, 13)  # from one place in a group to the next; each user keeps to one
FAVOURITES = 4
SESSION = 12  # items in a session, on average
DRIFT = 0.15  # chance that a favourite or the step changes, in each session
FOLLOW, SAME_GROUP, FAVOURITE = 0.6, 0.2, 0.15  # what comes next; otherwise, anything popular
NOT_CLICKED = 0.4  # rows for each click that are no click
AT_RANDOM = 0.02  # of those: shown at random

START = 1_649_347_200  # 8 April 2022 in Beijing
DAY = 86_400
SPLIT, END = START + 14 * DAY, START + 31 * DAY
BEIJING = 8 * 3600

Random = np.random.Generator


@dataclass(frozen=True)
class World:
    """Groups of items and how they are numbered."""

    items: int
    groups: int

    def size(self, group: np.ndarray) -> np.ndarray:
        return self.items // self.groups + (group < self.items % self.groups)

    def item(self, group: np.ndarray, place: np.ndarray) -> np.ndarray:
        return place * self.groups + group

    def popular_group(self, random: Random, count: int) -> np.ndarray:
        return (self.groups * random.random(count) ** 1.5).astype(np.int64)

    def popular_place(self, random: Random, group: np.ndarray) -> np.ndarray:
        return (self.size(group) * random.random(len(group)) ** 2.0).astype(np.int64)


def generate(
    folder: str | Path,
    users: int = 2000,
    items: int = 1000,
    mean_length: float = 60.0,
    seed: int = 0,
    bad_rows: int = 0,
    max_length: int | None = None,
) -> Path:
    """Write logs of `users` who clicked `mean_length` videos each, on average; the same ones for the same arguments.

    No user has more than `max_length` clicks, by default 50 times the mean. `bad_rows` inserts rows of every kind that
    a reader must survive, and lists them in bad_rows.json. Returns the folder, for open_histories().
    """
    for name, value, least in (("users", users, 1), ("items", items, 2), ("mean_length", mean_length, LEAST)):
        if value < least:
            raise OptionError(f"{name} must be at least {least}, not {value}")
    longest = int(50 * mean_length) if max_length is None else max_length
    if longest < LEAST:
        raise OptionError(f"max_length must be at least {LEAST}, not {longest}")
    random = np.random.default_rng(seed)
    world = World(items, max(2, items // GROUP))
    lengths = _lengths(random, users, mean_length, longest)
    times, starts = _times(random, lengths)
    chosen = _items(random, world, lengths, times, starts)
    rows = _rows(random, world, np.repeat(np.arange(users), lengths), chosen, times)

    folder = Path(folder)
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    shown_at_random = rows["is_rand"] == 1
    later = rows["time_ms"] >= SPLIT * 1000
    for name, mask in (
        (kuairand.EARLIER, ~later & ~shown_at_random),
        (kuairand.LATER, later & ~shown_at_random),
        (kuairand.RANDOM, shown_at_random),
    ):
        table = [rows[column][mask] for column in kuairand.COLUMNS]
        write_numbers(data / f"{name}_generated.csv", kuairand.COLUMNS, table)
    if bad_rows:
        spoil_folder(data, bad_rows, seed)
    return folder


def _lengths(random: Random, users: int, mean: float, longest: int) -> np.ndarray:
    drawn = random.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, users)
    return np.clip(drawn.round().astype(np.int64), LEAST, longest)


def _times(random: Random, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds of each click, and which clicks start a session."""
    total, first = int(lengths.sum()), np.cumsum(lengths) - lengths
    starts = random.random(total) < 1 / SESSION
    starts[first] = True
    seconds = random.exponential(40.0, total)
    seconds[starts] = random.lognormal(np.log(6 * 3600), 1.0, int(starts.sum()))
    since_first = np.cumsum(seconds)
    since_first -= np.repeat(since_first[first], lengths)
    begin = START + random.random(len(lengths)) * 6 * DAY
    took = since_first[first + lengths - 1]
    fits = np.minimum(1.0, (END - 3600 - begin) / np.maximum(took, 1.0))
    times = np.repeat(begin, lengths) + since_first * np.repeat(fits, lengths)
    return (times * 1000).astype(np.int64), starts


def _items(random: Random, world: World, lengths: np.ndarray, times: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """What everybody clicks, one click of all users at a time; users with the most clicks stand first."""
    order = np.argsort(-lengths, kind="stable")
    first = (np.cumsum(lengths) - lengths)[order]
    still = np.searchsorted(-lengths[order], -np.arange(lengths.max()), side="left")  # who has a click number t
    favourites = world.popular_group(random, len(lengths) * FAVOURITES).reshape(-1, FAVOURITES)
    steps = random.choice(STEPS, size=len(lengths))
    group, place = favourites[:, 0].copy(), np.zeros(len(lengths), dtype=np.int64)
    chosen = np.empty(len(times), dtype=np.int64)
    evening = (times // 1000 + BEIJING) % DAY // (DAY // 2)
    for number, count in enumerate(still.tolist()):
        at = first[:count] + number
        begins = starts[at]
        drifts = np.flatnonzero(begins & (random.random(count) < DRIFT))
        favourites[drifts, random.integers(FAVOURITES, size=len(drifts))] = world.popular_group(random, len(drifts))
        drifts = np.flatnonzero(begins & (random.random(count) < DRIFT))
        steps[drifts] = random.choice(STEPS, size=len(drifts))

        chance = np.where(begins, 0.9, random.random(count))
        other = FOLLOW + SAME_GROUP
        # A session starts with one of two favourites: which two, the time of day says.
        by_hour = evening[at] * (FAVOURITES // 2) + random.integers(FAVOURITES // 2, size=count)
        any_one = random.integers(FAVOURITES, size=count)
        liked = favourites[np.arange(count), np.where(begins, by_hour, any_one)]
        group[:count] = np.where(chance < other, group[:count], liked)
        anything = chance >= other + FAVOURITE
        group[:count] = np.where(anything, world.popular_group(random, count), group[:count])

        next_place = place[:count] + steps[:count]
        drawn = world.popular_place(random, group[:count])
        place[:count] = np.where(chance < FOLLOW, next_place % world.size(group[:count]), drawn)
        chosen[at] = world.item(group[:count], place[:count])
    return chosen


def _rows(
    random: Random, world: World, users: np.ndarray, items: np.ndarray, times: np.ndarray
) -> dict[str, np.ndarray]:
    """All columns, by user and time. Clicks, and what was shown besides and not clicked."""
    clicks = len(users)
    besides = random.integers(clicks, size=int(clicks * NOT_CLICKED))
    group = world.popular_group(random, len(besides))
    user = np.concatenate([users, users[besides]])
    item = np.concatenate([items, world.item(group, world.popular_place(random, group))])
    time = np.concatenate([times, times[besides] - random.integers(1000, 20_000, size=len(besides))])
    time = np.maximum(time, START * 1000)
    order = np.lexsort((time, user))
    click = (np.arange(len(user)) < clicks)[order]
    time = time[order]
    total = len(order)

    def signal(share: float) -> np.ndarray:
        return (click & (random.random(total) < share)).astype(np.int64)

    local = time // 1000 + BEIJING
    duration = random.lognormal(np.log(25_000), 0.8, total).astype(np.int64)
    long_view = signal(0.6)
    play = np.where(long_view == 1, 1.1, np.where(click, 0.6, 0.1)) * duration
    shown_at_random = ~click & (time >= SPLIT * 1000) & (random.random(total) < AT_RANDOM)
    dates = (local // DAY).astype("datetime64[D]")
    months = dates.astype("datetime64[M]")
    date = 20_220_000 + (months.astype(np.int64) % 12 + 1) * 100 + (dates - months).astype(np.int64) + 1
    numbered = random.permutation(world.items)  # numbers say nothing about groups
    return {
        "user_id": user[order],
        "video_id": numbered[item[order]],
        "date": date,
        "hourmin": local % DAY // 3600 * 100,
        "time_ms": time,
        "is_click": click.astype(np.int64),
        "is_like": signal(0.04),
        "is_follow": signal(0.003),
        "is_comment": signal(0.006),
        "is_forward": signal(0.002),
        "is_hate": (~click & (random.random(total) < 0.001)).astype(np.int64),
        "long_view": long_view,
        "play_time_ms": play.astype(np.int64),
        "duration_ms": duration,
        "profile_stay_time": signal(0.01) * random.integers(100, 30_000, size=total),
        "comment_stay_time": signal(0.05) * random.integers(100, 30_000, size=total),
        "is_profile_enter": signal(0.02),
        "is_rand": shown_at_random.astype(np.int64),
        "tab": random.integers(0, 15, size=total),
    }
