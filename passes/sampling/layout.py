"""What may be done to the dims of looked-up rows on the way to a product: done to ids instead, it is the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...graph.shapes import same_size
from ...rules.pattern import arguments
from ..common.cross_entropy import Refused, _order, value_of
from .plans import Plan
from .tables import Read, Rows

aten, ops = torch.ops.aten, torch.ops.turbogr


def _source(node: fx.Node) -> fx.Node:
    found = node.args[0]
    assert isinstance(found, fx.Node)
    return found


def _sizes(node: fx.Node) -> list[Any]:
    sizes = node.args[1]
    assert isinstance(sizes, (list, tuple))
    return list(sizes)


def same(node: fx.Node, axis: int, read: Read) -> Rows | None:
    found = read(_source(node), axis)
    return None if found is None else found.passed(node)


def cast(node: fx.Node, axis: int, read: Read) -> Rows | None:
    found = same(node, axis, read)
    if found is not None and value_of(_source(node)).dtype != value_of(node).dtype:
        raise Refused("rows-cast", f"rows are converted to {value_of(node).dtype} before they are scored", node)
    return found


def detach(node: fx.Node, axis: int, read: Read) -> Rows | None:
    """Nothing below gets a gradient."""
    found = same(node, axis, read)
    if found is None:
        return None
    still = tuple(
        Plan(lambda w, f=f: w.call(aten.detach.default, f.build(w)), f.spread)  # type: ignore[misc]
        for f in found.factors
    )
    if found.learned:
        raise Refused("rows-changed", "rows are scaled by a tensor and detached afterwards", node)
    return replace(found, table=replace(found.table, detached=True), factors=still)


def _without(dim: int, axis: int) -> int:
    """Number of a dim once that of a row is gone."""
    return dim - (dim > axis)


def reshape(node: fx.Node, axis: int, read: Read) -> Rows | None:
    """Only dims before that of a row change; dims of one may follow it."""
    source, shape = _source(node), _sizes(node)
    before, after = value_of(source).shape, value_of(node).shape
    inner = len(before) - 1
    while inner > 0 and same_size(before[inner], 1) and not same_size(before[inner], after[axis]):
        inner -= 1
    if not same_size(before[inner], after[axis]) or not all(same_size(s, 1) for s in after[axis + 1 :]):
        return None
    found = read(source, inner)
    del shape[axis]
    old, new = [s for i, s in enumerate(before) if i != inner], [s for i, s in enumerate(after) if i != axis]
    kept = 0
    while kept < min(len(old), len(new)) and same_size(old[-1 - kept], new[-1 - kept]):
        kept += 1
    return None if found is None else found.moved(node, lambda p: p.flattened(kept, shape))


def unsqueeze(node: fx.Node, axis: int, read: Read) -> Rows | None:
    dim: Any = node.args[1]
    if dim == axis:
        return None
    found = read(_source(node), _without(axis, dim))
    return None if found is None else found.moved(node, lambda p: p.unsqueezed(_without(dim, axis)))


def squeeze(node: fx.Node, axis: int, read: Read) -> Rows | None:
    dim: Any = node.args[1]
    if value_of(node).dim() == value_of(_source(node)).dim():
        return same(node, axis, read)
    inner = axis + (dim <= axis)
    return _plain(read, node, inner, aten.squeeze.dim, -1, _without(dim, inner))


def select(node: fx.Node, axis: int, read: Read) -> Rows | None:
    dim, index = node.args[1:3]
    inner = axis + (dim <= axis)  # type: ignore[operator]
    return _plain(read, node, inner, aten.select.int, -1, _without(dim, inner), index)  # type: ignore[arg-type]


def along(node: fx.Node, axis: int, read: Read) -> Rows | None:
    """Slices, and picks along a dim that is not a row's."""
    dim: Any = node.args[1]
    return None if dim == axis else _plain(read, node, axis, node.target, 0, _without(dim, axis), *node.args[2:])


def rows_picked(node: fx.Node, axis: int, read: Read) -> Rows | None:
    return None if axis == 0 else _plain(read, node, axis, ops.gather_rows.default, 0, node.args[1])


def _plain(read: Read, node: fx.Node, inner: int, target: Any, grown: int, *args: Any) -> Rows | None:
    found = read(_source(node), inner)
    return None if found is None else found.moved(node, lambda p: p.then(target, *args, rank=p.rank + grown))


def turn(node: fx.Node, axis: int, read: Read) -> Rows | None:
    order = _order(node)
    inner = order[axis]
    found = read(_source(node), inner)
    rest = [_without(d, inner) for d in order if d != inner]
    return None if found is None else found.moved(node, lambda p: p.permuted(rest))


def expand(node: fx.Node, axis: int, read: Read) -> Rows | None:
    sizes = _sizes(node)
    source = _source(node)
    inner = axis - (len(sizes) - value_of(source).dim())
    if inner < 0 or not same_size(value_of(source).shape[inner], value_of(node).shape[axis]):
        return None
    found = read(source, inner)
    shape = [s for i, s in enumerate(value_of(source).shape) if i != inner]
    del sizes[axis]
    ones = [True] * (len(sizes) - len(shape)) + [isinstance(s, int) and s == 1 for s in shape]
    return None if found is None else found.moved(node, lambda p: p.expanded(sizes, node, ones))


def cat(node: fx.Node, axis: int, read: Read) -> Rows | None:
    """Positives and negatives side by side."""
    a = arguments(node)
    dim = a["dim"]
    parts = [read(x, axis) for x in a["tensors"]] if dim != axis else [None]
    if any(p is None for p in parts):
        return None
    first, *others = [p for p in parts if p is not None]
    for other in others:
        if other.table != first.table or other.scale != first.scale or other.factors or other.learned:
            text = "rows that are scored together come from different tables, or are treated differently"
            raise Refused("rows-differ", text, node, "score them apart, and concatenate the scores")
    if first.factors or first.learned:
        raise Refused("rows-differ", "only some of the rows that are scored together have a factor", node)
    plans = [p.ids.real() for p in (first, *others)]
    build = lambda w: w.call(aten.cat.default, [p.build(w) for p in plans], _without(dim, axis))  # noqa: E731
    parts_nodes = tuple(n for p in (first, *others) for n in p.nodes)
    lookups = tuple(n for p in (first, *others) for n in p.lookups)
    return replace(
        first, ids=Plan(build, (None,) * first.ids.rank), lookups=lookups, nodes=(node, *dict.fromkeys(parts_nodes))
    )
