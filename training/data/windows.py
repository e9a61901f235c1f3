"""Which part of a long history is a sample.

    last     the most recent clicks of each user; what came before is never seen
    random   a stretch of each user, another in each epoch
    chunks   all of a history, cut into stretches: in an epoch each click is predicted once

A stretch predicts all its clicks but the first, so neighbouring chunks share one. They are counted from the end: the
most recent chunk is full, and the oldest takes what is left.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

WAYS = ("last", "random", "chunks")


class Windows(NamedTuple):
    """Stretches of histories; all arrays have one number for each."""

    users: np.ndarray
    starts: np.ndarray  # of the first click, counted from the user's first
    lengths: np.ndarray


def last(users: np.ndarray, lengths: np.ndarray, most: int) -> Windows:
    return Windows(users, np.maximum(lengths - most, 0), np.minimum(lengths, most))


def chunks(users: np.ndarray, lengths: np.ndarray, most: int, multiple: int) -> Windows:
    """Chunks of up to `most` clicks, so many that they are a multiple of `multiple` where that is possible.

    The longest are halved for that: no click waits for another epoch because its chunk fills no step.
    """
    count = -(-(lengths - 1) // (most - 1))
    first = np.repeat(np.cumsum(count) - count, count)
    back = np.arange(int(count.sum())) - first  # from the user's last chunk
    ends = np.repeat(lengths, count) - back * (most - 1)
    starts = np.maximum(ends - most, 0)
    return _multiplied(Windows(np.repeat(users, count), starts, ends - starts), multiple)


def _multiplied(found: Windows, multiple: int) -> Windows:
    while lacking := -len(found.users) % multiple:
        longest = np.argsort(-found.lengths, kind="stable")[:lacking]
        longest = longest[found.lengths[longest] > 2]  # two clicks are one prediction
        if not len(longest):
            break
        users, starts, lengths = (each[longest] for each in found)
        older = (lengths + 1) // 2
        newer = Windows(users, starts + older - 1, lengths - older + 1)
        found.lengths[longest] = older
        found = Windows(*(np.concatenate(each) for each in zip(found, newer, strict=True)))
    return found
