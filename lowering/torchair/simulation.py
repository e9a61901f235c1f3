"""What only the simulator can tell: which operators rest on belief, and where a GE graph departs from its FX graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import fx

from ...graph.provenance import line_of
from ...pipeline.remarks import Remark, RemarkKind
from ..ge import graph as ge
from ..ge.bisect import compared
from ..ge.check import Problem
from ..ge.kernels import BELIEFS
from .tell import SPEAKER

HINT = "not checked by the simulator: look at this first where an NPU gives other numbers"
Tell = Callable[[list[Remark]], None]


def beliefs(graphs: Iterable[tuple[ge.Graph, fx.Graph]]) -> list[Remark]:
    """One remark for each operator that is simulated as GE is believed to compute it."""
    found: dict[str, Remark] = {}
    for graph, source in graphs:
        for node in graph.nodes:
            if node.type in BELIEFS and node.type not in found:
                belief = BELIEFS[node.type]
                belief = BELIEFS.get(belief.removeprefix("as "), belief)  # the same as another one
                text = f"GE's {node.type} is simulated as it is believed to work: {belief}"
                found[node.type] = _belief(text, node, source)
    return list(found.values())


def doubts(problems: Sequence[Problem], source: fx.Graph) -> list[Remark]:
    """Dtypes that the prototypes at hand do not list, and newer ones may."""
    first: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.node.type, problem.text), problem)
    return [_belief(f"{p}, as far as torchair knows; a newer CANN may take it", p.node, source) for p in first.values()]


def watched(compiled: Any, source: fx.Graph, tell: Tell) -> Callable[..., Any]:
    """What torchair's compiler returned, which after its first call tells of the doubts that arose."""
    run, told = compared(compiled), False

    def call(*given: Any) -> Any:
        nonlocal told
        results = run(*given)
        if not told:
            told = True
            if remarks := doubts(compiled.runner.graph._executor.interpreter.doubts, source):
                tell(remarks)
        return results

    return call


def _belief(text: str, node: ge.Node, source: fx.Graph) -> Remark:
    made_for = next((n for n in source.nodes if n.name == node.origin), None)
    line = line_of(made_for) if made_for is not None else None
    return Remark(RemarkKind.ANALYSIS, "ge-belief", SPEAKER, text, line, node.origin, HINT)
