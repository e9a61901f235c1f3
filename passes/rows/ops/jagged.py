"""Rows that the model itself packs: fbgemm's jagged ops, and lookups in tables whose gradients are rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from ..calls import arg, quotient, shape, size
from ..declaration import row_op
from ..meaning import Within
from ..zeros import NOWHERE_KNOWN

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space
    from ..zeros import Support, Zeros


def _padded(t: Typing, n: fx.Node) -> Dims | None:
    offsets = t.offsets(arg(n, "offsets")[0])
    new, rows = shape(n), t.dims(n.args[0])
    if offsets in t.jagged:
        sequence, column, row = t.jagged[offsets]
        t.join(row, rows[0])
        if quotient(t.size_of(t.axes.atoms(column)), new[1]) != 1:
            column = t.axes.fresh(new[1])  # padded to another length than elsewhere
    else:
        sequence, column = t.axes.fresh(new[0]), t.axes.fresh(new[1])
        t.jagged[offsets] = (sequence, column, rows[0])
    return [sequence, column, *rows[1:]]


def _padded_zeros(z: Zeros, n: fx.Node) -> Support:
    inside = Within(z.typing.offsets(arg(n, "offsets")[0]))
    return frozenset([inside]) if not arg(n, "padding_value") else NOWHERE_KNOWN


def _to_jagged(t: Typing, n: fx.Node) -> list[Dims | None]:
    """Two results: the rows, and the offsets again."""
    given: Any = n.args[1]
    offsets = t.offsets(given[0])
    x = t.dims(n.args[0])
    if offsets in t.jagged:
        sequence, column, row = t.jagged[offsets]
        t.join(sequence, x[0])
        if quotient(t.size_of(t.axes.atoms(column)), t.size_of(t.axes.atoms(x[1]))) == 1:
            t.join(column, x[1])
    else:
        row = [t.axes.new(size(n.meta["val"][0].shape[0]))]
        t.jagged[offsets] = (x[0], x[1], row)
    return [[row, *x[2:]], None]


def _lookup(t: Typing, n: fx.Node) -> Dims:
    return [*t.dims(n.args[2]), t.axes.fresh(shape(n)[-1])]


def _lookup_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    """Also a collective: all ranks take part with the rows that they have, however many these are."""
    return None if r.free(n.args[0], s) and r.free(n.args[1], s) else "a table indexed by rows"


def _lookup_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    ids: Any = n.args[2]
    return e.again(n, ids=e.packed(ids, chosen))


def _own_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    ids: Any = n.args[2]
    e.note_lookup(ids, shape(n.args[0])[0])
    return e.again(n, ids=e.packed(ids, chosen))


row_op("fbgemm::jagged_to_padded_dense", models=("values", "offsets", "max_lengths", "padding_value"),
       axes=_padded, zeros=_padded_zeros)  # fmt: skip
row_op("fbgemm::dense_to_jagged", models=("dense", "x_offsets", "total_L"), axes=_to_jagged)
row_op("turbogr::sharded_lookup", models=("shard", "receipts", "ids", "table"),
       axes=_lookup, mixes=_lookup_mixes, packed=_lookup_packed)  # fmt: skip
row_op("turbogr::own_lookup", models=("weight", "receipts", "ids", "table"),
       axes=_lookup, mixes=_lookup_mixes, packed=_own_packed)  # fmt: skip
