"""Look embeddings up with the kernel whose gradient does not fill the table row by row."""

from __future__ import annotations

import torch

from .. import (
    kernels,  # noqa: F401  (defines the ops)
)
from ..graph.phases import Phase
from ..rules.rule import rule

aten, ops = torch.ops.aten, torch.ops.turbogr


@rule(
    "fuse-embedding",
    phase=Phase.PRE_GRAD,
    inputs="float[v, d], int",
    after=("remove-noops", "fold-views", "pack-rows", "eliminate-common", "simplify-masks"),
    before=("eliminate-dead-code",),
)
def fuse_embedding(weight, ids, *, padding_idx: int):
    """Look rows of tables up, and add up their gradients, in kernels that share the work among threads."""
    return aten.embedding(weight, ids, padding_idx)


@fuse_embedding.when
def _(m):
    m.require(m.ids.dtype in (torch.int64, torch.int32), "ids are {}, not int64 or int32", m.ids.dtype)


@fuse_embedding.replace
def _(weight, ids, *, padding_idx):
    return ops.embedding(weight, ids, padding_idx)
