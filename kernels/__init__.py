"""Ops of the `turbogr` namespace: schema, fake, autograd, FLOP formula and implementations. Knows torch only.

Importing this package registers them; they are called as `torch.ops.turbogr.<name>`.
"""

from . import dropout, jagged_attention, rows, segment

__all__ = ["dropout", "jagged_attention", "rows", "segment"]
