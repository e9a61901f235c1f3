"""The default pipeline of the targets that end in GE."""

from __future__ import annotations

from ..cpu import PACKING

# Only what has an AscendC kernel is fused into one op.
FUSION = "narrow-attention, fuse-norm-gate, fuse-embedding"
DEFAULT_PIPELINE = f"{PACKING}, {FUSION}, eliminate-dead-code, label-streams, keep-transposes"
