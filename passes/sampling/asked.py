"""What may be asked for beyond the loss as it is written: negatives that neighbours share, rows of negatives in FP16.

Both change results, so they happen where they are named and nowhere else, and a loss that cannot have them says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ..._torch import is_erased
from ...graph.costs import formula
from ...pipeline.context import Context
from ..common.cross_entropy import MEAN, Refused, Total, value_of
from .emit import copies_table
from .find import Found
from .kept import keeps_copy
from .losses import SampledLoss
from .report import cost
from .scoring import Scoring

NOT_SHARED, NOT_HALF = "logits-not-shared", "negatives-not-half"


@dataclass(frozen=True)
class Asked:
    """Options of the pass that change results."""

    share: int = 1  # positions that share their negatives
    half: bool = False

    def __bool__(self) -> bool:
        return self.share > 1 or self.half

    def shares(self, loss: SampledLoss, total: Total | None = None) -> int:
        """Positions of a group. Raises Refused where sharing would mean more than it says."""
        of_all = loss.of_logits and (loss.reduction == MEAN or (total is not None and total.over_all))
        if self.share > 1 and of_all:
            text = "negatives are not shared: the loss is a mean over logits, and sharing changes their number"
            raise Refused(NOT_SHARED, text, loss.node, "add them up for each position, and average positions")
        return self.share

    def narrows(self, s: Scoring) -> bool:
        """Rows of negatives in FP16? Raises Refused where they are of another type than float32."""
        dtype = value_of(s.product.node).dtype
        if self.half and dtype != torch.float32:
            text = f"negatives are not multiplied in FP16: the table is {dtype}, and FP16 stands in for float32"
            raise Refused(NOT_HALF, text, s.product.node)
        return self.half

    def tell_left(self, found: Found, refused: list[fx.Node], ctx: Context) -> None:
        """Losses are rewritten: every one that does not have what was asked for is named."""
        own = [n for n, s in found.per_position.items() if s.negatives and not is_erased(n)]
        together = [n for n in (*found.shared, *found.products) if not is_erased(n)]
        said = {r.id for r in ctx.remarks}
        if self.share > 1:
            hint = f"turbogr_compile.losses.sampled_losses(..., share={self.share}) shares them in any graph"
            for node in (*own, *refused):
                text = "negatives are not shared: the loss around these scores is none that is computed as one op"
                ctx.missed(NOT_SHARED, text, node, hint)
            if not own and not refused and not said & {"logits-shared", NOT_SHARED}:
                text = "negatives are not shared: no position of this graph has looked-up negatives of its own"
                ctx.missed(NOT_SHARED, text, hint=hint)
        if self.half:
            for node in (*refused, *together):
                text = "these rows are not multiplied in FP16: only rows of its own for each position are"
                ctx.missed(NOT_HALF, text, node)
            if not own and not refused and not together and not said & {"negatives-half", NOT_HALF}:
                ctx.missed(NOT_HALF, "nothing is multiplied in FP16: no position of this graph has looked-up negatives")


# --- what is said of it ------------------------------------------------------------------------------


def shared_text(s: Scoring, share: int, graph: fx.Graph) -> str:
    queries, each, _ = s.counts
    many = f"{share}*{formula(each)}" + (f" = {share * int(each)}" if each.is_number else "")
    return (
        f"logit sharing is on, another loss than the one written: each position meets the negatives of the {share} "
        f"positions in its group, {many} for {formula(queries * each)} lookups"
    )


def half_text(s: Scoring, graph: fx.Graph) -> str:
    queries, each, width = s.counts
    assert s.rows is not None
    stays = keeps_copy(s.rows.table.node)
    whole = stays or copies_table(s)
    rows = value_of(s.rows.table.node).shape[0] if whole else queries * each
    where = "64 rows of a copy of the table" if whole else "the rows of a position"
    how = ", and stays: rows that the optimizer changes are narrowed again" if stays else ""
    return (
        f"FP16 is on: negatives are rounded to 11 bits, a power of two for {where}; "
        f"the copy has {cost(2 * rows * width, graph, 'B')}{how}; scores differ by at most 2^-11 · sum |query · row|"
    )
