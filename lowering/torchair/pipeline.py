"""The default pipeline of the targets that end in GE."""

from __future__ import annotations

from ..common.pipelines import PACKING, SCHEDULE

# Only what has an AscendC kernel is fused into one op.
FUSION = "fuse-sampling{form=rows, multiple=16, widest=512}, narrow-attention, fuse-norm-gate, fuse-embedding"
DEFAULT_PIPELINE = f"{PACKING}, {FUSION}, eliminate-dead-code, {SCHEDULE}, keep-transposes"
