"""Ops of the `turbogr` namespace: schema, fake, autograd, FLOP formula and implementations. Knows torch only.

Importing this package registers them; they are called as `torch.ops.turbogr.<name>`.
"""

from . import (
    dropout,
    embedding,
    jagged_attention,
    linear_cross_entropy,
    norm_gate,
    rows,
    sampled_softmax,
    segment,
    silu_split,
)

__all__ = [
    "dropout",
    "embedding",
    "jagged_attention",
    "linear_cross_entropy",
    "norm_gate",
    "rows",
    "sampled_softmax",
    "segment",
    "silu_split",
]
