"""What the targets that end in GE have to say about a graph: what stays out of GE, and what GE is given."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import fx

from ...graph.provenance import line_of
from ...pipeline.remarks import Remark, RemarkKind
from ..ge import graph as ge
from ..ge.text import graph_text
from .coverage import OUTSIDE, Refusals, gaps

SPEAKER = "torchair"  # stands where a remark of a pass has the pass
MOST_REASON = 160


def outside(found: Refusals) -> list[Remark]:
    """One remark for each op that runs between GE graphs."""
    remarks = []
    for gap in gaps(found):
        often = f", {gap.count} times" if gap.count > 1 else ""
        text = f"{gap.op} runs op by op{often}, outside of GE graphs: {gap.reason}"
        hint = "each such op ends one GE graph and starts another; ops that convert may say the same"
        remarks.append(Remark(RemarkKind.MISSED, "outside-ge", SPEAKER, text, gap.line, gap.node, hint))
    return remarks


def not_converted(graph: fx.Graph, reason: str) -> Remark:
    """A graph whose ops convert one by one, and which torchair does not take as a whole."""
    text = f"a graph of {_size(graph)} ops runs op by op: torchair converts each of them, and not the graph: {reason}"
    hint = "the results are right; target='cpu' needs no conversion"
    line = next((found for node in graph.nodes if (found := line_of(node))), None)
    return Remark(RemarkKind.MISSED, "not-converted", SPEAKER, text, line, hint=hint)


def coverage_text(graph: fx.Graph, found: Refusals) -> str:
    """Ops that have no working converter, under the lines of the user's that ask for them."""
    total, left = _size(graph), sum(not _is_part(node) for node in found)
    lines = [f"{total - left} of {total} ops go to GE"]
    if not left:
        return f"{lines[0]}; nothing stays outside\n"
    by_line: dict[str, Counter[tuple[str, str]]] = {}
    for node, reason in found.items():
        if not _is_part(node):
            entry = (str(node.target) if reason != OUTSIDE else _name(node.target), reason[:MOST_REASON])
            by_line.setdefault(str(line_of(node) or "(no line)"), Counter())[entry] += 1
    for line, entries in by_line.items():
        lines += ["", f"# {line}"]
        lines += [f"  {op}{f' ×{count}' if count > 1 else ''}: {reason}" for (op, reason), count in entries.items()]
    return "\n".join(lines) + "\n"


def graph_texts(compiled: Sequence[tuple[Any, fx.Graph]]) -> dict[str, str]:
    """GE graphs by name, each node with its FX node under the user's line; a graph that was split has several."""
    several = len(compiled) > 1
    texts = {}
    for number, (made, source) in enumerate(compiled, 1):
        text = graph_text(ge.of(made), source)
        texts[f"ge-graph-{number}" if several else "ge-graph"] = (
            f"# GE graph {number} of {len(compiled)}\n{text}" if several else text
        )
    return texts


def _size(graph: fx.Graph) -> int:
    return sum(node.op == "call_function" and not _is_part(node) for node in graph.nodes)


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem  # goes with the node it takes a result of


def _name(target: Any) -> str:
    return target.__name__ if getattr(target, "__module__", "") == "_operator" else str(target)
