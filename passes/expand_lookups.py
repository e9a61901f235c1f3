"""Take lookups in sharded tables apart: who asks whom is found out before the step, rows travel inside of it.

    torch.compile(model, backend="turbogr", options={"passes": ["expand-lookups"]})

Ids that follow from the batch are known before the step. So who asks whom (deduplication, owners, counts, the exchange
of ids) becomes inputs of the graph; in it are a gather of this rank's rows, one `all_to_all_single` with counts that
are inputs, and an ordinary embedding of the rows that came. All lookups of a step in one table share one exchange.
Other passes see collectives they know, and embeddings. A lookup whose ids are known only inside of the step stays as it
is, and is as right as before.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..catalogue import register
from ..context import Context
from ..graphs import TRAINABLE, is_collective, is_wait, tensor, written
from ..pass_base import Pass, Phase, Role
from ..prologue import Call, Provider, add_input, reading, reads
from ..runtime.sharding.routing import Route, route
from ..runtime.sharding.table import Table, table_of
from ._cut import Part

aten, c10d, ops = torch.ops.aten, torch.ops._c10d_functional, torch.ops.turbogr
_HINT = "compute ids from the batch alone, or look rows up outside of the compiled step"
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
_WORKER = "turbogr-ahead"  # threads of runtime/ahead.py


@register
@dataclass(frozen=True)
class ExpandLookups(Pass):
    """Take lookups in sharded tables apart: who asks whom is found out before the step, rows travel inside of it."""

    name = "expand-lookups"
    phase = Phase.PRE_GRAD
    after = ("remove-noops", "fold-views", "pack-rows")
    before = (
        "fold-masks", "eliminate-common", "simplify-masks", "recognize-activations", "fuse-sampling", "fuse-loss",
        "fuse-silu-split", "fuse-norm-gate", "fuse-embedding", "offload-sampling", "narrow-attention",
        "eliminate-dead-code",
    )  # fmt: skip
    roles = frozenset({Role.CAPTURED})

    # Let a loop over `ahead` exchange ids of the next batch during the step. All ranks must run their loops to the end
    # of the data: a rank that leaves one early may not take part in an exchange that another one has begun.
    ahead: bool = False

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        lookups = graph.find_nodes(op="call_function", target=ops.sharded_lookup.default)
        if not lookups:
            ctx.missed("no-lookups", "no table of this graph is sharded", hint="turbogr_compile.shard(model, plan)")
            return
        obstacles = Obstacles(graph)
        together: dict[Any, list[fx.Node]] = {}
        for node in lookups:
            shard, receipts, ids, number = node.args
            why = obstacles.of(ids)
            if why:
                ctx.missed("ids-known-late", f"%{node.name} is exchanged op by op in the step: {why}", node, _HINT)
            else:
                together.setdefault((number, shard, receipts), []).append(node)
        for (number, shard, receipts), nodes in together.items():
            table = table_of(number)
            with ctx.rewrite("expand", *nodes):
                Expansion(graph, table, nodes, self.ahead).apply(shard, receipts)
            ranks = table.layout.ranks
            text = f"{len(nodes)} lookups in {table.name!r} share one exchange of rows with {ranks} ranks"
            ctx.applied("expanded", text, nodes[0])


class Obstacles:
    """What keeps ids from being known before the step, in words."""

    def __init__(self, graph: fx.Graph) -> None:
        self._why: dict[fx.Node, str] = {}
        changing = written(graph)
        for node in graph.nodes:
            inherited = (self._why[a] for a in node.all_input_nodes if a in self._why)
            found = _own(node, changing) or next(inherited, "")
            if found:
                self._why[node] = found

    def of(self, ids: Any) -> str:
        return self._why.get(ids, "")


def _own(node: fx.Node, changing: set[fx.Node]) -> str:
    if node.op in ("placeholder", "get_attr"):
        value = tensor(node)
        if node.meta.get(TRAINABLE) or (value is not None and value.requires_grad):
            return f"its ids depend on %{node.name}, which is trained"
        return f"its ids depend on %{node.name}, which the step writes to" if node in changing else ""
    if node.op != "call_function":
        return ""
    if not isinstance(node.target, torch._ops.OpOverload):
        plain = node.target is operator.getitem or isinstance(node.meta.get("val"), _SYMBOLIC)
        return "" if plain else "its ids depend on a mode of the step"
    if _torch.is_random(node):
        return f"its ids depend on %{node.name}, which is drawn in the step"
    if is_collective(node) or is_wait(node):
        return f"its ids depend on %{node.name}, an exchange with other ranks"
    return "" if _torch.is_functional(node) else f"its ids depend on %{node.name}, which writes"


class Expansion:
    """Lookups in one table, with one exchange for all."""

    def __init__(self, graph: fx.Graph, table: Table, nodes: Sequence[fx.Node], ahead: bool) -> None:
        self.graph, self.table, self.nodes = graph, table, nodes
        self.routing = Routing(table, Part(_Needed(graph, [n.args[2] for n in nodes])), ahead)  # type: ignore[arg-type]
        mode = _torch.fake_mode_of(graph)
        assert mode is not None
        self.mode = mode

    def apply(self, shard: fx.Node, receipts: fx.Node) -> None:
        sent, received = self._counts("sent", 2), self._counts("received", 3)
        with self.mode:
            total = sum(n.meta["val"] for n in sent)
            fake = torch.empty(total, dtype=torch.int64, device=shard.meta["val"].device)
        asked = self._input("asked", fake, 0)
        with self.graph.inserting_before(self.nodes[0]):
            got = self._rows(shard, receipts, asked, received, sent)
        for i, node in enumerate(self.nodes):
            place = self._place(i, node)
            with self.graph.inserting_before(node):
                found = self._looked_up(got, place, node)
            node.replace_all_uses_with(found)
            self.graph.erase_node(node)

    def _rows(self, shard: fx.Node, receipts: fx.Node, asked: fx.Node, received: Any, sent: Any) -> fx.Node:
        """Rows of this rank go to who asked, and those that it asked for come."""
        call, wire = self.graph.call_function, self.table.wire
        mine = call(ops.fetch_rows.default, (shard, receipts, asked, self.table.number))
        if wire is not None:
            mine = call(aten.to.dtype, (mine, wire))
        started = call(c10d.all_to_all_single.default, (mine, received, sent, self.table.group.group_name))
        got = call(c10d.wait_tensor.default, (started,))
        return got if wire is None else call(aten.to.dtype, (got, shard.meta["val"].dtype))

    def _looked_up(self, got: fx.Node, place: fx.Node, node: fx.Node) -> fx.Node:
        call, layout = self.graph.call_function, self.table.layout
        found = call(aten.embedding.default, (got, place))
        if layout.pieces == 1:
            return found
        dims = len(node.meta["val"].shape)
        whole = call(aten.flatten.using_ints, (found, dims - 1, dims))
        return call(aten.slice.Tensor, (whole, dims - 1, 0, layout.width))

    # --- inputs ------------------------------------------------------------------------------------

    def _counts(self, what: str, part: int) -> list[fx.Node]:
        return [
            self._input(f"{what}_{rank}", _torch.new_row_count(self.mode, None, 0), part, rank)
            for rank in range(self.table.layout.ranks)
        ]

    def _place(self, i: int, node: fx.Node) -> fx.Node:
        ids, pieces = node.args[2].meta["val"], self.table.layout.pieces  # type: ignore[union-attr]
        shape = (*ids.shape, pieces) if pieces > 1 else ids.shape
        with self.mode:
            fake = torch.empty(shape, dtype=torch.int64, device=ids.device)
        return self._input(f"place_{i}", fake, 1, i)

    def _input(self, what: str, fake: Any, *path: int) -> fx.Node:
        name = self.table.name.replace(".", "_")
        return add_input(self.graph, f"{name}_{what}", fake, self.routing.provider(path))


@dataclass
class _Needed:
    """Everything that ids follow from, as `Part` reads a cut."""

    graph: fx.Graph
    results: list[Any]
    moved: list[fx.Node] = field(default_factory=list)

    @property
    def needed(self) -> set[fx.Node]:
        found, todo = set(), list(self.results)
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += node.all_input_nodes
        return found


class Routing:
    """Finds out who asks whom, once per call."""

    def __init__(self, table: Table, ids: Part, ahead: bool) -> None:
        self.table, self.ids, self.ahead = table, ids, ahead

    def provider(self, path: Sequence[int]) -> Provider:
        def provide(call: Call) -> Any:
            found: Any = call.once(self, lambda: self.run(call))
            for i in path:
                found = found[i]
            return found

        own = {s for s in self.ids.sources if isinstance(s, int)}
        others = reads(s for s in self.ids.sources if not isinstance(s, int))
        if self.ahead and others is not None:
            reading(provide, own | others)
        return provide

    def run(self, call: Call) -> Route:
        beside = threading.current_thread().name.startswith(_WORKER)
        return route(self.table, self.ids.run(call), self.table.ahead if beside else None)
