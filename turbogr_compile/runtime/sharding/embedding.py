"""`ShardedEmbedding`: takes the place of an `nn.Embedding` whose rows are spread over ranks."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import TurbogrError
from . import ops as _ops  # noqa: F401  (defines the ops)
from . import stale as _stale  # noqa: F401  (defines the ops)
from . import state
from .table import SLOTS, Table

ops = torch.ops.turbogr


class ShardedEmbedding(nn.Module):
    """One rank's shard of a table, and lookups in all of it.

    The shard is no parameter: its gradient is that of the rows that were looked up, and optimizers of
    `turbogr_compile.runtime.sharding.optim` apply it. `receipts` stands for the table where autograd wants a leaf.
    """

    shard: Tensor

    def __init__(self, shard: Tensor, table: Table, mesh: Any = None, padding_idx: int | None = None) -> None:
        super().__init__()
        self.register_buffer("shard", shard, persistent=False)
        self.table, self.mesh, self.padding_idx = table, mesh, padding_idx
        self.number, table.home = table.number, weakref.ref(self)
        self.num_embeddings, self.embedding_dim = table.layout.rows, table.layout.width
        self.receipts = torch.zeros(SLOTS + 1, device=shard.device).requires_grad_()

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def trained(self) -> bool:
        return self.receipts.requires_grad

    def forward(self, ids: Tensor) -> Tensor:
        return ops.sharded_lookup(self.shard, self.receipts, ids, self.number)

    @property
    def weight(self) -> Tensor:
        raise TurbogrError(
            f"table {self.table.name!r} is spread over {self.table.layout.ranks} ranks: no rank has its whole weight; "
            "look rows up by id, or leave this table Replicated"
        )

    def extra_repr(self) -> str:
        layout = self.table.layout
        held = f"{self.shard.shape[0]} x {self.shard.shape[1]} here"
        return f"{layout.rows}, {layout.width}, {layout.placement.spec} over {layout.ranks} ranks, {held}"

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedEmbedding:
        super()._apply(fn, recurse)
        if self.receipts.device != self.shard.device:
            self.receipts.data = self.receipts.data.to(self.shard.device)
        return self

    # --- checkpoints: the whole table under the name that its weight had -----------------------------

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.table.settle()
        destination.update(state.saved(self.table, self.mesh, self.shard, prefix + "weight"))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: Any, strict: bool,
        missing: list[str], unexpected: list[str], errors: list[str],
    ) -> None:  # fmt: skip
        self.table.settle()
        found = state.find(self.table, state_dict, prefix + "weight", errors)
        if found is not None:
            with torch.no_grad():
                state.load(self.table, self.shard, found, prefix + "weight", errors)
        elif self.table.layout.held(self.table.rank):
            missing.append(prefix + "weight")
        known = {prefix + "weight", prefix + "weight" + state.ORDER}
        unexpected.extend(k for k in state_dict if strict and k.startswith(prefix) and k not in known)

    # --- copies have a journal of their own ----------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        raise TurbogrError(
            f"the sharded table {self.table.name!r} cannot be pickled or copied: it belongs to a process group; "
            "save state_dict() with torch.distributed.checkpoint"
        )
