"""Index maps of views: which element of its operand an element of a view is.

A reshape is a flattening and an unflattening of the index, with range analysis; where that needs two axes in place of
one (sequences times heads in one dim) it asks for the split, and evaluation starts over.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx

from ..calls import op, rank_of
from .calls import Call, Rules, arguments, shape, value
from .formula import KEY, QUERY, ZERO, Formula, Index, Size, Sizes, size_of
from .language import NeedsSplit, Unknown

VIEWS = Rules()
SPLITTING = {"split", "split_with_sizes", "chunk", "tensor_split", "unbind"}
COPIES = {"clone", "alias", "contiguous", "lift_fresh_copy", "lift_fresh"}


def step(sizes: Sizes, node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
    """The element of its operand that an element of a view is; None where the node is no view."""
    name = op(node)
    if name in COPIES:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return source, index
    if name == "getitem":
        return _part(node, index)
    rule = VIEWS.get(name)
    if rule is None:
        return None
    found: tuple[fx.Node, Index] = rule.apply(sizes, Call(node, index, arguments(node, rule.models)))
    return found


def follow(
    sizes: Sizes, node: fx.Node, index: Index, splittable: Collection[str] | None = None
) -> tuple[fx.Node, Index]:
    """Through views as far as they can be followed; other axes than those that are `splittable` stay whole."""
    while True:
        index = tidy(node, index)
        try:
            further = step(sizes, node, index)
        except Unknown:
            further = None
        except NeedsSplit as split:
            if splittable is None or split.axis in splittable:
                raise
            further = None
        if further is None:
            return node, index
        node, index = further


def tidy(node: fx.Node, index: Index) -> Index:
    """A dim of size one has index 0, always."""
    return tuple(ZERO if s == 1 else i for i, s in zip(index, shape(node), strict=True))


def broadcast(node: fx.Node, index: Index) -> Index:
    """The index of an operand that is broadcast to where `index` points."""
    count = rank_of(node)
    return tidy(node, index[len(index) - count :] if count else ())


def plain_size(given: Any) -> Size:
    """A size argument: a number, or a node that holds one."""
    if isinstance(given, fx.Node):
        given = value(given)
    return size_of(given)


# --- regrouping ----------------------------------------------------------------------------------------


def flattened(index: Index, dims: list[Size]) -> Formula:
    total, stride = ZERO, size_of(1)
    for i, size in zip(reversed(index), reversed(dims), strict=True):
        total, stride = total + i.times(stride), size_of(stride * size)
    return total


def divided(sizes: Sizes, total: Formula, by: Size) -> tuple[Formula, Formula]:
    """Quotient and remainder of a formula, where both are formulas."""
    for closest in (False, True):
        times = {axis: _times(sizes, c, by, closest) for axis, c in total.coefs}
        rest = {axis: c - times[axis] * by for axis, c in total.coefs}
        about = _times(sizes, total.const, by, closest)
        for const in (about, about - 1, about + 1):
            remainder = Formula.of(rest, total.const - const * by)
            if sizes.within(remainder, 0, by - 1):
                return Formula.of(times, const), remainder
    _ask_for_split(sizes, total, by)
    raise Unknown("a view that cuts across dims")


def _times(sizes: Sizes, c: Size, by: Size, closest: bool) -> Size:
    """How often `by` goes into `c`: with a rest that is not negative, or with the smallest rest of either sign."""
    if isinstance(c, int) and isinstance(by, int):
        times, rest = divmod(c, by)
        return times + 1 if closest and 2 * rest > by else times
    whole = sizes.divides(by, c)
    if whole is not None:
        return whole
    # What differs by a number from a multiple: 3n - 2 is once 3n - 1, and 1 less.
    return next((m for m in (1, 2, -1) if isinstance(size_of(c - m * by), int)), 0) if closest else 0


def _ask_for_split(sizes: Sizes, total: Formula, by: Size) -> None:
    for axis, c in total.coefs:
        inner = sizes.divides(c, by)
        if inner is None or axis in (QUERY, KEY) or sizes.same(inner, 1) or sizes.same(inner, sizes[axis]):
            continue
        if sizes.at_least(c, 1) and sizes.divides(inner, sizes[axis]) is not None:
            raise NeedsSplit(axis, inner)


def unflattened(sizes: Sizes, total: Formula, dims: list[Size]) -> Index:
    found = []
    for size in reversed(dims[1:]):
        total, rest = divided(sizes, total, size) if size != 1 else (total, ZERO)
        found.append(rest)
    if dims:
        if not sizes.within(total, 0, dims[0] - 1):
            raise Unknown("a view that cuts across dims")
        found.append(total)
    return tuple(reversed(found))


@VIEWS.of("reshape", "view", "_unsafe_view", models=("self", "shape", "size"))
@VIEWS.of("flatten", models=("self", "start_dim", "end_dim"))
@VIEWS.of("unflatten", models=("self", "dim", "sizes"))
@VIEWS.of("view_as", "reshape_as", models=("self", "other"))
def _reshape(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    source = call.args["self"]
    mine, theirs = shape(call.node), shape(source)
    first = 0
    while first < min(len(mine), len(theirs)) and mine[first] == theirs[first]:
        first += 1
    last = 0
    while last < min(len(mine), len(theirs)) - first and mine[-1 - last] == theirs[-1 - last]:
        last += 1
    end, their_end = len(mine) - last, len(theirs) - last
    total = flattened(call.index[first:end], mine[first:end])
    middle = unflattened(sizes, total, theirs[first:their_end])
    return source, (*call.index[:first], *middle, *call.index[end:])


# --- reordering ----------------------------------------------------------------------------------------


@VIEWS.of("unsqueeze", models=("self", "dim"))
def _unsqueeze(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    dim = call.dim(len(call.index))
    return call.args["self"], call.index[:dim] + call.index[dim + 1 :]


@VIEWS.of("squeeze", models=("self", "dim"))
def _squeeze(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    source, given = call.args["self"], call.args.get("dim")
    count = rank_of(source)
    dims = range(count) if given is None else given if isinstance(given, (list, tuple)) else [given]
    gone = {d % count for d in dims if shape(source)[d] == 1}
    rest = iter(call.index)
    return source, tuple(ZERO if d in gone else next(rest) for d in range(count))


@VIEWS.of("expand", "broadcast_to", models=("self", "size"))
@VIEWS.of("expand_as", models=("self", "other"))
def _expand(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    return call.args["self"], broadcast(call.args["self"], call.index)


@VIEWS.of("permute", models=("self", "dims"))
def _permute(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    places = {d % len(call.index): i for d, i in zip(call.args["dims"], call.index, strict=True)}
    return call.args["self"], tuple(places[d] for d in range(len(call.index)))


@VIEWS.of("transpose", models=("self", "dim0", "dim1", "axis0", "axis1"))
def _transpose(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    index = list(call.index)
    names = ("dim0", "dim1") if "dim0" in call.args else ("axis0", "axis1")
    a, b = (call.dim(len(index), name) for name in names)
    index[a], index[b] = index[b], index[a]
    return call.args["self"], tuple(index)


@VIEWS.of("t", models=("self",))
def _t(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    return call.args["self"], call.index[::-1]


@VIEWS.of("movedim", models=("self", "source", "destination"))
def _movedim(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    count = len(call.index)
    source, target = ([d % count for d in _listed(call.args[name])] for name in ("source", "destination"))
    rest = iter(d for d in range(count) if d not in source)
    came = [source[target.index(d)] if d in target else next(rest) for d in range(count)]
    places = dict(zip(came, call.index, strict=True))
    return call.args["self"], tuple(places[d] for d in range(count))


def _listed(given: Any) -> list[int]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


# --- parts ---------------------------------------------------------------------------------------------


def _moved(index: Index, dim: int, to: Formula) -> Index:
    return (*index[:dim], to, *index[dim + 1 :])


def from_front(sizes: Sizes, start: Size, size: Size) -> Size:
    """Where counting starts, as torch reads a start that may be negative."""
    if sizes.at_least(start):
        return start
    if not sizes.at_least(-1, start):
        raise Unknown("a start of unknown sign")
    if sizes.at_least(start + size):
        return size_of(start + size)
    if sizes.at_least(-start, size):
        return 0
    raise Unknown("a start before or behind the first element")


@VIEWS.of("slice", models=("self", "dim", "start", "end", "step"))
def _slice(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    source, dim = call.args["self"], call.dim(len(call.index))
    start, step = plain_size(call.args["start"] or 0), plain_size(call.args["step"])
    start = from_front(sizes, start, shape(source)[dim])
    return source, _moved(call.index, dim, call.index[dim].times(step) + start)


@VIEWS.of("narrow", models=("self", "dim", "start", "length"))
def _narrow(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    source, dim = call.args["self"], call.dim(len(call.index))
    start = from_front(sizes, plain_size(call.args["start"]), shape(source)[dim])
    return source, _moved(call.index, dim, call.index[dim] + start)


@VIEWS.of("select", models=("self", "dim", "index"))
def _select(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    source = call.args["self"]
    dim = call.dim(rank_of(source))
    at = from_front(sizes, plain_size(call.args["index"]), shape(source)[dim])
    return source, (*call.index[:dim], Formula((), at), *call.index[dim:])


@VIEWS.of("flip", models=("self", "dims"))
def _flip(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    source = call.args["self"]
    dims = {d % rank_of(source) for d in call.args["dims"]}
    last = [size - 1 for size in shape(source)]
    return source, tuple(i.times(-1) + last[d] if d in dims else i for d, i in enumerate(call.index))


@VIEWS.of("unfold", models=("self", "dimension", "size", "step"))
def _unfold(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    source, step = call.args["self"], plain_size(call.args["step"])
    dim = call.dim(rank_of(source), "dimension")
    return source, _moved(call.index[:-1], dim, call.index[dim].times(step) + call.index[-1])


@VIEWS.of("diagonal", models=("self", "offset", "dim1", "dim2"))
def _diagonal(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    source = call.args["self"]
    first, second = (call.dim(rank_of(source), name) for name in ("dim1", "dim2"))
    offset, along = call.args["offset"], call.index[-1]
    rest = iter(call.index[:-1])
    places = {first: along + max(0, -offset), second: along + max(0, offset)}
    return source, tuple(places[d] if d in places else next(rest) for d in range(rank_of(source)))


@VIEWS.of("repeat", models=("self", "repeats"))
@VIEWS.of("tile", models=("self", "dims"))
def _repeat(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    source = call.args["self"]
    dims = shape(source)
    own = call.index[len(call.index) - len(dims) :]
    return source, tuple(ZERO if s == 1 else divided(sizes, i, s)[1] for i, s in zip(own, dims, strict=True))


@VIEWS.of("repeat_interleave", models=("self", "repeats", "dim", "output_size"))
def _repeat_interleave(sizes: Sizes, call: Call) -> tuple[fx.Node, Index]:
    source, times = call.args["self"], call.args["repeats"]
    if not isinstance(times, int) or call.args["dim"] is None:
        raise Unknown("repeated by data")
    dim = call.dim(len(call.index))
    return source, _moved(call.index, dim, divided(sizes, call.index[dim], times)[0])


def _part(node: fx.Node, index: Index) -> tuple[fx.Node, Index] | None:
    """One of the results of a split."""
    split, at = node.args
    if op(split) not in SPLITTING or not isinstance(split, fx.Node) or not isinstance(at, int):
        return None
    schema = [a.name for a in split.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(schema, split.args, strict=False)) | split.kwargs
    source = split.args[0]
    assert isinstance(source, fx.Node)
    dim = int(given.get("dim", 0)) % rank_of(source)
    if op(split) == "unbind":
        return source, (*index[:dim], Formula((), at), *index[dim:])
    start = size_of(sum(size_of(part.shape[dim]) for part in value(split)[:at]))
    return source, _moved(index, dim, index[dim] + start)
