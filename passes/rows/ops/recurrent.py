"""Ops that carry something from row to row: recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from ..calls import arg
from ..declaration import EVERY, row_op
from ..spans import Prefix

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..moves import Moves
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..spans import Span


def _axes(t: Typing, n: fx.Node) -> list[Dims | None]:
    if arg(n, "offsets") is not None:
        return [None, None, None]
    x, hidden = t.dims(arg(n, "x")), t.dims(arg(n, "hidden"))
    t.join(x[0], hidden[0])
    out = [x[0], x[1], hidden[1]]
    return [out, list(out) if arg(n, "cell") is not None else None, None]


def _mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    return "a recurrent layer, whose rows need those before them"


def _spans(m: Moves, n: fx.Node, space: Space) -> Span | None:
    """Along the columns of a padded batch."""
    if arg(n, "offsets") is not None:
        return None
    x = arg(n, "x")
    dims = [tuple(d) for d in m.typing.atoms(x)]
    if m.space_of(x) != space or dims[:2] != [space.sequence, space.column] or set(dims[2]) & set(space.axes):
        return None
    return Prefix(space, x)


def _packed(e: Emitter, n: fx.Node, chosen: RowSet) -> Any:
    return e.again(n, x=e.packed(arg(n, "x"), chosen), offsets=e.offsets(chosen))


row_op("turbogr::recurrence", models=EVERY, axes=_axes, mixes=_mixes, spans=_spans, packed=_packed)
