"""Collectives as torchair and GE take them: one tensor each, sums for averages, counts and places in elements.

GE's all-to-all wants, for each rank, how many elements go there and where they begin. torchair computes that while
autograd is traced, with questions about sizes that have no answer for rows that the run counts, and leaves behind an
op that only an NPU can run. Here `all_to_all_single` stays itself until the graph is converted.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ... import _torch

aten, functional = torch.ops.aten, torch.ops._c10d_functional
ALL_TO_ALL = functional.all_to_all_single.default


def collectives() -> dict[Any, Callable[..., Any]]:
    """Decompositions for AOTAutograd."""
    return {
        ALL_TO_ALL: lambda *arguments: NotImplemented,  # in place of torchair's
        functional.all_reduce.default: _all_reduce,
        functional.reduce_scatter_tensor.default: _reduce_scatter,
        functional.all_reduce_coalesced.default: _each(functional.all_reduce.default),
        functional.all_gather_into_tensor_coalesced.default: _each(functional.all_gather_into_tensor.default),
        functional.reduce_scatter_tensor_coalesced.default: _each(functional.reduce_scatter_tensor.default),
    }


def _each(one: Any) -> Callable[..., list[Tensor]]:
    def several(inputs: Sequence[Tensor], *settings: Any) -> list[Tensor]:
        return [one(x, *settings) for x in inputs]

    return several


def _all_reduce(x: Tensor, reduce_op: str, group: Any) -> Any:
    if reduce_op != "avg":
        return NotImplemented
    return functional.all_reduce(x / len(_ranks(group)), "sum", group)


def _reduce_scatter(x: Tensor, reduce_op: str, size: int, group: Any) -> Any:
    return functional.reduce_scatter_tensor(x / size, "sum", size, group) if reduce_op == "avg" else NotImplemented


def spell_exchanges(graph: fx.Graph) -> None:
    """`all_to_all_single` by rows becomes torchair's own op, by elements."""
    for node in graph.find_nodes(op="call_function", target=ALL_TO_ALL):
        x, received, sent, group = node.args
        ranks = _ranks(group)
        with graph.inserting_before(node):
            width = _product([size_node(graph, x, dim) for dim in range(1, x.meta["val"].dim())])
            send, receive = (_counts(graph, x, rows, width, len(ranks)) for rows in (sent, received))
            arguments = (x, send, _starts(send), receive, _starts(receive), _torch.group_tag(group), ranks, len(ranks))
            new = graph.call_function(torch.ops.npu_define.all_to_all_single_npu.default, arguments)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def run_without_npu() -> None:
    """torchair's op, where it stays out of a GE graph, on a CPU; torchair brings it for the NPU only."""
    torch.library.impl("npu_define::all_to_all_single_npu", "CPU", _all_to_all)


def _all_to_all(
    x: Tensor, send: Sequence[int], _: Any, receive: Sequence[int], __: Any, tag: str, ranks: list[int], size: int
) -> Tensor:
    width = max(torch.Size(x.shape[1:]).numel(), 1)
    rows, sent = ([count // width for count in counts] for counts in (receive, send))
    received = x.new_empty([sum(rows), *x.shape[1:]])
    torch.distributed.all_to_all_single(received, x.contiguous(), rows, sent, group=_torch.group_of(tag, ranks))
    return received


def size_node(graph: fx.Graph, x: fx.Node, dim: int) -> Any:
    """A number where the size is known, else the node that computes it."""
    known = x.meta["val"].shape[dim]
    return known if isinstance(known, int) else graph.call_function(aten.sym_size.int, (x, dim))


def _counts(graph: fx.Graph, x: fx.Node, rows: Sequence[Any], width: Any, ranks: int) -> list[Any]:
    return [_times(count, width) for count in rows or [_over(size_node(graph, x, 0), ranks)] * ranks]


def _starts(counts: Sequence[Any]) -> list[Any]:
    return [0, *itertools.accumulate(counts[:-1], _plus)]


def _arithmetic(function: Any) -> Callable[[Any, Any], Any]:
    """Of sizes: now where they are known, else in the graph."""

    def apply(a: Any, b: Any) -> Any:
        if function is not operator.add and b == 1:
            return a
        node = next((n for n in (a, b) if isinstance(n, fx.Node)), None)
        return function(a, b) if node is None else node.graph.call_function(function, (a, b))

    return apply


_times, _over, _plus = map(_arithmetic, (operator.mul, operator.floordiv, operator.add))


def _product(sizes: Sequence[Any]) -> Any:
    return functools.reduce(_times, sizes) if sizes else 1


def _ranks(group: Any) -> list[int]:
    return torch.distributed.get_process_group_ranks(_torch.process_group(group))
