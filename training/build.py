"""From settings to a model and data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

import turbogr_compile as turbogr

from ..errors import OptionError
from ..files import make_private, obstacle
from .config import Config
from .data import Histories, generate, open_histories
from .models import LAYERS, Recommender
from .models.recommender import draw_items


def recommender(config: Config, catalogue: int, table: str | None = None) -> Recommender:
    """A new model; its parameters follow from torch's generator. A table on `meta` waits for `place_tables`."""
    layer = LAYERS[config.model]
    layers = [
        layer(config.dim, config.heads, config.max_len, buckets=config.buckets, dropout=config.dropout)
        for _ in range(config.layers)
    ]
    return Recommender(
        layers, catalogue, config.dim, config.max_len,
        negatives=config.negatives, temperature=config.temperature, dropout=config.dropout, table=table,
    )  # fmt: skip


def place_tables(model: Recommender, config: Config, ranks: int) -> None:
    """Each rank draws the rows that it has, and no process more: the table is the same for any number of ranks."""
    drawn: dict[str, Any] = {"init": draw_items, "seed": config.seed}
    if ranks > 1:
        placed = turbogr.plan(model, tables={"items": turbogr.RowWise(), "positions": turbogr.Replicated()})
        turbogr.shard(model, placed, **drawn)
    else:
        turbogr.row_gradients(model, ["items"], **drawn)


def parameters_of(model: nn.Module) -> dict[str, int]:
    """How many there are: of the item table, and of everything else."""
    every = {n: p.numel() for n, p in model.named_parameters()}
    tables = every.get("items.weight", 0)
    return {"dense": sum(every.values()) - tables, "tables": tables}


def cache_of(config: Config) -> Path:
    """Where data that were read stay, for all runs: one that is named, or the user's own."""
    if config.cache:
        return Path(config.cache)
    if named := os.environ.get("TURBOGR_CACHE_DIR"):
        return Path(named).expanduser().absolute() / "data"
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "turbogr" / "data"


def histories(config: Config, folder: Path, tell: Callable[[int, int], None] = lambda read, total: None) -> Histories:
    """Those that the settings name; generated ones are written into `folder`, others are read once for all runs."""
    chosen: dict[str, Any] = {"keep": config.keep or None, "min_length": config.min_length}
    if config.data != "generated":
        cache = cache_of(config)
        try:
            make_private(cache)
        except OSError as error:
            raise OptionError(f"{cache} cannot be made ({error.strerror}): name another folder with --cache") from error
        if not config.cache and (reason := obstacle(cache)):
            raise OptionError(f"data cannot be kept: {reason}; name another folder with --cache")
        return open_histories(config.data, cache=cache, tell=tell, **chosen)
    if not folder.exists():
        partial = folder.with_name(f".{folder.name}.partial")  # a killed run leaves all of the files or none
        shutil.rmtree(partial, ignore_errors=True)
        generate(partial, users=config.users, items=config.items, mean_length=config.mean_length, seed=config.seed)
        partial.rename(folder)
    return open_histories(folder, **chosen)
