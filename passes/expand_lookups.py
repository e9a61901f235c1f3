"""Take lookups in sharded tables apart: who asks whom is found out before the step, rows travel inside of it.

Ids that follow from the batch are known before the step. So who asks whom (deduplication, owners, counts, the exchange
of ids) becomes inputs of the graph; in it are a gather of this rank's rows, one `all_to_all_single` with counts that
are inputs, and an ordinary embedding of the rows that came. All lookups of a step in one table share one exchange.
Other passes see collectives they know, and embeddings. A lookup whose ids are known only inside of the step stays as it
is, and is as right as before.

In a loop over `turbogr_compile.ahead`, ids of the next batch are exchanged during the step, which changes no result.
`expand-lookups{staleness=1}` fetches the rows of the next batch during the step too, and lets updates of rows run
beside the next one: rows have then missed one update, which changes results (docs/semi-async.md).

Ids that are drawn in the step are not known before it. `expand-lookups{draws=true}` has them drawn before, with the
seeds of `offload-sampling`: other numbers of the same distribution.

A table of one process whose gradients are rows has nobody to ask: its lookups become embeddings in `own_table`, whose
gradient row-gradients takes out of the backward graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import fx

from .. import _torch
from ..errors import PipelineError
from ..graph.nodes import PLACES_OF, TRAINABLE, is_collective, is_wait, tensor, written
from ..graph.phases import Phase, Role
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from ..runtime.prologue import ORIGINAL, Call, Provider, add_input, exchanging, reading, reads
from ..runtime.sharding.routing import Route, leave, route
from ..runtime.sharding.stale import NEVER, allowed, fetch
from ..runtime.sharding.table import Table, table_of
from ..runtime.worker import in_turn
from .common.cut import Cut, Part
from .common.draws import Held, is_draw
from .common.own import own_lookups, see_tables

aten, c10d, ops = torch.ops.aten, torch.ops._c10d_functional, torch.ops.turbogr
_HINT = "compute ids from the batch alone; expand-lookups{draws=true} draws those that are drawn before the step"
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


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

    ahead: bool = True  # exchange ids of the next batch during the step, in a loop over `ahead`
    staleness: int = 0  # updates that rows may have missed: 1 fetches them a step early, and changes results
    warmup: int = 0  # steps before which rows miss nothing, whatever `staleness` says
    draws: bool = False  # draw ids before the step, as `offload-sampling` does; the numbers are others

    def __post_init__(self) -> None:
        if self.staleness not in (0, 1) or self.warmup < 0:
            given = f"staleness={self.staleness}, warmup={self.warmup}"
            raise PipelineError(f"expand-lookups takes a staleness of 0 (exact) or 1, and a warmup from 0; got {given}")
        if self.staleness and not self.ahead:
            raise PipelineError("expand-lookups{staleness=1} fetches rows ahead: leave out ahead=false")

    def concerns(self, graph: fx.Graph) -> bool:
        return bool(_lookups(graph) or own_lookups(graph))

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        if see_tables(graph, ctx) and not _lookups(graph):
            return
        drawn = _draw_before(graph) if self.draws else []
        if drawn:
            text = (
                f"{', '.join(f'%{n}' for n in drawn)} of sharded lookups run before the step, from seeds of their own"
            )
            ctx.applied("drawn-before", text, _lookups(graph)[0])
        together, late = _by_table(graph)
        if not together and not late:
            ctx.missed("no-lookups", "no table of this graph is sharded", hint="turbogr_compile.shard(model, plan)")
        for node, why in late:
            ctx.missed("ids-known-late", f"%{node.name} is exchanged op by op in the step: {why}", node, _HINT)
        mode = Mode(self.ahead, self._bound(), self.warmup)
        for (number, shard, receipts), nodes in together.items():
            table = table_of(number)
            with ctx.rewrite("expand", *nodes):
                Expansion(graph, table, nodes, mode).apply(shard, receipts)
            ranks = table.layout.ranks
            text = f"{len(nodes)} lookups in {table.name!r} share one exchange of rows with {ranks} ranks"
            ctx.applied("expanded", text, nodes[0])
            if mode.bound:
                ctx.applied("stale-rows", _stale_text(table, self.warmup), nodes[0])
        self._expand_original(graph, mode)

    def _bound(self) -> int:
        """Nothing is stale where nothing is trained."""
        return self.staleness if torch.is_grad_enabled() else 0

    def _expand_original(self, graph: fx.Graph, mode: Mode) -> None:
        """A batch that a provider refuses on one rank must meet the others' exchanges all the same."""
        original = graph.owning_module.meta.get(ORIGINAL) if graph.owning_module is not None else None
        if original is not None:
            original.owning_module = graph.owning_module
            if self.draws:
                _draw_before(original)
            for (number, shard, receipts), nodes in _by_table(original)[0].items():
                Expansion(original, table_of(number), nodes, mode).apply(shard, receipts)


def _stale_text(table: Table, warmup: int) -> str:
    after = f" after {warmup} steps" if warmup else ""
    return (
        f"semi-async: in a loop over `ahead`, rows of {table.name!r} have missed the last update{after}, and results "
        "differ from those of synchronous training"
    )


def _draw_before(graph: fx.Graph) -> list[str]:
    """Draws that ids of lookups follow from become inputs; their names. What else is made of them stays in the step."""
    held, needed = Held(graph), _Needed(graph, [n.args[2] for n in _lookups(graph)]).needed
    draws = [n for n in graph.nodes if n in needed and n.op == "call_function" and is_draw(n) and n not in held]
    names = [n.name for n in draws]
    if draws:
        Cut(graph, draws, set(graph.nodes)).apply()
    return names


def _lookups(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=ops.sharded_lookup.default))


def _by_table(graph: fx.Graph) -> tuple[dict[Any, list[fx.Node]], list[tuple[fx.Node, str]]]:
    """Lookups that can be taken apart, those of a table together; and those that cannot, with the reason."""
    together: dict[Any, list[fx.Node]] = {}
    late: list[tuple[fx.Node, str]] = []
    lookups = _lookups(graph)
    obstacles = Obstacles(graph) if lookups else None
    for node in lookups:
        assert obstacles is not None
        shard, receipts, ids, number = node.args
        why = obstacles.of(ids)
        if why:
            late.append((node, why))
        else:
            together.setdefault((number, shard, receipts), []).append(node)
    return together, late


class Mode(NamedTuple):
    """What may run ahead of its step."""

    ahead: bool
    bound: int  # updates that rows may have missed; 0 fetches them inside of the graph
    warmup: int


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

    def __init__(self, graph: fx.Graph, table: Table, nodes: Sequence[fx.Node], how: Mode) -> None:
        self.graph, self.table, self.nodes, self.how = graph, table, nodes, how
        self.routing = Routing(table, Part(_Needed(graph, [n.args[2] for n in nodes])), how)  # type: ignore[arg-type]
        mode = _torch.fake_mode_of(graph)
        assert mode is not None
        self.mode = mode

    def apply(self, shard: fx.Node, receipts: fx.Node) -> None:
        sent, received = self._counts("sent", 2), self._counts("received", 3)
        with self.mode:
            total = sum(n.meta["val"] for n in sent)
            fake = torch.empty(total, dtype=torch.int64, device=shard.meta["val"].device)
        asked = self._input("asked", fake, 0, 0)
        fetched = self._fetched(shard, received) if self.how.bound else None
        with self.graph.inserting_before(self.nodes[0]):
            if fetched is None:
                got = self._rows(shard, receipts, asked, received, sent)
            else:
                given = (shard, receipts, *fetched, asked, sent, received)
                settings = (self.table.number, self.how.bound, self.how.warmup)
                got = self.graph.call_function(ops.stale_rows.default, (*given, *settings))
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

    def _fetched(self, shard: fx.Node, received: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node]:
        """Rows, and how many updates they have seen."""
        value = shard.meta["val"]
        with self.mode:
            total = sum(n.meta["val"] for n in received)
            rows = torch.empty((total, value.shape[1]), dtype=value.dtype, device=value.device)
            version = torch.empty((), dtype=torch.int64, device="cpu")
        return self._input("rows", rows, 1), self._input("version", version, 2)

    def _counts(self, what: str, part: int) -> list[fx.Node]:
        return [
            self._input(f"{what}_{rank}", _torch.new_row_count(self.mode, None, 0), 0, part, rank)
            for rank in range(self.table.layout.ranks)
        ]

    def _place(self, i: int, node: fx.Node) -> fx.Node:
        ids, pieces = node.args[2].meta["val"], self.table.layout.pieces  # type: ignore[union-attr]
        shape = (*ids.shape, pieces) if pieces > 1 else ids.shape
        with self.mode:
            fake = torch.empty(shape, dtype=torch.int64, device=ids.device)
        place = self._input(f"place_{i}", fake, 0, 1, i)
        place.meta[PLACES_OF] = node.args[2]
        return place

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


class Found(NamedTuple):
    """What a call gets."""

    route: Route
    rows: torch.Tensor | None = None
    version: torch.Tensor | None = None


class Begun(NamedTuple):
    """What is known of an exchange when it is put on the line: the same on all ranks."""

    turn: int  # lookups that will have run before the one it is for
    fetch: bool  # rows too


class Routing:
    """Finds out who asks whom, once per call; all ranks at the same time, ahead of the call or in it."""

    def __init__(self, table: Table, ids: Part, how: Mode) -> None:
        self.table, self.ids, self.how = table, ids, how

    def provider(self, path: Sequence[int]) -> Provider:
        def provide(call: Call) -> Any:
            found: Any = call.once(self, lambda: self.run(call))
            for i in path:
                found = found[i]
            return found

        own = {s for s in self.ids.sources if isinstance(s, int)}
        others = reads(s for s in self.ids.sources if not isinstance(s, int))
        if self.how.ahead and others is not None:
            reading(provide, own | others)
        return exchanging(provide, self)

    @property
    def place(self) -> Table:
        return self.table

    def begin(self, call: Call) -> None:
        """Rows are fetched too if they may be used after one more update."""
        early = allowed(self.table, self.how.bound, self.how.warmup, 1) > 0
        call.once((self, "begun"), lambda: Begun(self.table.calls + 1, early))

    def leave(self, during: bool) -> Any:
        return partial(leave, self.table, self.table.ahead, self.table.calls + during)

    def run(self, call: Call) -> Found:
        ids = self.ids.run(call)
        begun = call.once((self, "begun"), lambda: Begun(self.table.calls, False))
        found = self._of_kin(call, ids) or in_turn(self._exchange, ids, begun)
        call.once((self, "ids"), lambda: ids)
        return found

    def _exchange(self, ids: Sequence[torch.Tensor], begun: Begun) -> Found:
        table = self.table
        way = route(table, ids, table.ahead, begun.turn)
        if not self.how.bound:
            return Found(way)
        shard = table.shard
        if not begun.fetch:
            rows, version = shard.new_empty((sum(way.received), shard.shape[1])), NEVER
        else:
            rows, version = fetch(table, way.asked, way.sent, way.received)
            table.handed = way.asked
        return Found(way, rows, torch.tensor(version))

    def _of_kin(self, call: Call, ids: Sequence[torch.Tensor]) -> Found | None:
        """What was exchanged for the same ids when this code was compiled otherwise."""
        for old in call.kin:
            made = old.made()
            for key, found in made.items():
                if isinstance(key, Routing) and key.table is self.table and key.how == self.how:
                    before = made.get((key, "ids"), ())
                    if len(before) == len(ids) and all(map(torch.equal, before, ids)):
                        return found
        return None
