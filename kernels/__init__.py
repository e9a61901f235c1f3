"""Ops of the `turbogr` namespace: schema, fake, autograd, FLOP formula and implementations. Knows torch only.

Importing this package registers them; they are called as `torch.ops.turbogr.<name>`.
"""

from . import (
    adamw,
    dropout,
    embedding,
    grouped,
    half_copy,
    half_rows,
    jagged_attention,
    kept,
    linear_cross_entropy,
    lookup,
    lookup_dot,
    norm_gate,
    picked,
    recurrence,
    row_adagrad,
    rows,
    sampled_loss,
    sampled_softmax,
    segment,
    sequence_product,
    silu_split,
    standing,
    table_gradient,
)
from .cpu.state import state

__all__ = [
    "adamw",
    "dropout",
    "embedding",
    "grouped",
    "half_copy",
    "half_rows",
    "jagged_attention",
    "kept",
    "linear_cross_entropy",
    "lookup",
    "lookup_dot",
    "norm_gate",
    "picked",
    "recurrence",
    "row_adagrad",
    "rows",
    "sampled_loss",
    "sampled_softmax",
    "segment",
    "sequence_product",
    "silu_split",
    "standing",
    "state",
    "table_gradient",
]
