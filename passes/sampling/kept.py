"""Copies of tables in FP16 that stay from step to step, where a table says which of its rows were changed."""

from __future__ import annotations

import torch
from torch import fx

from ... import _torch
from ...runtime.prologue import add_input, reading
from ...runtime.sharding.table import Table as Owner
from ...runtime.sharding.table import table_of
from ..common.cross_entropy import value_of
from .plans import Writer

ops = torch.ops.turbogr
NAME = "turbogr_half_of"  # in the meta of an added input: the number of its table


def keeps_copy(table: fx.Node) -> bool:
    """A table of one process whose optimizer names the rows that it changes."""
    return table.target is ops.own_table.default


def kept_copy(w: Writer, table: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The copy, which is an input, and the scales of its blocks: asking for them brings the copy up to date."""
    weight, _, number = table.args
    half = _input(w.graph, table, table_of(number))  # type: ignore[arg-type]
    return half, w.call(ops.half_of_table.default, weight, half, number)


def _input(graph: fx.Graph, table: fx.Node, owner: Owner) -> fx.Node:
    """One for each table, the same in all calls: so it can be told ahead of them."""
    for node in graph.find_nodes(op="placeholder"):
        if node.meta.get(NAME) == owner.number:
            return node
    value, mode = value_of(table), _torch.fake_mode_of(graph)
    assert mode is not None
    with mode:
        fake = torch.empty(value.shape, dtype=torch.float16, device=value.device)
    node = add_input(graph, f"{owner.name.replace('.', '_')}_half", fake, reading(lambda call: owner.home().halves()))
    node.meta[NAME] = owner.number
    return node
