"""How much memory a run takes: as the system counts it, and as autograd would keep it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import storage
from .config import Config

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt
LARGEST = 1 << 30  # what a step allocates at once is kept; tables are not


class Peak:
    """The most memory the process had since now, above what it has now. None where the system does not tell."""

    def __init__(self) -> None:
        self._start: int | None = None
        try:
            Path("/proc/self/clear_refs").write_text("5")  # forgets older peaks
            self._start = status("VmRSS")
        except OSError:
            pass

    def bytes(self) -> int | None:
        return None if self._start is None else max(status("VmHWM") - self._start, 0)


def status(name: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def kept_by_autograd(model: nn.Module, ids: Tensor, times: Tensor) -> int:
    """Bytes that eager keeps from forward to backward, beyond parameters and inputs; also of tensors on `meta`."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        kept[id(x.untyped_storage())] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        storage.method(model, "loss")(ids, times)
    for x in (*model.parameters(), ids, times):
        kept.pop(id(x.untyped_storage()), None)
    return sum(s.nbytes() for s in kept.values())


def state_bytes(config: Config, dense: int, tables: int) -> int:
    """Parameters, gradients and moments: AdamW's for dense ones, a number per row for tables with gradients of rows."""
    return dense * 4 * (4 if config.storage == "fp32" else 2) + tables * 4 + tables // config.dim * 4


def eager_estimate(config: Config, catalogue: int) -> int:
    """What a padded eager step needs at least: its state and what autograd keeps. Nothing of it is allocated."""
    from .build import parameters_of, recommender

    with torch.device("meta"):
        count = parameters_of(recommender(config, catalogue))
    return state_bytes(config, count["dense"], count["tables"]) + eager_activations(config)


def eager_activations(config: Config) -> int:
    """What autograd keeps for one padded batch; a table has no part in it."""
    from .build import recommender

    with torch.device("meta"):
        model = recommender(config, 2)
        table: Any = model.items.weight
        storage.store(model, config.storage, {table})
        ids = torch.zeros(config.batch, config.max_len, dtype=torch.int64)
    return kept_by_autograd(model, ids, ids.clone())


def keep_freed() -> bool:
    """Ask the C library to keep memory that is freed for the next step; whether it could be asked.

    By default glibc gives every large tensor back to the system, and each page that a step writes to is fetched, and
    filled with zeros, again.
    """
    try:
        library = ctypes.CDLL(None)
        return bool(library.mallopt(M_MMAP_THRESHOLD, LARGEST) and library.mallopt(M_TRIM_THRESHOLD, LARGEST))
    except (OSError, AttributeError):
        return False
