"""The packed graph: every value that is demanded on a set of rows lives as (rows, features).

Nodes get a packed twin, in graph order; whoever needs the other form of a value gets a conversion, made once. The
packed layout is canonical: row axes are deleted from every dim and rows come first, so (B, N, D), (N, B, D), (B*N, D)
and (B, h, N, d) are all (T, ...), and transposes around attention vanish.

building   calls, sizes, dims
inputs     row sets, and what the prologue provides for them
values     values packed and padded, and conversions
attention  the call of an attention
exits      results made from packed rows
emitter    the walk
"""

from .emitter import Emitter, RuleFailed

__all__ = ["Emitter", "RuleFailed"]
