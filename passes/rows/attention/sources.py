"""Values made from numbers and positions, and ops that put parts of several values together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..calls import rank_of
from .calls import Call, Rules, shape, value
from .formula import ZERO, Formula, Index, Size
from .indexing import divided, from_front, plain_size
from .language import Leaf, Number, Position, Unknown, number
from .numbers import cast
from .table import Table, combine, one

if TYPE_CHECKING:
    from .evaluate import Evaluator

RULES = Rules()
_SIZED = ("size", "dtype", "self")


# --- filled with one number ----------------------------------------------------------------------------


def _filled(ev: Evaluator, call: Call, given: Any) -> Table:
    if isinstance(given, fx.Node):
        return combine(lambda leaf: cast(ev, leaf, call.dtype), ev.at(given, ()))
    return one(number(given, call.dtype))


@RULES.of("zeros", "zeros_like", "new_zeros", models=_SIZED)
def _zeros(ev: Evaluator, call: Call) -> Table:
    return _filled(ev, call, 0)


@RULES.of("ones", "ones_like", "new_ones", models=_SIZED)
def _ones(ev: Evaluator, call: Call) -> Table:
    return _filled(ev, call, 1)


@RULES.of("full", "full_like", "new_full", models=(*_SIZED, "fill_value"))
def _full(ev: Evaluator, call: Call) -> Table:
    return _filled(ev, call, call.args["fill_value"])


@RULES.of("fill", models=("self", "value"))
def _fill(ev: Evaluator, call: Call) -> Table:
    return _filled(ev, call, call.args["value"])


@RULES.of("scalar_tensor", models=("s", "dtype"))
def _scalar(ev: Evaluator, call: Call) -> Table:
    return _filled(ev, call, call.args["s"])


# --- positions -----------------------------------------------------------------------------------------


@RULES.of("arange", models=("start", "end", "step", "dtype"))
def _arange(ev: Evaluator, call: Call) -> Table:
    start, step = call.args.get("start", 0), call.args.get("step", 1)
    if isinstance(start, float) or isinstance(step, float):
        raise Unknown("fractions of positions")
    return one(ev.position(call.index[0].times(plain_size(step)) + plain_size(start), call.dtype))


@RULES.of("eye", models=("n", "m", "dtype"))
def _eye(ev: Evaluator, call: Call) -> Table:
    same = ev.compare("eq", call.index[0] - call.index[1])
    return combine(lambda yes: number(yes.value, call.dtype), same)


@RULES.of("tril", "triu", models=("self", "diagonal"))
def _triangle(ev: Evaluator, call: Call) -> Table:
    diagonal = plain_size(call.args["diagonal"])
    gap = call.index[-2] - call.index[-1] + diagonal
    kept = ev.test(gap if call.name == "tril" else gap.times(-1))
    zero = number(0, call.dtype)
    return combine(lambda yes, x: x if yes.value else zero, kept, ev.at(call.args["self"], call.index))


# --- put together --------------------------------------------------------------------------------------


@RULES.of("cat", models=("tensors", "dim"))
def _cat(ev: Evaluator, call: Call) -> Table:
    parts, dim = call.args["tensors"], call.dim(len(call.index))
    along, first = call.index[dim], shape(parts[0])
    if any(rank_of(p) != len(call.index) for p in parts):
        raise Unknown("a part without elements")
    if all(p is parts[0] for p in parts):
        rest = divided(ev.sizes, along, first[dim])[1] if first[dim] != 1 else ZERO
        return ev.at(parts[0], (*call.index[:dim], rest, *call.index[dim + 1 :]))
    ends: list[Size] = [0]
    for part in parts:
        ends.append(ends[-1] + shape(part)[dim])
    found: Table | None = None
    for part, start, end in reversed(list(zip(parts, ends, ends[1:], strict=False))):
        if ev.sizes.always(along - start) is False:
            continue
        here = _cast_table(ev, ev.at(part, (*call.index[:dim], along - start, *call.index[dim + 1 :])), call.dtype)
        found = here if found is None else _chosen(ev.test(along - end), found, here)
    assert found is not None
    return found


def _cast_table(ev: Evaluator, table: Table, dtype: torch.dtype) -> Table:
    return combine(lambda leaf: cast(ev, leaf, dtype), table)


def _chosen(condition: Table, yes: Table, no: Table) -> Table:
    return combine(lambda c, a, b: a if c.value else b, condition, yes, no)


@RULES.of("stack", models=("tensors", "dim"))
def _stack(ev: Evaluator, call: Call) -> Table:
    parts, dim = call.args["tensors"], call.dim(len(call.index))
    inner = (*call.index[:dim], *call.index[dim + 1 :])
    tables = [_cast_table(ev, ev.at(part, inner), call.dtype) for part in parts]
    found = tables[-1]
    for at, table in reversed(list(enumerate(tables[:-1]))):
        found = _chosen(ev.test(call.index[dim] - (at + 1)), found, table)
    return found


@RULES.of("constant_pad_nd", models=("self", "pad", "value"))
@RULES.of("pad", models=("self", "pad", "value"))
def _pad(ev: Evaluator, call: Call) -> Table:
    source, pad = call.args["self"], [plain_size(p) for p in call.args["pad"]]
    inside, kept = list(call.index), []
    for pair in range(len(pad) // 2):
        dim = rank_of(source) - 1 - pair
        inside[dim] = call.index[dim] - pad[2 * pair]
        kept += [inside[dim], inside[dim].times(-1) + (shape(source)[dim] - 1)]
    found, filler = ev.at(source, tuple(inside)), one(number(call.args["value"] or 0, call.dtype))
    for condition in kept:
        found = _chosen(ev.test(condition), found, filler)
    return found


@RULES.of("diagonal_scatter", models=("self", "src", "offset", "dim1", "dim2"))
def _diagonal_scatter(ev: Evaluator, call: Call) -> Table:
    count = len(call.index)
    first, second = (call.dim(count, name) for name in ("dim1", "dim2"))
    offset = int(call.args["offset"])
    along = call.index[first] - max(0, -offset)
    rest = [i for d, i in enumerate(call.index) if d not in (first, second)]
    on = ev.compare("eq", call.index[first] + offset - call.index[second])
    return _chosen(on, ev.at(call.args["src"], (*rest, along)), ev.at(call.args["self"], call.index))


@RULES.of("slice_scatter", models=("self", "src", "dim", "start", "end", "step"))
def _slice_scatter(ev: Evaluator, call: Call) -> Table:
    whole, part, dim = call.args["self"], call.args["src"], call.dim(len(call.index))
    if call.args["step"] != 1:
        raise Unknown("every other element")
    start = from_front(ev.sizes, plain_size(call.args["start"] or 0), shape(whole)[dim])
    inner = call.index[dim] - start
    found = ev.at(part, (*call.index[:dim], inner, *call.index[dim + 1 :]))
    outside = ev.at(whole, call.index)
    for condition in (inner, inner.times(-1) + (shape(part)[dim] - 1)):
        found = _chosen(ev.test(condition), found, outside)
    return found


@RULES.of("select_scatter", models=("self", "src", "dim", "index"))
def _select_scatter(ev: Evaluator, call: Call) -> Table:
    whole, dim = call.args["self"], call.dim(len(call.index))
    at = from_front(ev.sizes, plain_size(call.args["index"]), shape(whole)[dim])
    inner = (*call.index[:dim], *call.index[dim + 1 :])
    on = ev.compare("eq", call.index[dim] - at)
    return _chosen(on, ev.at(call.args["src"], inner), ev.at(whole, call.index))


# --- looked up by position -----------------------------------------------------------------------------


def _looked_up(ev: Evaluator, index: Table, size: Size, from_end: bool = True) -> Formula:
    leaf: Leaf | None = index.only
    if isinstance(leaf, Position):
        formula = leaf.formula
    elif isinstance(leaf, Number):
        formula = Formula((), int(leaf.value))
    else:
        raise Unknown("looked up by data")
    if ev.sizes.within(formula, 0, size - 1):
        return formula
    if from_end and ev.sizes.within(formula, -size, -1):
        return formula + size
    raise Unknown("an index that may be out of range")


@RULES.of("index", models=("self", "indices"))
def _index(ev: Evaluator, call: Call) -> Table:
    """Advanced indexing by positions is a view."""
    source = call.args["self"]
    indices = [*call.args["indices"], *[None] * (rank_of(source) - len(call.args["indices"]))]
    given = [d for d, i in enumerate(indices) if i is not None]
    whole = all(not value(indices[d]).dtype.is_floating_point and value(indices[d]).dtype != torch.bool for d in given)
    if not whole or given != list(range(given[0], given[-1] + 1)):
        raise Unknown("indices that are no positions side by side")
    count, first = max(rank_of(indices[d]) for d in given), given[0]
    shared = call.index[first : first + count]
    found = [_looked_up(ev, ev.operand(indices[d], shared), shape(source)[d]) for d in given]
    return ev.at(source, (*call.index[:first], *found, *call.index[first + count :]))


@RULES.of("index_select", models=("self", "dim", "index"))
def _index_select(ev: Evaluator, call: Call) -> Table:
    source, dim = call.args["self"], call.dim(len(call.index))
    at = _looked_up(ev, ev.at(call.args["index"], (call.index[dim],)), shape(source)[dim], from_end=False)
    return ev.at(source, (*call.index[:dim], at, *call.index[dim + 1 :]))


@RULES.of("gather", models=("self", "dim", "index"))
def _gather(ev: Evaluator, call: Call) -> Table:
    source, dim = call.args["self"], call.dim(len(call.index))
    at = _looked_up(ev, ev.at(call.args["index"], call.index), shape(source)[dim], from_end=False)
    return ev.at(source, (*call.index[:dim], at, *call.index[dim + 1 :]))


@RULES.of("embedding", models=("weight", "indices"))
def _embedding(ev: Evaluator, call: Call) -> Table:
    table, indices = call.args["weight"], call.args["indices"]
    at = _looked_up(ev, ev.at(indices, call.index[:-1]), shape(table)[0], from_end=False)
    return ev.at(table, (at, call.index[-1]))


@RULES.of("index_put", models=("self", "indices", "values"))
def _index_put(ev: Evaluator, call: Call) -> Table:
    """x[mask] = number."""
    indices: list[Any] = list(call.args["indices"])
    if len(indices) != 1 or value(indices[0]).dtype != torch.bool or rank_of(call.args["values"]) != 0:
        raise Unknown("elements put by index")
    mask: Index = call.index[: rank_of(indices[0])]
    filler = _cast_table(ev, ev.at(call.args["values"], ()), call.dtype)
    return _chosen(ev.at(indices[0], mask), filler, ev.at(call.args["self"], call.index))
