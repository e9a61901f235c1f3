"""Score sampled negatives without storing the rows that are looked up for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch import fx

from .._torch import is_erased
from ..errors import PipelineError
from ..graph.costs import at_hints
from ..graph.phases import Phase
from ..pipeline.catalogue import register
from ..pipeline.context import Context
from ..pipeline.pass_base import Pass
from .common.cross_entropy import Refused
from .sampling import grouped, total
from .sampling.asked import Asked, half_text, shared_text
from .sampling.emit import Emitter
from .sampling.find import Found, find, move_sizes
from .sampling.losses import SampledLoss
from .sampling.reading import losses_of
from .sampling.report import costs, drawn, mark, told
from .sampling.scoring import Scoring

FORMS = ("lookup", "rows")
T = TypeVar("T")


@register
@dataclass(frozen=True)
class FuseSampling(Pass):
    """Score sampled negatives, and compute their loss, without storing the rows that are looked up for them."""

    name = "fuse-sampling"
    phase = Phase.PRE_GRAD
    after = ("remove-noops", "fold-views", "pack-rows", "fold-masks", "eliminate-common", "simplify-masks")
    before = ("fuse-loss", "fuse-embedding", "eliminate-dead-code")

    form: str = "lookup"  # or "rows": looked-up rows are stored, and one kernel computes their softmax
    multiple: int = 1  # with form=rows: the kernel takes rows of a multiple of so many numbers,
    widest: int = 1 << 30  # up to so many
    min_numbers: int = 1 << 15  # of looked-up rows; below, plain ops are as fast
    share: int = 1  # opt-in, another loss: so many neighbouring positions share their negatives
    half: bool = False  # opt-in, other rounding: rows of negatives are multiplied in FP16

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise PipelineError(f"pass 'fuse-sampling' option 'form' takes {' or '.join(FORMS)}, got {self.form!r}")
        if self.share < 1:
            raise PipelineError(f"pass 'fuse-sampling' option 'share' takes 1 or more positions, got {self.share}")
        if self.half and self.form == "rows":
            text = "the kernel for stored rows returns gradients in their type, and those of a mean vanish in FP16"
            raise PipelineError(f"pass 'fuse-sampling' takes half=true with form=lookup only: {text}")

    @property
    def asked(self) -> Asked:
        return Asked(self.share, self.half)

    def changes_numbers(self) -> bool:
        return self.half or self.share > 1

    def run(self, graph: fx.Graph, ctx: Context) -> None:
        refused: list[fx.Node] = []

        def refuse(reason: Refused, node: fx.Node) -> None:
            refused.append(node)
            _missed(ctx, reason, node)

        found = find(graph, refuse)
        for s in (*found.per_position.values(), *found.shared.values(), *found.products.values()):
            if s.negatives and (s.rows is None or s.per_position or drawn(s).kind not in ("given", "computed")):
                mark(s)
        self._losses(graph, found, ctx)
        self.asked.tell_left(found, refused, ctx)
        left = found.shared if self.form == "rows" else {**found.per_position, **found.shared}
        for node, scoring in left.items():
            if not is_erased(node):
                self._try(ctx, node, lambda s=scoring: self._scores(s, ctx))  # type: ignore[misc]
        for s in found.products.values():
            if drawn(s).kind not in ("given", "computed"):
                ctx.analysis("sampling-shared", f"{told(s, graph)}, are a matrix product already", s.product.node)

    def _try(self, ctx: Context, node: fx.Node, work: Callable[[], None]) -> None:
        try:
            work()
        except Refused as reason:
            _missed(ctx, reason, node)

    def _check_size(self, s: Scoring, graph: fx.Graph) -> None:
        """What changes results does not depend on sizes."""
        if self.asked:
            return
        queries, each, width = s.counts
        numbers = at_hints(queries * each * width, graph)
        if numbers is not None and numbers < self.min_numbers:
            text = f"{int(numbers)} numbers of looked-up rows are too few to matter"
            raise Refused("sampling-small", text, s.product.node, "lower fuse-sampling{min_numbers=...}")

    # --- losses --------------------------------------------------------------------------------------

    def _losses(self, graph: fx.Graph, found: Found, ctx: Context) -> None:
        """Whole losses first: where there is none, the loss stays as it is written, on fused scores."""
        for loss in losses_of(graph, found):
            scoring = loss.negative.scoring
            if is_erased(loss.node) or is_erased(scoring.product.node) or self._is_small(scoring, graph):
                continue
            whole = self._grouped if self.form == "rows" else self._total
            self._try(ctx, loss.node, lambda x=loss, f=whole: f(x, ctx))  # type: ignore[misc]

    def _is_small(self, s: Scoring, graph: fx.Graph) -> bool:
        """Then the scores say so."""
        try:
            self._check_size(s, graph)
        except Refused:
            return self.form != "rows"
        return False

    def _total(self, loss: SampledLoss, ctx: Context) -> None:
        added = total.check(loss, loss.total())
        share = self._asked(ctx, loss.node, lambda: self.asked.shares(loss, added), 1)
        half = self._asked(ctx, loss.node, lambda: self.asked.narrows(loss.negative.scoring), False)
        emit = lambda: total.emit_total(loss, added, share, half)  # noqa: E731
        self._replace(loss, added.node, emit, ctx, "scores and loss in one op", share, half)

    def _grouped(self, loss: SampledLoss, ctx: Context) -> None:
        self._check_size(loss.negative.scoring, loss.node.graph)
        grouped.check(loss, self.multiple, self.widest)
        share = self._asked(ctx, loss.node, lambda: self._shares_rows(loss), 1)
        emit = lambda: grouped.emit(loss, share)  # noqa: E731
        self._replace(loss, loss.node, emit, ctx, "scores and softmax in one op, rows stored", share)

    def _shares_rows(self, loss: SampledLoss) -> int:
        if self.share > 1:
            grouped.check_shared(loss)
        return self.asked.shares(loss)

    def _asked(self, ctx: Context, node: fx.Node, wish: Callable[[], T], otherwise: T) -> T:
        """What is granted of a wish; the loss itself is fused in any case."""
        try:
            return wish()
        except Refused as reason:
            _missed(ctx, reason, node)
            return otherwise

    def _replace(
        self, loss: SampledLoss, end: fx.Node, emit: Callable[[], fx.Node], ctx: Context, how: str, share: int,
        half: bool = False,
    ) -> None:  # fmt: skip
        s = loss.negative.scoring
        text = told(s, ctx.graph)
        cost = "" if self.form == "rows" else f"; {costs(s, ctx.graph, ctx, share)}"
        opted = [("logits-shared", shared_text(s, share, ctx.graph))] if share > 1 else []
        opted += [("negatives-half", half_text(s, ctx.graph))] if half else []
        nodes = (*loss.positive.scoring.nodes, *s.nodes, *loss.nodes, end)
        with ctx.rewrite("loss", *dict.fromkeys(nodes)):
            if self.form != "rows":
                move_sizes(s)
            with end.graph.inserting_before(end):
                result = emit()
            end.replace_all_uses_with(result)
            _erase_unused(list(nodes))
        ctx.applied("sampling-fused", f"{text}: {how}{cost}", result)
        for id, said in opted:
            ctx.applied(id, said, result)

    # --- scores --------------------------------------------------------------------------------------

    def _scores(self, s: Scoring, ctx: Context) -> None:
        self._check_size(s, ctx.graph)
        node, how = s.product.node, "scores without storing rows" if s.per_position else "scores by a matrix product"
        text = f"{told(s, ctx.graph)}: {how}"
        half = s.per_position and self._asked(ctx, node, lambda: self.asked.narrows(s), False)
        opted = half_text(s, ctx.graph) if half else ""
        with ctx.rewrite("scores" if s.per_position else "product", *dict.fromkeys(s.nodes)):
            move_sizes(s)
            with node.graph.inserting_before(node):
                emit = Emitter(s)
                result = emit.scores(half) if s.per_position else emit.product()
            node.replace_all_uses_with(result)
            _erase_unused(list(s.nodes))
        if s.negatives:
            ctx.applied("sampling-scores", f"{text}; {costs(s, ctx.graph, ctx)}", result)
        if opted:
            ctx.applied("negatives-half", opted, result)


def _missed(ctx: Context, reason: Refused, node: fx.Node) -> None:
    ctx.missed(reason.id, reason.text, reason.node or node, reason.hint)


def _erase_unused(nodes: list[fx.Node]) -> None:
    """Erase these, last first, and what was computed for them alone."""
    todo = sorted(dict.fromkeys(n for n in nodes if not is_erased(n)))
    while todo:
        node = todo.pop()
        if node.users or node.op != "call_function" or is_erased(node) or node.is_impure():
            continue
        sources = node.all_input_nodes
        node.graph.erase_node(node)
        todo = sorted({*todo, *(n for n in sources if not is_erased(n))})
