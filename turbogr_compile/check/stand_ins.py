"""Local stand-ins for what a graph does together with other ranks, so that one rank can try its graph alone.

A collective, or a lookup in a sharded table, becomes the same function of its inputs in the captured and in the
rewritten graph. No rank communicates while it compares, so none waits for another that does not. The stand-ins work row
by row as the real ones do, as if all ranks had this rank's data; a rewrite that looks up fewer rows gets the same ones.

An op that is neither torch's own nor ours may do anything, and would do it more often than the program says. It has no
stand-in: who declares that it only computes (`only_computes`) has its graphs compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ..capture.functions import COMPUTES
from ..graph.nodes import is_collective, is_wait
from ..runtime.sharding.table import table_of

_OWN = {
    "aten",
    "prims",
    "prim",
    "turbogr",
    "torchvision",
    "fbgemm",
    "_c10d_functional",
    "_c10d_functional_autograd",
    COMPUTES,
}
_PURE: set[str] = set()
_ALIKE = 2  # how many ranks a sum runs over; any number does, in both graphs


def only_computes(*names: str) -> None:
    """Say that users' ops ('shop::center') do nothing but compute their results, and may run more often than once."""
    _PURE.update(names)


def may_act(node: fx.Node) -> bool:
    """Is it a user's op, of which nobody said that it only computes?"""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in _OWN:
        return False
    return target._schema.name not in _PURE and torch.Tag.pointwise not in target.tags


def reaches_others(node: fx.Node) -> bool:
    """Would other ranks notice a second run, or tables that keep a journal of their lookups?"""
    return is_collective(node) or str(node.target).startswith(
        ("turbogr.sharded", "turbogr.stale", "turbogr.fetch_rows")
    )


def without_stand_in(graph: fx.Graph) -> fx.Node | None:
    """The first node that reaches others and that nothing stands in for."""
    return next((n for n in graph.nodes if reaches_others(n) and _stand_in(n) is None), None)


def local(graph: fx.Graph) -> fx.Graph:
    """The graph, changed in place, with stand-ins."""
    for node in graph.nodes:
        if stand_in := _stand_in(node):
            node.target = stand_in
    return graph


def groups(graph: fx.Graph) -> Iterator[str]:
    """Names of the groups whose ranks share tables of the graph."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.turbogr.sharded_lookup.default):
        yield table_of(node.args[3]).group.group_name


def _stand_in(node: fx.Node) -> Callable[..., Any] | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if node.target is torch.ops.turbogr.sharded_lookup.default:
        return _lookup
    name = node.target.overloadpacket.__name__
    return _COLLECTIVES.get(name) if is_collective(node) or is_wait(node) else None


def _reduced(x: Tensor, op: str) -> Tensor:
    return x * _ALIKE if op == "sum" else x.clone()


def _all_reduce(x: Tensor, op: str, group: Any) -> Tensor:
    return _reduced(x, op)


def _all_gather(x: Tensor, ranks: int, group: Any) -> Tensor:
    return torch.cat([x] * ranks)


def _reduce_scatter(x: Tensor, op: str, ranks: int, group: Any) -> Tensor:
    return _reduced(x[: x.shape[0] // ranks], op)


def _all_to_all(x: Tensor, receive: list[int], send: list[int], group: Any) -> Tensor:
    """As many rows as come, which only the real exchange knows: those that are sent, over and over."""
    rows = sum(receive) if receive else x.shape[0]
    if not x.shape[0]:
        return x.new_zeros((rows, *x.shape[1:]))
    return x[torch.arange(rows, device=x.device) % x.shape[0]]


def _broadcast(x: Tensor, source: int, group: Any) -> Tensor:
    return x.clone()


def _coalesced(one: Callable[..., Tensor]) -> Callable[..., list[Tensor]]:
    return lambda xs, *settings: [one(x, *settings) for x in xs]


def _wait(x: Tensor) -> Tensor:
    return x


_COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "all_reduce_coalesced": _coalesced(_all_reduce),
    "all_gather_into_tensor_coalesced": _coalesced(_all_gather),
    "reduce_scatter_tensor_coalesced": _coalesced(_reduce_scatter),
    "wait_tensor": _wait,
}


def _lookup(shard: Tensor, receipts: Tensor, ids: Tensor, table: int) -> Tensor:
    """Rows that depend on the id alone, and gradients that differ wherever one of a row does."""
    numbers = torch.arange(1, table_of(table).layout.width + 1, dtype=torch.float64, device=ids.device)
    row = torch.sin(ids.double()[..., None] * 0.7 + numbers * 1.3 + table).to(shard.dtype)
    slot = (receipts - receipts.detach()).to(shard.dtype)[ids % receipts.shape[0]]
    return row + torch.cos(ids.double()[..., None] + numbers).to(shard.dtype) * slot[..., None]
