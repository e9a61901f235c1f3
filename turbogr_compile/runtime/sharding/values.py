"""Values of tables: cut from one that is there, or drawn where they live, the same for any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import OptionError
from .layout import Layout

Init = Callable[[Tensor, torch.Generator], Any]
_DRAWN = 4096  # rows that one seed draws: which rank has them makes no difference


def normal(rows: Tensor, generator: torch.Generator) -> None:
    """As `nn.Embedding` initialises its table."""
    rows.normal_(generator=generator)


class Values:
    """Where values of tables come from: a table that is there, or `init` and a seed."""

    def __init__(self, init: Init, seed: int, device: torch.device | str | None) -> None:
        if not callable(init):
            raise OptionError(f"init must be a function of rows and a generator, got {init!r}")
        self.init, self.seed, self.device = init, seed, device

    def shard(self, name: str, old: nn.Embedding, layout: Layout, rank: int) -> Tensor:
        weight = old.weight.detach()
        if not weight.is_meta:
            return layout.cut(weight, rank).to(self.device or weight.device)
        rows = torch.zeros(layout.held(rank), layout.piece, dtype=weight.dtype, device=self.device or "cpu")
        self._draw(name, rows, layout.starts[rank], layout.starts[rank + 1])
        if old.padding_idx is not None:
            for owner, row in layout.owner(old.padding_idx):
                if owner == rank:
                    rows[row] = 0
        if layout.pieces > 1:
            rows[:, layout.valid(rank)[1] :] = 0
        return rows

    def _draw(self, name: str, rows: Tensor, first: int, last: int) -> None:
        """Block by block of addresses, so that the number of ranks does not show in the values."""
        for block in range(first // _DRAWN, -(-last // _DRAWN)):
            drawn = torch.empty(_DRAWN, rows.shape[1], dtype=rows.dtype, device=rows.device)
            digest = hashlib.blake2b(f"{self.seed}/{name}/{block}".encode(), digest_size=8).digest()
            generator = torch.Generator(rows.device).manual_seed(int.from_bytes(digest, "little") >> 1)
            self.init(drawn, generator)
            start = block * _DRAWN
            low, high = max(first, start), min(last, start + _DRAWN)
            rows[low - first : high - first] = drawn[low - start : high - start]
