"""What is worth a line on the console although nobody asked: once in a process, never where TURBOGR_QUIET is set."""

from __future__ import annotations

import logging
import os

from ..graph import costs
from ..graph.nodes import TRAINABLE, tensor
from ..pipeline.instrument import GraphRun
from ..pipeline.remarks import CAPTURE, Remark, RemarkKind, warn

log = logging.getLogger("turbogr_compile")
PACKING = "pack-rows"
_UNTOLD = "nothing in it says which rows are padding: compare ids with the pad id, or give the loss an ignore_index"
WAITED = "turbogr_waited"  # on a graph module that deferral wrote: what waited, in words
_told = _told_of_waiting = False
_said: set[str] = set()


def quiet() -> bool:
    return bool(os.environ.get("TURBOGR_QUIET"))


def say_once(text: str) -> None:
    if text not in _said and not quiet():
        _said.add(text)
        warn(text)


def nothing_packed(run: GraphRun | None) -> None:
    """A training step of which no row is left out costs what it cost before: say so, and why."""
    global _told
    if _told or run is None or quiet():
        return
    steps = [s for s in run.steps if s.pass_.name == PACKING]
    if not steps or not _trained(run) or _packed(run) or _without_elements(run):
        return
    _told = True
    log.warning("turbogr packs nothing in graph %s: %s", run.name.partition("-")[0], _why(run.remarks))


def step_waited(run: GraphRun | None, waited: str, padded: costs.Cost) -> None:
    """The first training step that deferral put together: what waited for what, and what that saves."""
    global _told_of_waiting
    if _told_of_waiting or run is None or quiet() or not _trained(run) or not _packed(run):
        return
    before, after = (costs.at_hints(c.flops, run.graph) for c in (padded, costs.cost(run.graph)))
    if not before or not after or after >= before:
        return
    _told_of_waiting = True
    flops = f"{costs.human(before, 'FLOPs')} → {costs.human(after, 'FLOPs')}"
    log.warning("turbogr defers %s: %s forward in the batch seen (%.1fx less)", waited, flops, before / after)


def _trained(run: GraphRun) -> bool:
    return any(n.meta.get(TRAINABLE) and n.users for n in run.graph.find_nodes(op="placeholder"))


def _without_elements(run: GraphRun) -> bool:
    """An empty batch says nothing about others."""
    given = [tensor(n) for n in run.graph.find_nodes(op="placeholder")]
    return any(isinstance(size, int) and size == 0 for x in given if x is not None for size in x.shape)


def _packed(run: GraphRun) -> bool:
    return any(r.id == "packed" for r in run.remarks)


def _why(remarks: list[Remark]) -> str:
    missed = [r for r in remarks if r.kind is RemarkKind.MISSED and r.pass_name in (PACKING, CAPTURE)]
    if not missed:
        return _UNTOLD
    first = missed[0]
    where = f"{first.line}: " if first.line else ""
    return f"{where}{first.text}" + (f"\n    → {first.hint}" if first.hint else "")
