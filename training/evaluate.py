"""HR@10 and NDCG@10 of what scores all items at once; the job counts without storing scores (evaluation.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

AT = 10


@dataclass(frozen=True)
class Quality:
    """Means over `count` histories."""

    hits: float
    gain: float
    count: int

    @classmethod
    def of(cls, sums: Tensor) -> Quality:
        hits, gain, count = sums.tolist()
        return cls(hits / max(count, 1), gain / max(count, 1), int(count))

    def as_dict(self) -> dict[str, float | int]:
        return {f"hr@{AT}": self.hits, f"ndcg@{AT}": self.gain, "count": self.count}


def ranks(scores: Tensor, target: Tensor) -> Tensor:
    """How many items stand before the target, from 0; column i of scores is item i + 1. Of equal ones, half do."""
    own = scores.gather(1, target.unsqueeze(1) - 1)
    standing = (scores > own).sum(1) + ((scores == own).sum(1) - 1) / 2
    return torch.where(own[:, 0].isnan(), float(scores.shape[1]), standing)  # no number is no hit


def totals(scores: Tensor, target: Tensor) -> Tensor:
    """Sums of hits, of gains, and their number; rows with target 0 do not count."""
    real = target != 0
    return summed(ranks(scores[real], target[real]))


def summed(rank: Tensor) -> Tensor:
    """Sums of hits, of gains, and their number."""
    hit = rank < AT
    gain = torch.where(hit, 1 / (rank + 2).log2(), 0.0)
    return torch.tensor([hit.sum().item(), gain.sum().item(), len(rank)], dtype=torch.float64)


def without_history(scores: Tensor, ids: Tensor, target: Tensor) -> Tensor:
    """Items of the history rank last, as where nobody is recommended what they had; the target stays."""
    padded = torch.cat([scores.new_zeros(len(scores), 1), scores], 1)
    masked = padded.scatter(1, ids, float("-inf")).scatter(
        1, target.unsqueeze(1), padded.gather(1, target.unsqueeze(1))
    )
    return masked[:, 1:]


@torch.no_grad()
def evaluate(
    scores: Callable[[Tensor, Tensor], Tensor],
    batches: Iterable[Mapping[str, Tensor]],
    *,
    mask_history: bool = False,
    add_up: Callable[[Tensor], Tensor] = lambda x: x,
) -> Quality:
    """`scores(ids, times)` is (B, catalogue); `add_up` sums over ranks. The model is in eval mode already."""
    total = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        found = scores(batch["ids"], batch["times"])
        if mask_history:
            found = without_history(found, batch["ids"], batch["target"])
        total += totals(found, batch["target"])
    return Quality.of(add_up(total))
