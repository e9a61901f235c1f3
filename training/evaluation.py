"""The evaluation of a run: histories encoded as the backend does it, held-out items counted where rows are."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .baselines import baselines
from .compiled import encoder
from .config import Config
from .data import Batches
from .evaluate import Quality, summed
from .ranks import Ranks
from .standings import ranks_of


class Evaluation:
    """HR@10 and NDCG@10 of the model as it is, over users that are the same each time; and those of baselines."""

    def __init__(self, model: Any, config: Config, batches: Batches, ranks: Ranks) -> None:
        self.model, self.config, self.batches, self.ranks = model, config, batches, ranks
        self._encode = encoder(model, config)

    def __call__(self) -> Quality:
        self.model.eval()
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                vectors, targets = self._vectors()
                return Quality.of(summed(ranks_of(vectors, targets, self.model.items, self.ranks)))
        finally:
            self.model.train()

    def _vectors(self) -> tuple[Tensor, Tensor]:
        """Of all users, whichever rank encoded them."""
        batches = self.batches.evaluation(self.config.evaluate_users)
        parts = [(self._encode(batch["ids"], batch["times"]), batch["target"]) for batch in batches]
        vectors, targets = (self.ranks.gather(torch.cat(each)) for each in zip(*parts, strict=True))
        real = targets != 0
        return vectors[real].float(), targets[real]

    @cached_property
    def baselines(self) -> dict[str, dict[str, float | int]]:
        """By name; of histories alone, and the same for each rank."""
        found = baselines(self.batches.histories, self.batches.evaluated(self.config.evaluate_users))
        return {name: _quality(of).as_dict() for name, of in found.items()}


def _quality(ranks: np.ndarray) -> Quality:
    return Quality.of(summed(torch.from_numpy(ranks)))
