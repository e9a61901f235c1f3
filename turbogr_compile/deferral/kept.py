"""Rows that a step has computed anyway serve who reads them after it.

A model whose rows are read late (a metric after the step) has the rows of the next steps kept. A later read is compiled
as a function of these, and looks up the rows that it needs: if one of them is not there, the model runs for it, as it
would have without. What is read so has no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..check.comparison import agree
from ..kernels.kept import RowsMissing
from ..pipeline.remarks import warn
from . import liveness
from .record import Kept, Node, Source, Value, above
from .step import Plan

_KINDS: dict[Any, object] = {}  # of calls that differ only in who their tensors are


def leaves_of(chosen: Sequence[Value], nodes: Sequence[Node], depending: Sequence[Value]) -> list[Value]:
    """Outputs, among those that a step reads, that somebody may read after it."""
    keeping = [n for n in nodes if n.model is not None and n.model.keeping and not n.model.once]
    if not keeping:
        return []
    for n in keeping:
        n.model.keeping -= 1
    orders, mine = {n.order for n in keeping}, {id(v) for v in chosen}
    late = liveness.may_be_read([v for v in depending if v.waits and v.meta.shape and id(v) not in mine])
    asked = [*late, *(v for n in above(late) for v in n.inputs)]
    read = {id(v) for n in nodes for v in n.inputs}
    found = {
        id(v): v for v in asked
        if v.waits and v.node.order in orders and id(v) in read and id(v) not in mine and _has_rows(v)
    }  # fmt: skip
    return list(found.values())


def _has_rows(value: Value) -> bool:
    return len(value.meta.shape) > 1 and value.meta.dtype.is_floating_point


def keep(leaves: Sequence[Value], results: Sequence[torch.Tensor]) -> None:
    """Rows of these, and where they are, as the step returned them."""
    for value, rows, where in zip(leaves, results[::2], results[1::2], strict=True):
        made_by = value.node
        given = Kept((), {}, Source)
        node = Node(torch.ops.turbogr.left_rows.default, given, made_by.modes, made_by.line)
        node.sources = [Source(rows.detach(), waits=False), Source(where, waits=False)]
        node.args = tuple(node.sources)
        node.order = made_by.order + (1 + value.index) / 4096  # where the model's call is in the record
        node.sizes = (*made_by.sizes, rows.shape[0])
        shapes = rows.shape, where.shape, rows.dtype
        if len(_KINDS) > 4096:
            _KINDS.clear()
        node.kind = _KINDS.setdefault(shapes, object())
        node.values.append(Value(node, -1, value.meta))
        value.kept = node


def computed(values: Sequence[Value], recompute: Callable[[Sequence[Value]], list[Any]]) -> list[Any] | None:
    """The values without gradients, from rows that were kept; None where these are not enough."""
    outputs = _outputs_above(values)
    if not outputs:
        return None
    models = list({id(v.node.model): v.node.model for v in outputs}.values())
    programs = models[0].programs
    try:
        with _made_from_kept(outputs):
            plan = Plan(values)
            results = programs.run(plan)
    except Exception as error:  # the model runs; where the error is user code's, it comes again
        for v in outputs:
            v.kept = None
        for model in models:
            model.read_kept(enough=not isinstance(error, RowsMissing))
        return None
    for model in models:
        model.read_kept(enough=True)
        model.read_late()
    program, _ = programs.exact.get(plan.exact, (None, ()))  # which forgets
    if program is not None and program.trusted:
        return results
    expected = recompute(values)
    same = all(agree(a.detach(), b.detach()) for a, b in zip(expected, results, strict=True))
    if program is not None:
        program.trusted = same
    if not same:
        for model in models:
            model.keeps, model.keeping = False, 0
        warn("a value from rows that were kept is not that of the model: rows of this model are no longer kept")
    return expected


def _outputs_above(values: Sequence[Value]) -> list[Value]:
    """Outputs of models that these are computed from, if rows of all of them were kept; else none."""
    found: dict[int, Value] = {}
    todo, seen = list(values), {id(v) for v in values}
    while todo:
        value = todo.pop()
        node = value.maker
        if node is None:
            continue
        if node.model is not None:
            if value.kept is None:
                return []
            found[id(value)] = value
            continue
        for v in node.inputs:
            if id(v) not in seen:
                seen.add(id(v))
                todo.append(v)
    return list(found.values())


@contextmanager
def _made_from_kept(outputs: Sequence[Value]) -> Iterator[None]:
    """In a plan made here, these are made from rows that were kept."""
    before = [(v, v.maker, v.index) for v in outputs]
    try:
        for v in outputs:
            v.maker, v.index = v.kept, -1
        yield
    finally:
        for v, maker, index in before:
            v.maker, v.index = maker, index
