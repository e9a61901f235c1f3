"""Ops inside of what models do with masks, scores, probabilities, ids and lengths, where an argument can be overlooked.

A case is its text: 'div.floor_rounding|2|mask-above|function' names entry, sample, idiom and form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .samples import Entry, Sample, call, entries

Op = Callable[[torch.Tensor], torch.Tensor]
B, N, D, IDS = 3, 6, 4, 12


def _scores(x: torch.Tensor) -> torch.Tensor:
    return x @ x.transpose(1, 2)


def _keys(ids: torch.Tensor) -> torch.Tensor:
    return (ids == 0)[:, None, :]


def _attend(scores: torch.Tensor, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return ((scores.double().softmax(-1) @ x).tanh().sum(-1) * (ids != 0)).sum()


def _pool(scores: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (scores.softmax(1)[..., None] * x).sum(1).square().sum()


# From (op, ids, rows x, query vector w) to a loss; what the op is applied to is in the name.
IDIOMS: dict[str, Callable[[Op, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mask-bool": lambda op, ids, x, w: _pool((x @ w).masked_fill(op(ids == 0).bool(), -1e9), x),
    "mask-above": lambda op, ids, x, w: _pool((x @ w).masked_fill(op((ids == 0).double()) > 0, -1e9), x),
    "mask-byte": lambda op, ids, x, w: _pool((x @ w).masked_fill(op((ids == 0).byte()) > 0, -1e9), x),
    "mask-added": lambda op, ids, x, w: _attend(_scores(x) + op(_keys(ids).double()) * -1e9, x, ids),
    "mask-times": lambda op, ids, x, w: (x * op((ids != 0).double())[..., None]).tanh().sum(),
    "mask-long": lambda op, ids, x, w: (x * op((ids != 0).long())[..., None]).tanh().sum(),
    "bias": lambda op, ids, x, w: _attend(_scores(x) + op(_keys(ids).double() * -1e9), x, ids),
    "scores": lambda op, ids, x, w: _attend(op(_scores(x)).double().masked_fill(_keys(ids), -1e9), x, ids),
    "masked-scores": lambda op, ids, x, w: _attend(op(_scores(x).masked_fill(_keys(ids), -1e9)), x, ids),
    "masked-scores-inf": lambda op, ids, x, w: _attend(op(_scores(x).masked_fill(_keys(ids), -torch.inf)), x, ids),
    "added-scores": lambda op, ids, x, w: _attend(op(_scores(x) + _keys(ids).double() * -1e4), x, ids),
    "pooled-scores": lambda op, ids, x, w: _pool(op(x @ w).double().masked_fill(ids == 0, -1e9), x),
    "silu-scores": lambda op, ids, x, w: (
        ((F.silu(op(_scores(x)).double()) * ~_keys(ids)) @ x).sum(-1) * (ids != 0)
    ).sum(),
    "probabilities": lambda op, ids, x, w: (
        (op(_scores(x).masked_fill(_keys(ids), -1e9).softmax(-1)).double() @ x).sum(-1) * (ids != 0)
    ).sum(),
    "weights": lambda op, ids, x, w: (op((x @ w).masked_fill(ids == 0, -1e9).softmax(1))[..., None] * x).sum(),
    "ids": lambda op, ids, x, w: (
        (F.embedding(op(ids).long().clamp(0, D - 1), x[0, :D, :]) * (ids != 0)[..., None]).sum() + x.sum() * 0
    ),
    "ids-mask": lambda op, ids, x, w: (x * (op(ids) != 0)[..., None]).tanh().sum(),
    "lengths": lambda op, ids, x, w: (x * (torch.arange(N) < op((ids != 0).sum(1))[:, None])[..., None]).tanh().sum(),
    "zero-rows": lambda op, ids, x, w: op(x * (ids != 0)[..., None]).double().sum(),
    "loss-weights": lambda op, ids, x, w: (x.logsumexp(-1) * op((ids != 0).double())).sum(),
}


@dataclass(frozen=True)
class Idiom:
    """An op with the arguments of one of its samples, inside of an idiom."""

    entry: Entry
    sample: Sample
    name: str
    form: str = "function"

    @property
    def text(self) -> str:
        return f"{self.entry.name}|{self.sample.number}|{self.name}|{self.form}"

    @staticmethod
    def parse(text: str) -> Idiom:
        name, number, idiom, form = text.split("|")
        entry = entries()[name]
        assert entry.dtype is not None
        return Idiom(entry, entry.samples(entry.dtype)[int(number)], idiom, form)

    def op(self, x: torch.Tensor) -> torch.Tensor:
        """The op with its other arguments as the sample has them; tensors of the input's shape become twos."""
        leaves = list(self.sample.leaves)
        shape = leaves[0].shape
        for i, leaf in self.sample.tensors():
            if i == 0:
                leaves[i] = x
            elif leaf.shape == shape:
                leaves[i] = torch.full_like(x, 2)
        (result,) = call(self.entry.form(self.form), leaves, self.sample.spec)
        if result.shape != x.shape:
            raise ValueError("another shape")
        return result

    def loss(self, ids: torch.Tensor, table: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return IDIOMS[self.name](self.op, ids, F.embedding(ids, table), w)

    def fits(self) -> bool:
        """Does the op take and give a tensor of the shape that idioms have?"""
        first = self.sample.leaves[0]
        others = [t for i, t in self.sample.tensors() if i and t.shape not in ((), first.shape)]
        return isinstance(first, torch.Tensor) and not others and not first.is_complex()


def arguments(seed: int = 0) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    return {
        "table": torch.randn(IDS, D, generator=g, dtype=torch.float64).requires_grad_(),
        "w": torch.randn(D, generator=g, dtype=torch.float64).requires_grad_(),
    }
