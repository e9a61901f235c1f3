"""What looked-up rows may be multiplied by: numbers, learned temperatures, a factor for each row, one over the norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...graph.nodes import tensor
from ...graph.shapes import same_shape, same_size
from ..common.cross_entropy import Refused, value_of
from .norms import normalised, number_of
from .plans import Plan
from .tables import Read, Rows

aten = torch.ops.aten
_NORMALISE = "F.normalize(rows, dim=-1, eps=...) is what the kernel does"


def multiply(node: fx.Node, axis: int, read: Read) -> Rows | None:
    """By numbers, learned temperatures, one factor for each row, or one over the norm."""
    for x, by in ((node.args[0], node.args[1]), (node.args[1], node.args[0])):
        if tensor(x) is None or not same_shape(value_of(x).shape, value_of(node).shape):
            continue
        if tensor(by) is not None and not _is_factor(by, node, axis):
            continue
        number = number_of(by)
        if number is None and tensor(by) is None:
            continue
        found = read(x, axis)  # type: ignore[arg-type]
        if found is not None:
            return _by_norm(node, axis, read) or _scaled(found, node, by, number, axis)
    return _by_norm(node, axis, read)


def divide(node: fx.Node, axis: int, read: Read) -> Rows | None:
    x, by = node.args[:2]
    number = number_of(by)
    if number is not None and number != 0:
        found = read(x, axis)  # type: ignore[arg-type]
        return None if found is None else replace(found.passed(node), scale=found.scale / number)
    by_norm = _by_norm(node, axis, read)
    if by_norm is not None or not isinstance(x, fx.Node):
        return by_norm
    found = read(x, axis)
    if found is None:
        return None
    text = "rows are divided by something else than max(norm, eps)"
    raise Refused("rows-changed", text, node, _NORMALISE)


def _by_norm(node: fx.Node, axis: int, read: Read) -> Rows | None:
    norm = normalised(node, axis)
    if norm is None:
        return None
    x, eps, nodes = norm
    found = read(x, axis)
    if found is None:
        return None
    if found.table.eps >= 0 or found.factors or found.learned or found.scale != 1.0:
        raise Refused("rows-changed", "rows are scaled, and normalised afterwards", node, "normalise them first")
    return replace(found.passed(*nodes), table=replace(found.table, eps=eps))


def _is_factor(by: Any, node: fx.Node, axis: int) -> bool:
    """One number for all entries of a row."""
    value = value_of(by)
    at = value.dim() - (value_of(node).dim() - axis)
    return value.dim() == 0 or at < 0 or same_size(value.shape[at], 1)


def _comes_from(node: fx.Node, sources: set[fx.Node], depth: int) -> bool:
    return node in sources or (depth > 0 and any(_comes_from(n, sources, depth - 1) for n in node.all_input_nodes))


def _scaled(found: Rows, node: fx.Node, by: Any, number: float | None, axis: int) -> Rows | None:
    found = found.passed(node)
    if number is not None:
        return replace(found, scale=found.scale * number)
    value = value_of(by)
    if value.dim() == 0 and value.is_floating_point():
        return replace(found, learned=(*found.learned, by))
    shape, wanted = list(value.shape), list(value_of(node).shape)
    if len(shape) == len(wanted):
        del shape[axis], wanted[axis]
    if not same_shape(shape, wanted):
        raise Refused("rows-changed", "rows are multiplied by a factor that some of them share", node)
    if _comes_from(by, set(found.nodes), 6):
        text = "rows are multiplied by a factor computed from them, which is not 1 / max(norm, eps)"
        raise Refused("rows-changed", text, node, _NORMALISE)
    plain = Plan(lambda w: w.call(aten.squeeze.dim, by, axis), (None,) * found.ids.rank)
    return replace(found, factors=(*found.factors, plain))
