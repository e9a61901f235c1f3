"""What is worth a line on the console although nobody asked: once in a process, never where TURBOGR_QUIET is set."""

from __future__ import annotations

import logging
import os

from ..graph.nodes import TRAINABLE
from ..pipeline.instrument import GraphRun
from ..pipeline.remarks import CAPTURE, Remark, RemarkKind

log = logging.getLogger("turbogr_compile")
PACKING = "pack-rows"
_UNTOLD = "nothing in it says which rows are padding: compare ids with the pad id, or give the loss an ignore_index"
_told = False


def nothing_packed(run: GraphRun | None) -> None:
    """A training step of which no row is left out costs what it cost before: say so, and why."""
    global _told
    if _told or run is None or os.environ.get("TURBOGR_QUIET"):
        return
    steps = [s for s in run.steps if s.pass_.name == PACKING]
    trained = any(n.meta.get(TRAINABLE) for n in run.graph.find_nodes(op="placeholder"))
    if not steps or not trained or any(r.id == "packed" for r in run.remarks):
        return
    _told = True
    log.warning("turbogr packs nothing in graph %s: %s", run.name.partition("-")[0], _why(run.remarks))


def _why(remarks: list[Remark]) -> str:
    missed = [r for r in remarks if r.kind is RemarkKind.MISSED and r.pass_name in (PACKING, CAPTURE)]
    if not missed:
        return _UNTOLD
    first = missed[0]
    where = f"{first.line}: " if first.line else ""
    return f"{where}{first.text}" + (f"\n    → {first.hint}" if first.hint else "")
