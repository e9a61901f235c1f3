"""Parts of default pipelines: what every target profits from."""

from __future__ import annotations

PACKING = (
    "remove-noops, fold-views, pack-rows, expand-lookups, fold-masks, eliminate-common, simplify-masks, "
    "recognize-activations"
)
SCHEDULE = "row-gradients, bucket-collectives, overlap"
