"""Records as text for people: per-pass tables, near misses, remarks. Used by dumps and by the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..graph.costs import human
from ..pipeline.context import NearMiss
from .table import table

# Dynamo runs what it cannot trace (nn.GRU, nn.LSTM, a graph break at every line) itself, and says nothing.
NO_GRAPH = "nothing was compiled: Dynamo found no graph and ran the function as it is; TORCH_LOGS=graph_breaks says why"


def step_header(record: dict[str, Any], step: dict[str, Any]) -> str:
    """First line of a dumped graph: where in the pipeline it was taken."""
    if step["status"] == "input":
        return f"# {record['graph']} input   pipeline: {record['pipeline'] or '(empty)'}\n"
    before, after = step["stats"]["nodes"]
    return (
        f"# {record['graph']} after {step['number']:03d} {step['spec']}   nodes {before} → {after}"
        f"   rewrites {len(step['rewrites'])}\n"
    )


def report_text(records: Iterable[dict[str, Any]], timing: bool = False) -> str:
    """Every graph that has something to tell."""
    records = list(records)
    told = [r for r in records if len(r["steps"]) > 1 or r["remarks"]]
    if told:
        return "\n\n".join(summary_text(r, timing) for r in told)
    return "no pass ran on these graphs" if records else NO_GRAPH


def summary_text(record: dict[str, Any], timing: bool = False) -> str:
    """Every pass of the graph, also those that did nothing and why; then near misses and remarks."""
    rows = []
    for step in record["steps"]:
        if step["status"] == "input":
            continue
        nodes = step["stats"].get("nodes", ["", ""])
        flops = step["stats"].get("flops_value", [None, None])
        delta = "" if flops[0] == flops[1] else f"{human(flops[0])} → {human(flops[1])}"
        row = [
            f"{step['number']:03d}", step["spec"], step["status"],
            str(len(step["rewrites"])) if step["status"] == "changed" else "",
            f"{nodes[0]} → {nodes[1]}" if step["status"] == "changed" else "",
            delta, str(len(step["near_misses"]) or ""), step["reason"].split("\n", 1)[0],
        ]  # fmt: skip
        rows.append([*row, f"{step['seconds'] * 1e3:.1f} ms"] if timing else row)
    header = ["", "pass", "status", "rewrites", "nodes", "FLOPs", "near misses", "reason"]
    parts = [f"{record['graph']}   target {record['target']}   pipeline: {record['pipeline'] or '(empty)'}\n"]
    if rows:
        parts.append(table(rows, [*header, "time"] if timing else header) + "\n")
    else:
        parts.append("no passes in this phase\n")
    costs = [line for step in record["steps"] for line in cost_lines(step)]
    if costs:
        parts.append("\ncosts\n" + "\n".join(costs) + "\n")
    misses = [line for step in record["steps"] for line in _recorded_misses(record, step)]
    if misses:
        parts.append("\nnear misses\n" + "\n".join(misses) + "\n")
    if record["remarks"]:
        parts.append("\nremarks\n" + "\n".join(remark_lines(record)) + "\n")
    return "\n".join(parts)


def cost_lines(step: dict[str, Any]) -> list[str]:
    """What a pass changed about the cost of the graph: numbers at the sizes seen, and formulas."""
    stats, lines = step["stats"], []
    for what, unit in (("flops", "FLOPs"), ("bytes", "bytes")):
        before, after = stats.get(what, ["", ""])
        if before == after or stats["flops"][0] == stats["flops"][1]:
            continue
        values = stats[f"{what}_value"]
        lines.append(f"  {step['name']}   {unit} {human(values[0])} → {human(values[1])}")
        lines += [f"     {text}" for text in (f"before: {before}", f"after:  {after}") if not text[9:].isdigit()]
    return lines


def remark_lines(record: dict[str, Any]) -> list[str]:
    lines = []
    for r in record["remarks"]:
        at = record["lines"][r["line"]] if r["line"] is not None else None
        where = f"{at['where']}  {at['code']}\n      " if at else ""
        lines.append(f"  {where}{r['kind']} [{r['id']}] {r['pass']}: {r['text']}")
        if r["hint"]:
            lines.append(f"      → {r['hint']}")
    return lines


def near_miss_lines(misses: Iterable[NearMiss]) -> list[str]:
    lines = []
    for m in misses:
        lines += _miss(m.rule, m.matched, m.total, str(m.line or f"%{m.node}"), [
            {"kind": o.kind, "text": o.text, "hint": o.hint} for o in m.obstacles
        ])  # fmt: skip
    return lines


def _recorded_misses(record: dict[str, Any], step: dict[str, Any]) -> list[str]:
    lines = []
    for m in step["near_misses"]:
        at = record["lines"][m["line"]] if m["line"] is not None else None
        where = f"{at['where']}  {at['code']}" if at else f"%{m['node']}"
        lines += _miss(m["rule"], m["matched"], m["total"], where, m["obstacles"])
    return lines


def _miss(rule: str, matched: int, total: int, where: str, obstacles: list[dict[str, str]]) -> list[str]:
    plural = "s" if len(obstacles) != 1 else ""
    lines = [f"  {rule}   {matched}/{total} ops   {len(obstacles)} obstacle{plural}   {where}"]
    for o in obstacles:
        hint = f"   → {o['hint']}" if o["hint"] else ""
        lines.append(f"     {o['kind']:8} {o['text']}{hint}")
    return lines
