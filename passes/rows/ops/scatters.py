"""Writing into features: each row of the result is its own row with some elements replaced or added to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

from ..calls import arg, dim_of, is_tensor, op, shape
from ..declaration import EVERY, row_op
from .along import ALONG
from .packing import same_dims

if TYPE_CHECKING:
    from ..axes import Dims, Typing
    from ..emit import Emitter
    from ..program import RowSet
    from ..rowwise import Rowwise
    from ..spaces import Space


def _source(n: fx.Node) -> Any:
    """The values that are written."""
    return arg(n, "src") if arg(n, "src") is not None else arg(n, "source")


def _selected(t: Typing, n: fx.Node) -> Dims:
    """The source has every dim but the one that is selected."""
    rest = [d for i, d in enumerate(t.dims(n.args[0])) if i != dim_of(n)]
    for mine, its in zip(rest, t.dims(_source(n)), strict=True):
        t.join(mine, its)
    return same_dims(t, n)


def _beside(t: Typing, n: fx.Node) -> Dims:
    """The source has the same dims, but for the one that is written along."""
    for i, (mine, its) in enumerate(zip(t.dims(n.args[0]), t.dims(_source(n)), strict=False)):
        if i != dim_of(n):
            t.join(mine, its)
    return same_dims(t, n)


def _by_index(t: Typing, n: fx.Node) -> Dims:
    """Index and source may be corners of the tensor."""
    for x in (arg(n, "index"), _source(n)):
        if is_tensor(x):
            for i, (mine, its) in enumerate(zip(t.dims(n.args[0]), t.dims(x), strict=False)):
                if i != dim_of(n) and t.axes.same(shape(n)[i], shape(x)[i]):
                    t.join(mine, its)
    return same_dims(t, n)


def _mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    if not r.covers(n.args[0], s) or not r.covers(_source(n), s):
        return f"{op(n)} of a value with other rows"
    if not r.free(arg(n, "index"), s):
        return f"{op(n)} at rows"
    return f"{op(n)} writes rows" if r.on_rows(n.args[0], dim_of(n), s) else None


def _packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    name = "src" if arg(n, "src") is not None else "source"
    changed = {"self": e.packed(x, chosen), "dim": e.position(x, dim_of(n), chosen)}
    return e.again(n, **changed, **{name: e.packed(_source(n), chosen)})


def _by_index_mixes(r: Rowwise, n: fx.Node, s: Space) -> str | None:
    x: Any = n.args[0]
    if r.on_rows(x, dim_of(n), s) or not all(r.covers(y, s) for y in _with_rows(n)):
        return f"{op(n)} of values with other rows"
    same = all(r.typing.axes.same(a, b) for y in _with_rows(n)
               for i, (a, b) in enumerate(zip(shape(x), shape(y), strict=True)) if i != dim_of(n))  # fmt: skip
    return None if same else f"{op(n)} into a corner of the tensor"


def _with_rows(n: fx.Node) -> list[Any]:
    source = _source(n)
    return [n.args[0], arg(n, "index"), *([source] if is_tensor(source) else [])]


def _by_index_packed(e: Emitter, n: fx.Node, chosen: RowSet) -> fx.Node:
    x: Any = n.args[0]
    changed = {"self": e.packed(x, chosen), "dim": e.position(x, dim_of(n), chosen)}
    if is_tensor(_source(n)):
        changed["src"] = e.packed(_source(n), chosen)
    return e.again(n, **changed, index=e.packed(arg(n, "index"), chosen))


row_op("select_scatter", models=("self", "src", "dim", "index"), axes=_selected, mixes=_mixes, packed=_packed)
row_op("slice_scatter", models=("self", "src", "dim", "start", "end", "step"),
       axes=_beside, mixes=_mixes, packed=_packed)  # fmt: skip
row_op("index_add", "index_copy", models=("self", "dim", "index", "source", "alpha"),
       axes=_beside, mixes=_mixes, packed=_packed)  # fmt: skip
row_op("scatter", "scatter_add", "scatter_reduce.two",
       models=("self", "dim", "index", "src", "value", "reduce", "include_self"),
       axes=_by_index, mixes=_by_index_mixes, packed=_by_index_packed)  # fmt: skip
row_op("index_fill", models=("self", "dim", "index", "value"), axes=same_dims, **ALONG)
row_op("index_put", models=EVERY, axes=same_dims)
