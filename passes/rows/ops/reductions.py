"""Reductions: sums, means, norms and the like over dims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from ..calls import arg, op, reduced_dims
from ..declaration import row_op
from .packing import first_name

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..zeros import Support, Zeros


def _axes(t: Typing, n: fx.Node) -> Dims:
    gone = reduced_dims(n)
    keep = bool(arg(n, "keepdim", False))
    return [[] if i in gone else d for i, d in enumerate(t.dims(n.args[0])) if keep or i not in gone]


def _mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return f"{op(n)} over rows" if any(r.on_rows(n.args[0], d, s) for d in reduced_dims(n)) else None


def _zeros(z: Zeros, n: fx.Node) -> Support:
    """What is zero on every element is zero: what is known beside the reduced dims stays true."""
    return z.support_beside(n.args[0], *reduced_dims(n))


def _packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    where: Any = [e.position(x, d, chosen) for d in reduced_dims(n)]
    if not isinstance(arg(n, "dim"), (list, tuple)):
        where = where[0]
    return e.again(n, **{first_name(n): e.packed(x, chosen), "dim": where})


_ARGUMENTS = ("self", "dim", "keepdim", "dtype", "ord", "p", "correction", "unbiased", "q", "interpolation")
row_op("sum", "mean", "amax", "amin", "linalg_norm", "linalg_vector_norm", "norm", "nansum",
       models=_ARGUMENTS, axes=_axes, mixes=_mixes, zeros=_zeros, packed=_packed)  # fmt: skip
row_op("any", "all", "prod", "logsumexp", "std", "var", "argmax", "argmin", "count_nonzero",
       "quantile.scalar", "nanquantile.scalar",
       models=_ARGUMENTS, axes=_axes, mixes=_mixes, packed=_packed)  # fmt: skip
