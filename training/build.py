"""From settings to a model and data."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import nn

from .config import Config
from .data import Histories, generate, open_histories
from .models import LAYERS, Recommender


def recommender(config: Config, catalogue: int) -> Recommender:
    """A new model; its parameters follow from torch's generator."""
    layer = LAYERS[config.model]
    layers = [
        layer(config.dim, config.heads, config.max_len, buckets=config.buckets, dropout=config.dropout)
        for _ in range(config.layers)
    ]
    return Recommender(
        layers, catalogue, config.dim, config.max_len,
        negatives=config.negatives, temperature=config.temperature, dropout=config.dropout,
    )  # fmt: skip


def parameters_of(model: nn.Module) -> dict[str, int]:
    """How many there are: of the item table, and of everything else."""
    every = {n: p.numel() for n, p in model.named_parameters()}
    tables = every.get("items.weight", 0)
    return {"dense": sum(every.values()) - tables, "tables": tables}


def histories(config: Config, folder: Path) -> Histories:
    """Those that the settings name; generated ones are written into `folder` once, others are kept there as read."""
    if config.data != "generated":
        return open_histories(config.data, cache=folder)
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.partial")  # a killed run leaves all of the files or none
        shutil.rmtree(partial, ignore_errors=True)
        generate(partial, users=config.users, items=config.items, mean_length=config.mean_length, seed=config.seed)
        partial.rename(folder)
    return open_histories(folder)
