"""The default pipeline of the targets that end in GE."""

from __future__ import annotations

from ..cpu import PACKING

# Only what has an AscendC kernel is fused into one op.
DEFAULT_PIPELINE = f"{PACKING}, narrow-attention, fuse-norm-gate, fuse-embedding, eliminate-dead-code, keep-transposes"
