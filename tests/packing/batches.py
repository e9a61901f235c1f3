"""Ragged batches of one padded shape, of every kind that a data loader may deliver."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

VOCABULARY = 50
SLOTS = 3  # cloze slots, candidates
NEGATIVES = 4
ACTIONS = 5
FEATURES = 3


class Batch(NamedTuple):
    """Everything a model of the zoo may read."""

    ids: torch.Tensor  # (B, N), the pad id where there is no item
    lengths: torch.Tensor  # (B,)
    valid: torch.Tensor  # (B, N) bool
    valid_int: torch.Tensor
    valid_float: torch.Tensor
    positions: torch.Tensor  # (B, N) in 0..N-1
    times: torch.Tensor  # (B, N) seconds
    actions: torch.Tensor  # (B, N) in 0..ACTIONS-1
    features: torch.Tensor  # (B, N, FEATURES) item features, 0 where there are fewer
    targets: torch.Tensor  # (B, N) next item, 0 where there is none
    labels: torch.Tensor  # (B, N) the same with -100 where there is none
    weights: torch.Tensor  # (B, N) per-position weights, 0 on pads
    shares: torch.Tensor  # (B, N, V) soft targets
    negatives: torch.Tensor  # (B, N, NEGATIVES)
    label: torch.Tensor  # (B,) one target per sequence
    shared: torch.Tensor  # (NEGATIVES,) negatives of the whole batch
    slots: torch.Tensor  # (B, SLOTS) cloze positions, 0 where the slot is empty
    slot_targets: torch.Tensor  # (B, SLOTS)
    candidates: torch.Tensor  # (B, SLOTS)

    def alone(self, row: int) -> Batch:
        """One sequence of a right-padded batch without its padding."""
        length = max(int(self.lengths[row]), 1)
        sequences = {n: v[row : row + 1, :length] for n, v in self._asdict().items() if n in _BY_POSITION}
        sequences["positions"] = sequences["positions"].clamp(max=length - 1)
        vectors = {n: v[row : row + 1] for n, v in self._asdict().items() if n not in _BY_POSITION and n != "shared"}
        return Batch(**sequences, **vectors, shared=self.shared)


_BY_POSITION = frozenset(Batch._fields[: Batch._fields.index("label")]) - {"lengths"}

Shape = Callable[[int, int, torch.Generator], tuple[torch.Tensor, torch.Tensor]]  # (B, N, g) -> lengths, valid


def _lengths(b: int, n: int, g: torch.Generator, longest: int | None = None) -> torch.Tensor:
    return torch.randint(1, (longest or max(n // 2, 1)) + 1, (b,), generator=g)


def _prefix(lengths: torch.Tensor, n: int) -> torch.Tensor:
    return torch.arange(n) < lengths[:, None]


def right(b: int, n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = _lengths(b, n, g)
    return lengths, _prefix(lengths, n)


def left(b: int, n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = _lengths(b, n, g)
    return lengths, _prefix(lengths, n).flip(1)


def holes(b: int, n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Invalid positions inside of the sequences."""
    lengths = _lengths(b, n, g, n)
    return lengths, _prefix(lengths, n) & (torch.rand(b, n, generator=g) > 0.3)


def some_empty(b: int, n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = _lengths(b, n, g) * (torch.arange(b) % 2)
    return lengths, _prefix(lengths, n)


def empty_on_the_left(b: int, n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    lengths, valid = some_empty(b, n, g)
    return lengths, valid.flip(1)


def all_empty(b: int, n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(b, dtype=torch.int64), torch.zeros(b, n, dtype=torch.bool)


def full(b: int, n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((b,), n), torch.ones(b, n, dtype=torch.bool)


def length_one(b: int, n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.ones(b, dtype=torch.int64)
    return lengths, _prefix(lengths, n)


def one_long(b: int, n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Heavy tail: one full sequence, the others short."""
    lengths = torch.where(torch.arange(b) == b - 1, n, _lengths(b, n, g, 2))
    return lengths, _prefix(lengths, n)


def graded(b: int, n: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """From two rows to half of them, the same for every seed."""
    lengths = 2 + torch.arange(b) * 3 % max(n // 2 - 1, 1)
    return lengths, _prefix(lengths, n)


SHAPES: dict[str, Shape] = {
    "right": right, "left": left, "holes": holes, "some-empty": some_empty, "empty-left": empty_on_the_left,
    "all-empty": all_empty, "full": full, "length-one": length_one, "one-long": one_long, "graded": graded,
    "pad-inside": right, "stray-labels": right, "disagree": right,
}  # fmt: skip


def batch(kind: str, seed: int, b: int, n: int, pad: int = 0) -> Batch:
    """A batch of this kind; `pad` is the id that stands for no item.

    "pad-inside": the pad id also occurs as an item. "stray-labels": some pad rows have a label and a weight.
    "disagree": the mask inputs, the ids and the lengths each tell another story.
    """
    g = torch.Generator().manual_seed(seed)
    lengths, valid = SHAPES[kind](b, n, g)
    items = torch.randint(1, VOCABULARY - 1, (b, n), generator=g)
    ids = torch.where(valid, items, pad)
    if kind == "pad-inside":
        ids = torch.where(torch.rand(b, n, generator=g) < 0.3, pad, ids)
    labelled = valid
    if kind == "stray-labels":
        labelled = valid | (torch.rand(b, n, generator=g) < 0.2)
    if kind == "disagree":
        valid = valid ^ (torch.rand(b, n, generator=g) < 0.2)
        lengths = (lengths + torch.randint(0, 2, (b,), generator=g)).clamp(max=n)
    following = torch.randint(1, VOCABULARY - 1, (b, n), generator=g)
    slots = (torch.rand(b, SLOTS, generator=g) * lengths[:, None].clamp(min=1)).long()
    return Batch(
        ids=ids, lengths=lengths, valid=valid, valid_int=valid.long(), valid_float=valid.double(),
        positions=torch.rand(b, n, generator=g).argsort(1),
        times=torch.randint(0, 10_000, (b, n), generator=g).cumsum(1) * valid,
        actions=torch.randint(0, ACTIONS, (b, n), generator=g),
        features=torch.randint(0, VOCABULARY, (b, n, FEATURES), generator=g) * valid.unsqueeze(-1),
        targets=torch.where(labelled, following, 0), labels=torch.where(labelled, following, -100),
        weights=torch.where(labelled, torch.rand(b, n, generator=g, dtype=torch.float64) + 0.5, 0.0),
        shares=torch.rand(b, n, VOCABULARY, generator=g, dtype=torch.float64).softmax(-1),
        negatives=torch.randint(1, VOCABULARY, (b, n, NEGATIVES), generator=g),
        label=torch.randint(1, VOCABULARY - 1, (b,), generator=g),
        shared=torch.randint(1, VOCABULARY, (NEGATIVES,), generator=g),
        slots=slots, slot_targets=torch.randint(1, VOCABULARY - 1, (b, SLOTS), generator=g),
        candidates=torch.randint(1, VOCABULARY - 1, (b, SLOTS), generator=g),
    )  # fmt: skip
