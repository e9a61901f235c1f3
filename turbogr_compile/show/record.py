"""The record of what passes did to one graph: facts, stored once, rendered later.

A record is plain JSON data. Text dumps, diffs, SVG, the HTML viewer, `turbogr diff` and `turbogr explain`
are all views of it. Nodes are stored once per version (a node whose arguments change is a new version
under the same name) and snapshots are lists of node ids, so keeping every single rewrite is cheap.

    nodes      [{name, kind, op, args, type, inputs, text, line, origin}]    ids are positions in this list
    lines      [{file, line, code, function, where}]
    snapshots  [[node id, ...], ...]
    steps      [{number, name, spec, phase, summary, site, status, reason, snapshot, rewrites, near_misses,
                 stats, seconds, notes, timeline}]
                 step 0 is the input; status: input | changed | unchanged | skipped | failed
      rewrites     [{rule, site, removed, added, snapshot, line}]    removed, added: ids of node versions
      near_misses  [{rule, site, line, node, matched, total, obstacles: [{kind, text, hint, node}]}]
      stats        {nodes: [before, after], flops: [..], bytes: [..], flops_value: [..], bytes_value: [..],
                    ops: {op: delta}, unknown: [op], saved: {what: formula}}
      timeline     where a pass schedules: when things run by estimate, as timeline.py says
    remarks    [{kind, id, pass, text, line, node, hint}]
    texts      {name: text}    from the target: the program it was given, what stays out of it
    order      {passes: [{name, phase, present, summary}], edges: [{from, to, kind, site}]}
"""

from __future__ import annotations

from typing import Any

from torch import fx

from ..graph.provenance import Origin, UserLine, line_of, short_path
from ..graph.text import args_text, layout, node_text, target_text, type_text
from ..pipeline.remarks import Remark

FORMAT = 1


class Recorder:
    """Builds the record of one graph while passes run."""

    def __init__(self, graph_id: str, role: str, **header: Any) -> None:
        self.data: dict[str, Any] = {
            "format": FORMAT, "graph": graph_id, "role": role, **header,
            "nodes": [], "lines": [], "snapshots": [], "steps": [], "remarks": [], "texts": {},
            "order": {"passes": [], "edges": []},
        }  # fmt: skip
        self._ids: dict[tuple[Any, ...], int] = {}
        self._lines: dict[UserLine, int] = {}

    def line(self, line: UserLine | None) -> int | None:
        if line is None:
            return None
        if line not in self._lines:
            self._lines[line] = _line_in(self.data, line)
        return self._lines[line]

    def node(self, node: fx.Node) -> int:
        """Id of this version of the node, storing it when new."""
        key = (node.name, node_text(node), node.meta.get("stack_trace"))
        if key not in self._ids:
            origin = node.meta.get("turbogr")
            self._ids[key] = len(self.data["nodes"])
            self.data["nodes"].append({
                "name": node.name,
                "kind": node.op,
                "op": "" if node.op in ("placeholder", "output") else target_text(node),
                "args": args_text(node),
                "type": type_text(node.meta.get("val")) if node.op != "output" else "",
                "inputs": [n.name for n in node.all_input_nodes],
                "text": node_text(node),
                "line": self.line(line_of(node)),
                "origin": {"pass": origin.pass_name, "rule": origin.rule, "sources": list(origin.sources)}
                if isinstance(origin, Origin) else None,
            })  # fmt: skip
        return self._ids[key]

    def snapshot(self, graph: fx.Graph) -> int:
        """Index of the snapshot, shared with the previous one where nothing changed."""
        ids = [self.node(n) for n in graph.nodes]
        if not self.data["snapshots"] or self.data["snapshots"][-1] != ids:
            self.data["snapshots"].append(ids)
        return len(self.data["snapshots"]) - 1

    def remark(self, remark: Remark) -> None:
        add_remark(self.data, remark)


def add_remark(record: dict[str, Any], remark: Remark) -> None:
    record["remarks"].append({
        "kind": remark.kind.value, "id": remark.id, "pass": remark.pass_name, "text": remark.text,
        "line": None if remark.line is None else _line_in(record, remark.line), "node": remark.node,
        "hint": remark.hint,
    })  # fmt: skip


def _line_in(record: dict[str, Any], line: UserLine) -> int:
    """The line's place in the record, storing it when new."""
    entry = {
        "file": short_path(line.file), "line": line.line, "code": line.code, "function": line.function,
        "where": line.where,
    }  # fmt: skip
    if entry not in record["lines"]:
        record["lines"].append(entry)
    return record["lines"].index(entry)


def snapshot_text(record: dict[str, Any], snapshot: int) -> str:
    """A recorded snapshot in the same text form as a live graph."""
    nodes = [record["nodes"][i] for i in record["snapshots"][snapshot]]
    lines = record["lines"]

    def line(node: dict[str, Any]) -> UserLine | None:
        if node["line"] is None:
            return None
        at = lines[node["line"]]
        return UserLine(at["file"], at["line"], at["code"], at["function"])

    return layout(
        [n["text"] for n in nodes if n["kind"] == "placeholder"],
        ((n["text"], line(n)) for n in nodes if n["kind"] != "placeholder"),
    )
