"""Compute only the rows of padded batches that can influence a result."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..errors import PipelineError, VerifyError
from ..graph.costs import PAIRS, SEEN, human
from ..graph.nodes import TRAINABLE, tensor
from ..graph.phases import Phase, Role
from ..graph.provenance import Origin, inherit
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from ..runtime.prologue import KEY as PROVIDER
from ..runtime.prologue import InputRows, Unprovable, keep_original, keep_rows
from .rows.analysis import RowAnalysis, analyse, asked_again
from .rows.apart import Apart, is_gain, take_apart, take_apart_at_ends
from .rows.calls import arg, op, rank_of
from .rows.deciding import OnRows
from .rows.emit import Emitter, RuleFailed
from .rows.emit.ties import Reach, outputs_of, reach, tie
from .rows.grouped import take_apart_sorted
from .rows.installed import ROW_OPS
from .rows.paying import counts
from .rows.picked import take_apart_picked
from .rows.program import Program, Rows, RowSet
from .rows.report import analysis_text
from .rows.sparse_products import take_apart_sparse_products

aten = torch.ops.aten
DROPOUT = ("packed", "padded")
MOST_BARRIERS = 20  # rules that may fail before the pass does
REPORT = "this is a fault of turbogr: please report it, with the line of your model"


@register
@dataclass(frozen=True)
class PackRows(Pass):
    """Compute only the rows of padded batches that can influence a result."""

    name = "pack-rows"
    phase = Phase.PRE_GRAD
    after = ("remove-noops", "fold-views")
    before = ("fold-masks", "eliminate-common", "simplify-masks", "recognize-activations")
    roles = frozenset({Role.CAPTURED})
    adds_guards = True  # sizes of two inputs that were equal in the call seen are taken to be equal

    dropout: str = "packed"  # or 'padded': draw dropout masks as eager does, for every padded element

    def __post_init__(self) -> None:
        if self.dropout not in DROPOUT:
            raise PipelineError(f"pass 'pack-rows' option 'dropout' takes {' or '.join(DROPOUT)}, got {self.dropout!r}")

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        for trouble in ROW_OPS.troubles():
            ctx.missed("row-ops-unusable", trouble)
        _see_through_offsets(graph, ctx)
        _fill_by_mask(graph, ctx)
        _one_result_of_layer_norm(graph, ctx)
        _whole_jagged_ops(graph, ctx)
        found, pays = self._taken_apart(graph, ctx)
        emitter = self._pack(graph, ctx, found) if pays else self._emitter(graph, ctx, found)
        for miss in emitter.an.missed:
            ctx.missed(miss.id, miss.text, miss.node, miss.hint)

    def _taken_apart(self, graph: fx.Graph, ctx: Context) -> tuple[RowAnalysis, bool]:
        """The analysis, with ops that have no declaration taken apart where that is a gain; and is there any?"""
        with ctx.part("take apart"):
            apart = self._with_origins(take_apart(graph))
        found = self._analyse(graph, ctx)
        for take in (take_apart_sorted, take_apart_picked, take_apart_sparse_products, take_apart_at_ends):
            with ctx.part("take apart"):
                more = self._with_origins(take(graph, found))
            if more:  # the next one asks about the graph that it finds
                apart, found = [*apart, *more], self._analyse(graph, ctx)
        pays = _packs(found) and _pays(found, ctx)
        gains = [each for each in apart if pays and is_gain(each, found)]
        for each in reversed(apart):
            if each not in gains:
                each.put_together()
        for each in gains:
            with ctx.rewrite("take-apart", each.whole):
                each.leave()
        return found if not apart else self._analyse(graph, ctx), pays

    def _with_origins(self, apart: list[Apart]) -> list[Apart]:
        for each in apart:
            for part in each.parts:
                inherit(part, [each.whole], Origin(self.name, "take-apart", (each.whole.name,)))
        return apart

    def _analyse(self, graph: fx.Graph, ctx: Context) -> RowAnalysis:
        unspecified = getattr(ctx.options, "padded_outputs", "strict") == "unspecified"
        with _torch.outside_compilation(), ctx.part("analyse"):
            found = analyse(graph, ctx.examples, unspecified_outputs=unspecified)
            return _settled(found, frozenset())

    def _pack(self, graph: fx.Graph, ctx: Context, found: RowAnalysis) -> Emitter:
        """Pack what can be packed."""
        emitter = self._emitter(graph, ctx, found)
        keep_original(graph)
        original, copies = _copy(graph)
        inputs = {copy: node for node, copy in copies.items() if node.op == "placeholder"}
        outputs = [copies.get(x) for x in outputs_of(graph)]

        def reached(surely: bool) -> Reach:
            return [{inputs[x] for x in found} for found in reach(original, outputs, _trained, surely)]

        with ctx.rewrite("pack", *(n for n in copies if n.op == "call_function")):
            with ctx.part("emit"):
                emitter = self._emitted(graph, ctx, emitter, found)
                _erase_unused(graph, emitter)
                for node, result in tie(graph, reached, reach(graph, outputs_of(graph), _trained)).items():
                    emitter.origin[node] = emitter.origin.get(result, result)
            with ctx.part("program"):
                program = emitter.program(original, copies) if emitter.homes or emitter.added else None
            for node, source in emitter.origin.items():
                if not _torch.is_erased(node):
                    inherit(node, [source], Origin(self.name, "pack", (source.name,)))
        if program is not None:
            self._explain(graph, ctx, emitter, program)
            rows = _input_rows(graph, program)
            if rows is not None:
                keep_rows(graph, rows)
        return emitter

    def _emitter(self, graph: fx.Graph, ctx: Context, found: RowAnalysis) -> Emitter:
        ctx.note("rows", lambda: analysis_text(found.demand))
        capacity = getattr(ctx.options, "capacity", None)
        return Emitter(graph, found.demand, parity=self.dropout == "padded", capacity=capacity)

    def _emitted(self, graph: fx.Graph, ctx: Context, emitter: Emitter, found: RowAnalysis) -> Emitter:
        """A rule that fails costs its op: the rest is packed without it."""
        barriers: frozenset[fx.Node] = frozenset()
        before = {n: (n.args, n.kwargs) for n in graph.nodes}
        while True:
            try:
                emitter.run()
                _describe(graph, ctx, emitter)
                return emitter
            except RuleFailed as failure:
                at = failure.node
                more = {at, *(n for n in at.all_input_nodes if op(at) == "getitem")} - barriers
                more = more or set(at.all_input_nodes) - barriers  # it cannot be given what it reads either
                if not more or len(barriers) >= MOST_BARRIERS:
                    raise
                _restore(graph, before)
                barriers |= more
                if failure.counts_rows:
                    text = f"{op(at)} stays padded: torch cannot describe it for rows that only the batch counts"
                    ctx.missed("rows-uncounted", text, at)
                else:
                    text = f"{op(at)} stays padded, because its row rule failed: {failure}"
                    ctx.missed("rule-failed", text, at, REPORT)
            with _torch.outside_compilation():
                found = _settled(found, barriers)
            emitter = self._emitter(graph, ctx, found)

    def _explain(self, graph: fx.Graph, ctx: Context, emitter: Emitter, program: Program) -> None:
        """What was packed, with the numbers of the batch seen at compile time."""
        rows = _rows_seen(program, ctx, lambda seen: _note_sizes(graph, emitter, seen))
        for chosen in program.sets:
            values = [n for n, home in emitter.homes.items() if home == chosen]
            if values:
                first = min(values, key=list(emitter.homes).index)
                plural = "s" if len(values) > 1 else ""
                where = _described(chosen, emitter.count(chosen), rows)
                ctx.applied("packed", f"{len(values)} value{plural} live on {where}", first)
                if chosen.rounded and rows is not None:
                    ctx.analysis("rows-rounded", _dummies(len(rows.rows(chosen)), rows.size(chosen)), first)
        for node in emitter.seen_sizes if emitter.capacity is not None else ():
            ctx.missed(
                "rows-not-rounded",
                "the model sees how many rows these are: the number is not rounded to option 'capacity', and GE graphs "
                "keep open sizes",
                node,
                "weigh rows by the mask instead of picking them: (loss * mask).sum() / mask.sum()",
            )


def _packs(found: RowAnalysis) -> bool:
    return any(isinstance(d, OnRows) for d in found.demand.decisions.values())


def _pays(found: RowAnalysis, ctx: Context) -> bool:
    """Would the batch seen take less time packed, by the prices of option 'worth'?"""
    if any(op(n) == "turbogr::left_rows" for n in found.graph.nodes):
        return True  # rows that are not there cannot be read
    worth = getattr(ctx.options, "worth", None)
    with _torch.outside_compilation():
        seen = counts(found) if worth is not None else None
    if worth is None or seen is None or worth.pays(seen.whole, seen.usually, seen.here, seen.added):
        return True
    if worth.seconds(seen.whole) < worth.tiny:
        ctx.analysis("tiny-step", "packed, though a step as small as this takes less time padded")
        return True
    ctx.missed(
        "not-worth-it",
        f"packing would leave out {human(seen.here.flops)}FLOPs and {human(seen.here.bytes, 'B')} of the batch seen "
        f"({seen.rows} of {seen.of} rows matter), add {seen.added.calls} calls and move "
        f"{human(seen.added.moved, 'B')}: it would not pay ({worth})",
        next(n for n, d in found.demand.decisions.items() if isinstance(d, OnRows)),
        "options={'worth': 'always'} packs it all the same; `turbogr bench --worth` prints the prices of this machine",
    )
    return False


def _settled(found: RowAnalysis, barriers: frozenset[fx.Node]) -> RowAnalysis:
    """Demand, once it is known which attentions would read pads and which sets are as large as others."""
    found = asked_again(found, barriers=barriers) if barriers else found
    refused = found.reads_pads()
    found = asked_again(found, refused=refused, barriers=barriers) if refused else found
    alike = found.alike()
    return asked_again(found, refused=refused, alike=alike, barriers=barriers) if alike else found


def _describe(graph: fx.Graph, ctx: Context, emitter: Emitter) -> None:
    """Describe new values, so that a rule that made a wrong call is known while the graph can still be restored."""
    try:
        ctx.refresh()
    except VerifyError as error:
        found = next((n for n in graph.nodes if n.name == error.node), None)
        source = emitter.origin.get(found) if found is not None else None
        if source is None:
            raise
        raise RuleFailed(source, error) from error
    emitter.refuse_misshapen()


def _restore(graph: fx.Graph, before: dict[fx.Node, tuple[Any, Any]]) -> None:
    """The graph as it was, node for node."""
    for node, (args, kwargs) in before.items():
        node.args, node.kwargs = args, kwargs
    for node in reversed(list(graph.nodes)):
        if node not in before:
            graph.erase_node(node)


def _input_rows(graph: fx.Graph, program: Program) -> InputRows | None:
    """Of the space that most row sets live in, where a sequence and a column are one axis each."""
    plain = [s for s in program.sets if len(s.space.sequence) == len(s.space.column) == 1]
    if not plain:
        return None
    space = Counter(s.space for s in plain).most_common(1)[0][0]
    sets = [s for s in plain if s.space == space]
    (sequence,), (column,) = space.sequence, space.column
    dims = {}
    given = [n for n in graph.find_nodes(op="placeholder") if PROVIDER not in n.meta]
    for i, node in enumerate(given):
        axes = [tuple(atoms) for atoms in program.typing.atoms(node)] if tensor(node) is not None else []
        if axes.count((sequence,)) == 1 and not _trained(node):
            dims[i] = (axes.index((sequence,)), *(d for d, axis in enumerate(axes) if axis == (column,)))

    def valid(inputs: Sequence[Any]) -> torch.Tensor:
        rows = Rows(program.batch(inputs))
        return torch.stack([rows.mask(chosen) for chosen in sets]).any(0)

    return InputRows(dims, valid)


def _trained(node: fx.Node) -> bool:
    value = tensor(node)
    return bool(node.meta.get(TRAINABLE)) or (value is not None and value.requires_grad)


def _described(chosen: RowSet, count: Any, rows: Rows | None) -> str:
    if rows is None:
        return f"{count} rows: {chosen}"
    total, columns = rows.batch.extent(chosen.space)
    kept = len(rows.rows(chosen))
    seen = f"{kept} of {total * columns} in the batch seen, {kept / max(total * columns, 1):.0%}"
    return f"{count} rows ({seen}): {chosen}"


def _dummies(kept: int, size: int) -> str:
    wasted = f"{size - kept} of them dummies, {(size - kept) / size:.0%}"
    return f"{kept} rows of the batch seen are computed as {size}" + (f": {wasted}" if size > kept else "")


def _rows_seen(program: Program, ctx: Context, note: Callable[[Rows], None]) -> Rows | None:
    if ctx.examples is None:
        return None
    try:
        with _torch.outside_compilation():
            rows = program.checked(ctx.examples)
            note(rows)
            return rows
    except Unprovable as refusal:
        ctx.analysis("batch-refused", f"the batch seen at compile time runs padded: {refusal.reason}")
    return None


def _note_sizes(graph: fx.Graph, emitter: Emitter, rows: Rows) -> None:
    """Sizes that only a batch knows, for whoever shows costs as numbers."""
    with _torch.outside_compilation():
        for node in emitter.added:
            node.meta[SEEN] = tuple(emitter.recipe(node)(rows).shape)
        for node in graph.nodes:
            if PAIRS in node.meta:
                symbol = node.meta[PAIRS][0]
                queries, keys = (rows.mask(s).sum(1) for s in emitter.pair_counts[symbol])
                node.meta[PAIRS] = (symbol, int((queries * keys).sum()))


def _see_through_offsets(graph: fx.Graph, ctx: Context) -> None:
    """dense_to_jagged hands back the offsets it was given."""
    for node in list(graph.nodes):
        source: Any = node.args[0] if op(node) == "getitem" else None
        if op(source) == "getitem" and op(source.args[0]) == "fbgemm::dense_to_jagged" and source.args[1] == 1:
            with ctx.rewrite("offsets", node):
                node.replace_all_uses_with(source.args[0].args[1][node.args[1]])
                graph.erase_node(node)


def _fill_by_mask(graph: fx.Graph, ctx: Context) -> None:
    """x[mask] = number, row by row, is masked_fill."""
    for node in list(graph.nodes):
        if op(node) != "index_put" or arg(node, "accumulate") or len(node.args[1]) != 1:
            continue
        x, (mask,), value = node.args[:3]
        plain, held = tensor(mask), tensor(value)
        if plain is None or plain.dtype != torch.bool or held is None or held.dim() != 0 or held.is_complex():
            continue
        with ctx.rewrite("masked-assignment", node), graph.inserting_before(node):
            for _ in range(rank_of(x) - plain.dim()):
                mask = _call(graph, aten.unsqueeze.default, mask, -1)
            if held.dtype != node.meta["val"].dtype:
                value = _call(graph, aten._to_copy.default, value, dtype=node.meta["val"].dtype)
            node.replace_all_uses_with(_call(graph, aten.masked_fill.Tensor, x, mask, value))
            graph.erase_node(node)


def _one_result_of_layer_norm(graph: fx.Graph, ctx: Context) -> None:
    """Under autocast a layer norm arrives with its statistics, which nobody reads."""
    for node in list(graph.nodes):
        if op(node) != "native_layer_norm" or any(u.args[1] != 0 for u in node.users):
            continue
        for user in list(node.users):
            with ctx.rewrite("layer-norm", user), graph.inserting_before(user):
                user.replace_all_uses_with(_call(graph, aten.layer_norm.default, *node.args))
                graph.erase_node(user)
        graph.erase_node(node)


def _whole_jagged_ops(graph: fx.Graph, ctx: Context) -> None:
    """Under autocast fbgemm's composites arrive as the op within them, which has the same arguments and gradient."""
    for node in list(graph.nodes):
        within = op(node)
        if within not in ("fbgemm::jagged_to_padded_dense_forward", "fbgemm::dense_to_jagged_forward"):
            continue
        packet = getattr(torch.ops.fbgemm, within.removeprefix("fbgemm::").removesuffix("_forward"))
        with ctx.rewrite("jagged-op", node), graph.inserting_before(node):
            whole = graph.call_function(packet.default, node.args, node.kwargs)
            whole.meta["val"] = node.meta["val"]
            if within == "fbgemm::dense_to_jagged_forward":
                whole.meta["val"] = (node.meta["val"], [x.meta["val"] for x in arg(node, "x_offsets")])
                rows = graph.call_function(operator.getitem, (whole, 0))
                rows.meta["val"] = node.meta["val"]
                whole = rows
            node.replace_all_uses_with(whole)
            graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A call whose value is described at once: the analysis reads it."""
    node = graph.call_function(target, args, kwargs)
    mode = _torch.fake_mode_of(graph)
    assert mode is not None
    with mode, torch.no_grad(), _torch.without_autocast():
        node.meta["val"] = target(*[a.meta["val"] if isinstance(a, fx.Node) else a for a in args], **kwargs)
    return node


def _copy(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    copied = fx.Graph(owning_module=graph.owning_module)
    copies: dict[fx.Node, fx.Node] = {}
    copied.graph_copy(graph, copies)
    return copied, copies


def _erase_unused(graph: fx.Graph, emitter: Emitter) -> None:
    """Drawing random numbers is an effect, except where a packed op draws instead."""
    superseded = emitter.superseded
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or node.users:
            continue
        if node in superseded or not node.is_impure():
            graph.erase_node(node)
