"""Pictures of a record: what one step changed, and the order of passes. No Graphviz, no network.

Both are columns of boxes (before | after; one per phase) laid out in layers: sources sink to their first
reader, long edges get a place in every layer they cross, two barycentre sweeps untangle the rows, and every
source has its own lane between two rows, so that elbows never lie on each other. Same record, same bytes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape

import networkx as nx

from .style import PALETTE, STYLE

CAP = 40  # boxes of one region; more is no longer a picture but a poster
HEIGHT, GAP, PAD, HEADER = 36, 14, 16, 40
WIDEST = 36  # characters of a box

MARKS = {"added": "+", "removed": "−", "rewired": "~", "context": ""}

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PAPER = "svg.tg{background:#fff}@media (prefers-color-scheme:dark){svg.tg{background:#0d1117}}\n"


@dataclass(frozen=True)
class Box:
    """One box of a column. `key` is unique in the picture; `node` is the record's node id, where there is one."""

    key: str
    head: str
    sub: str
    kind: str
    tip: str
    node: int | None = None

    @property
    def width(self) -> int:
        room = 26 if MARKS.get(self.kind) else 16
        return max(64, round(max(len(_cut(self.head)) * 6.7 + room, len(_cut(self.sub)) * 6.1 + 16)))


@dataclass(frozen=True)
class Edge:
    source: str
    target: str
    label: str = ""
    kind: str = ""
    tip: str = ""


@dataclass
class Column:
    title: str
    note: str
    boxes: list[Box]
    edges: list[Edge]


# --- public pictures -----------------------------------------------------------------------------


def region_svg(record: dict[str, Any], step: int, hops: int = 2) -> str:
    """What a step changed, before beside after, with `hops` nodes of surroundings."""
    at = record["steps"][step]
    title = f"{at['number']:03d} {at['name']}"
    return change_svg(record, before_of(record, step), snapshot_of(record, step), title, hops)


def change_svg(
    record: dict[str, Any], before: int, after: int, title: str, hops: int = 2, embedded: bool = False
) -> str:
    """What happened between two snapshots.

    An embedded picture leaves its style to the page, and has before above after: a narrow panel can scroll down.
    """
    region = Region.between(record, before, after, hops)
    return _svg(list(region.columns()), [region.note] if region.note else [], title, embedded, stacked=embedded)


def order_svg(order: dict[str, Any], embedded: bool = False) -> str:
    """Which pass must run before which, one lane per phase; passes outside this pipeline are dashed."""
    by_name = {p["name"]: p for p in order["passes"]}
    edges = _needed([e for e in order["edges"] if e["from"] in by_name and e["to"] in by_name])
    lanes = []
    for phase in dict.fromkeys(p["phase"] for p in order["passes"]):
        # By name: a pass that runs twice is one box.
        boxes = [_pass_box(p) for p in by_name.values() if p["phase"] == phase]
        inside = [_order_edge(e) for e in edges if by_name[e["from"]]["phase"] == by_name[e["to"]]["phase"] == phase]
        lanes.append(Column(phase, "", boxes, inside))
    across = [_order_edge(e) for e in edges if by_name[e["from"]]["phase"] != by_name[e["to"]]["phase"]]
    notes = [] if lanes else ["This pipeline has no passes."]
    return _svg(lanes, notes, "Order of passes", embedded, across)


def _needed(edges: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the soft edges that follow from others anyway."""
    graph = nx.DiGraph((e["from"], e["to"]) for e in edges)
    if not nx.is_directed_acyclic_graph(graph):
        return edges
    kept = set(nx.transitive_reduction(graph).edges)
    return [e for e in edges if e["kind"] == "needs" or (e["from"], e["to"]) in kept]


def region_dot(record: dict[str, Any], step: int, hops: int = 2) -> str:
    """The same region as DOT text, for people who have Graphviz."""
    region = Region.between(record, before_of(record, step), snapshot_of(record, step), hops)
    shapes = {"added": "color=green3, penwidth=2", "removed": "color=red3, penwidth=2", "rewired": "style=bold"}
    lines = [f"digraph {_quoted(record['steps'][step]['name'])} {{", "  node [shape=box, fontname=monospace];"]
    for column in region.columns():
        lines += [f"  subgraph cluster_{column.title} {{", f"    label={_quoted(column.title)};"]
        for box in column.boxes:
            text = f"{MARKS[box.kind]} {box.head}\n{box.sub}".strip()
            extra = f", {shapes[box.kind]}" if box.kind in shapes else ", color=grey"
            lines.append(f"    {_quoted(box.key)} [label={_quoted(text)}{extra}];")
        lines += [f"    {_quoted(e.source)} -> {_quoted(e.target)};" for e in column.edges]
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


def snapshot_of(record: dict[str, Any], step: int) -> int:
    """Snapshot the graph is in after a step; a step that did not run leaves the one before."""
    for at in reversed(record["steps"][: step + 1]):
        if at.get("snapshot") is not None:
            return at["snapshot"]
    return 0


def before_of(record: dict[str, Any], step: int) -> int:
    return snapshot_of(record, max(step - 1, 0))


# --- the changed region --------------------------------------------------------------------------


@dataclass
class Region:
    """Nodes that differ between two snapshots, by name, and what surrounds them."""

    record: dict[str, Any]
    before: dict[str, int]
    after: dict[str, int]
    names: list[str]
    note: str

    @classmethod
    def between(cls, record: dict[str, Any], before: int, after: int, hops: int) -> Region:
        old, new = (_by_name(record, s) for s in (before, after))
        # Dicts keep the order of the graph, which makes the picture the same every time.
        gone_or_new = list(dict.fromkeys([n for n in old if n not in new] + [n for n in new if n not in old]))
        rewired = [n for n in old if n in new and old[n] != new[n]]
        seeds = gone_or_new or rewired
        near = dict.fromkeys(seeds)
        for name in _around(record, (old, new), seeds, hops):
            near.setdefault(name)
        # What a rewired node reads now explains the change as much as what it read before.
        for name in [n for n in rewired if n in near]:
            was, now = (record["nodes"][side[name]]["inputs"] for side in (old, new))
            near.update(dict.fromkeys(n for n in now if n not in was))
        names = list(near)[:CAP]
        note = ""
        if not seeds:
            note = "Same nodes, in another order." if list(old) != list(new) else "Nothing changed."
        elif len(near) > CAP:
            note = f"{len(near) - CAP} more nodes of this region are not drawn."
        return cls(record, old, new, names, note)

    def columns(self) -> Iterator[Column]:
        if not self.names:
            return
        for title, here, there, kind in (("before", self.before, self.after, "removed"),
                                         ("after", self.after, self.before, "added")):  # fmt: skip
            count = sum(n not in there for n in here)
            shown = [n for n in here if n in set(self.names)]
            edges = [
                Edge(f"{title}:{source}", f"{title}:{n}")
                for n in shown for source in self.record["nodes"][here[n]]["inputs"] if source in shown
            ]  # fmt: skip
            tied = {end for e in edges for end in (e.source, e.target)}
            boxes = [self._box(title, here, n, self._kind(n, here, there, kind)) for n in shown]
            boxes = [b for b in boxes if b.kind != "context" or b.key in tied]
            yield Column(title, f"{MARKS[kind]}{count} {kind}" if count else f"nothing {kind}", boxes, edges)

    @staticmethod
    def _kind(name: str, here: dict[str, int], there: dict[str, int], changed: str) -> str:
        if name not in there:
            return changed
        return "rewired" if here[name] != there[name] else "context"

    def _box(self, side: str, snapshot: dict[str, int], name: str, kind: str) -> Box:
        node = self.record["nodes"][snapshot[name]]
        head = {"placeholder": "input", "output": "return", "get_attr": "constant"}.get(node["kind"], node["op"])
        tip = [node["text"]]
        if node["line"] is not None:
            line = self.record["lines"][node["line"]]
            tip.append(f"{line['where']}  {line['code']}".rstrip())
        sub = f"%{name}  {node['type']}" if node["kind"] != "output" else " ".join(f"%{i}" for i in node["inputs"])
        return Box(f"{side}:{name}", head, sub, kind, "\n".join(tip), snapshot[name])


def _by_name(record: dict[str, Any], snapshot: int) -> dict[str, int]:
    return {record["nodes"][i]["name"]: i for i in record["snapshots"][snapshot]}


def _around(record: dict[str, Any], sides: Iterable[dict[str, int]], seeds: list[str], hops: int) -> list[str]:
    """Names up to `hops` above or below a seed, nearest first; siblings of a seed are left out as noise."""
    distance: dict[str, int] = {}
    for side in sides:
        up = {n: record["nodes"][i]["inputs"] for n, i in side.items()}
        down: dict[str, list[str]] = {}
        for name, inputs in up.items():
            for source in inputs:
                down.setdefault(source, []).append(name)
        for neighbours in (up, down):
            front = [s for s in seeds if s in side]
            seen = set(front)
            for hop in range(1, hops + 1):
                front = [n for n in dict.fromkeys(m for f in front for m in neighbours.get(f, ())) if n not in seen]
                seen.update(front)
                for name in front:
                    distance[name] = min(hop, distance.get(name, hop))
    return sorted(distance, key=lambda n: distance[n])


# --- layered layout ------------------------------------------------------------------------------


@dataclass
class Placed:
    """Where boxes (top centre) and edges of a column go."""

    at: dict[str, tuple[float, float]] = field(default_factory=dict)
    paths: list[tuple[Edge, str, tuple[float, float]]] = field(default_factory=list)  # edge, path, arrival
    width: float = 0
    height: float = 0


def _place(column: Column) -> Placed:
    widths: dict[Any, float] = {b.key: b.width for b in column.boxes}
    graph = nx.DiGraph()
    graph.add_nodes_from(widths)
    graph.add_edges_from((e.source, e.target) for e in column.edges)
    while not nx.is_directed_acyclic_graph(graph):
        graph.remove_edge(*nx.find_cycle(graph)[-1][:2])
    edges = [e for e in column.edges if graph.has_edge(e.source, e.target)]
    rank = _ranks(graph)
    # A hop is one stretch of an edge between neighbouring rows; places that are not boxes are tuples.
    routes: list[list[Any]] = []
    for edge in edges:
        between = [(edge.source, edge.target, r) for r in range(rank[edge.source] + 1, rank[edge.target])]
        for place in between:
            widths[place], rank[place] = 10, place[2]
        routes.append([edge.source, *between, edge.target])
    rows = _untangle(rank, list(widths), routes)
    x = _spread(rows, widths, routes)
    return _draw(rows, x, widths, edges, routes)


def _ranks(graph: nx.DiGraph) -> dict[Any, int]:
    rank = {n: r for r, row in enumerate(nx.topological_generations(graph)) for n in row}
    for node in graph:
        # An input belongs beside the node that reads it, not at the top of the page.
        if not graph.in_degree(node) and graph.out_degree(node):
            rank[node] = min(rank[s] for s in graph.successors(node)) - 1
    return rank


def _untangle(rank: dict[Any, int], order: list[Any], routes: list[list[Any]]) -> list[list[Any]]:
    rows: list[list[Any]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for place in order:
        rows[rank[place]].append(place)
    above, below = _neighbours(routes)
    for neighbours, sweep in ((above, range(1, len(rows))), (below, range(len(rows) - 2, -1, -1))):
        for r in sweep:
            other = {p: i for row in rows for i, p in enumerate(row)}
            near = {p: [other[n] for n in neighbours.get(p, ())] or [other[p]] for p in rows[r]}
            middle = {p: sum(v) / len(v) for p, v in near.items()}
            rows[r].sort(key=middle.__getitem__)
    return rows


def _neighbours(routes: list[list[Any]]) -> tuple[dict[Any, list[Any]], dict[Any, list[Any]]]:
    above: dict[Any, list[Any]] = {}
    below: dict[Any, list[Any]] = {}
    for route in routes:
        for source, target in itertools.pairwise(route):
            above.setdefault(target, []).append(source)
            below.setdefault(source, []).append(target)
    return above, below


def _spread(rows: list[list[Any]], widths: dict[Any, float], routes: list[list[Any]]) -> dict[Any, float]:
    """Centres: as near to their neighbours as the boxes beside them allow."""
    x: dict[Any, float] = {}
    for row in rows:
        _pack(row, dict.fromkeys(row, 0.0), widths, x)
    above, below = _neighbours(routes)
    for sweep in range(4):
        neighbours = above if sweep % 2 == 0 else below
        for row in rows if sweep % 2 == 0 else reversed(rows):
            near = {p: [x[n] for n in neighbours.get(p, ())] or [x[p]] for p in row}
            _pack(row, {p: sum(v) / len(v) for p, v in near.items()}, widths, x)
    left = min((x[p] - widths[p] / 2 for p in x), default=0)
    return {p: round(v - left) for p, v in x.items()}


def _pack(row: list[Any], wanted: dict[Any, float], widths: dict[Any, float], x: dict[Any, float]) -> None:
    edge = float("-inf")
    for place in row:
        x[place] = max(wanted[place], edge + GAP + widths[place] / 2)
        edge = x[place] + widths[place] / 2
    # Long edges give way to boxes, so that a chain of boxes stays straight beside them.
    boxes = [p for p in row if not isinstance(p, tuple)] or row
    drift = sum(wanted[p] - x[p] for p in boxes) / max(len(boxes), 1)
    for place in row:
        x[place] += drift


def _draw(
    rows: list[list[Any]], x: dict[Any, float], widths: dict[Any, float], edges: list[Edge], routes: list[list[Any]]
) -> Placed:
    labelled = 12 if any(e.label for e in edges) else 0
    ports = _ports(routes, x, widths, 40 if labelled else 18)
    lanes: list[dict[Any, int]] = [{} for _ in rows]
    row_of = {p: r for r, row in enumerate(rows) for p in row}
    for route in routes:
        for source, target in itertools.pairwise(route):
            if abs(x[source] - ports[source, target]) > 1:
                lanes[row_of[source]].setdefault(source, len(lanes[row_of[source]]))
    done, y = Placed(), 0.0
    tops = []
    for r, row in enumerate(rows):
        tops.append(y)
        for place in row:
            done.at[place] = (x[place], y)
        y += HEIGHT + 22 + labelled + 7 * len(lanes[r])
    done.height = tops[-1] + HEIGHT if tops else 0
    done.width = max((x[p] + widths[p] / 2 for p in x), default=0)
    for edge, route in zip(edges, routes, strict=True):
        path = [f"M{x[edge.source]:g} {tops[row_of[edge.source]] + HEIGHT:g}"]
        here = x[edge.source]
        for source, target in itertools.pairwise(route):
            r, there = row_of[source], ports[source, target]
            if abs(here - there) > 1:
                path.append(_elbow(here, there, tops[r] + HEIGHT + 10 + 7 * lanes[r].get(source, 0)))
            path.append(f"V{tops[r + 1]:g}")
            here = there
        path.append("m-3 -5l3 5l3 -5")
        done.paths.append((edge, "".join(path), (here, tops[row_of[edge.target]])))
    return done


def _ports(
    routes: list[list[Any]], x: dict[Any, float], widths: dict[Any, float], apart: float
) -> dict[tuple[Any, Any], float]:
    """Where on the top of `target` an edge from `source` arrives: side by side, in the order they come from."""
    above, _ = _neighbours(routes)
    ports: dict[tuple[Any, Any], float] = {}
    for target, sources in above.items():
        come = sorted(dict.fromkeys(sources), key=lambda s: x[s])
        step = min(apart, (widths[target] - 16) / len(come))
        for i, source in enumerate(come):
            ports[source, target] = round(x[target] + (i - (len(come) - 1) / 2) * step)
    return ports


def _elbow(here: float, there: float, y: float) -> str:
    bend = min(4, abs(there - here) / 2) * (1 if there > here else -1)
    return f"V{y - 4:g}Q{here:g} {y:g} {here + bend:g} {y:g}H{there - bend:g}Q{there:g} {y:g} {there:g} {y + 4:g}"


# --- writing SVG ---------------------------------------------------------------------------------


def _svg(
    columns: list[Column],
    notes: list[str],
    title: str,
    embedded: bool,
    across: Iterable[Edge] = (),
    stacked: bool = False,
) -> str:
    body: list[str] = []
    at: dict[str, tuple[float, float, Box]] = {}
    x = y = float(PAD)
    right = bottom = 0.0
    borders: list[tuple[float, float]] = []
    for column in columns:
        placed = _place(column)
        width = max(placed.width, 7 * len(column.title), 6.2 * len(column.note))
        borders.append((x, y))
        body.append(f'<text class="head" x="{x:g}" y="{y + 6:g}">{escape(column.title)}</text>')
        if column.note:
            body.append(f'<text class="sub" x="{x:g}" y="{y + 20:g}">{escape(column.note)}</text>')
        top = y + HEADER
        body += [_edge(e, d, x, top, end) for e, d, end in placed.paths]
        at |= {b.key: (x + placed.at[b.key][0], top + placed.at[b.key][1], b) for b in column.boxes}
        right, bottom = max(right, x + width), max(bottom, top + placed.height)
        x, y = (x, bottom + 2 * PAD) if stacked else (x + width + 3 * PAD, y)
    for x, y in borders[1:]:
        line = f"M{x:g} {y - PAD:g}H{right:g}" if stacked else f"M{x - 1.5 * PAD:g} {PAD}V{bottom:g}"
        body.append(f'<path class="rule" d="{line}"/>')
    body += [_across(e, at) for e in across]
    body += [_box(box, cx, top) for cx, top, box in at.values()]
    for note in notes:
        bottom += 20
        right = max(right, PAD + 6.2 * len(note))
        body.append(f'<text class="sub note" x="{PAD}" y="{bottom:g}">{escape(note)}</text>')
    return document(body, right + PAD, bottom + PAD, title, embedded)


def document(body: list[str], width: float, height: float, title: str, embedded: bool) -> str:
    """An SVG of elements; an embedded one leaves its style to the page."""
    style = "" if embedded else f"<style>{_PAPER}{PALETTE}{STYLE}</style>"
    size = f"{width:.0f} {height:.0f}"
    label = escape(title, {'"': "&quot;"})
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="tg" viewBox="0 0 {size}" width="{size.split()[0]}" '
        f'height="{size.split()[1]}" role="img" aria-label="{label}">{style}'
    )
    return _NOT_XML.sub("\ufffd", "\n".join([head, *body, "</svg>"])) + "\n"


def _box(box: Box, cx: float, top: float) -> str:
    left, mark = cx - box.width / 2, MARKS.get(box.kind, "")
    node = f' data-node="{box.node}"' if box.node is not None else ""
    sign = f'<text class="mark" x="8" y="16">{mark}</text>' if mark else ""
    return (
        f'<g class="{box.kind}"{node} transform="translate({left:g} {top:g})"><title>{escape(box.tip)}</title>'
        f'<rect width="{box.width}" height="{HEIGHT}"/>{sign}'
        f'<text class="head" x="{20 if mark else 8}" y="15">{escape(_cut(box.head))}</text>'
        f'<text class="sub" x="8" y="29">{escape(_cut(box.sub))}</text></g>'
    )


def _edge(edge: Edge, path: str, left: float, top: float, end: tuple[float, float]) -> str:
    kind = f"edge {edge.kind}".strip()
    tip = f"<title>{escape(edge.tip)}</title>" if edge.tip else ""
    parts = [tip, f'<path class="{kind}" d="{path}"/>']
    if edge.label:
        parts.append(f'<text class="label" x="{end[0] + 5:g}" y="{end[1] - 5:g}">{escape(edge.label)}</text>')
    return f'<g transform="translate({left:g} {top:g})">{"".join(parts)}</g>'


def _across(edge: Edge, at: dict[str, tuple[float, float, Box]]) -> str:
    """An edge between lanes: from the side of one box to the facing side of the other."""
    (x1, y1, source), (x2, y2, target) = at[edge.source], at[edge.target]
    side = 1 if x2 > x1 else -1
    x1, x2 = x1 + side * source.width / 2, x2 - side * target.width / 2
    y1, y2, bend = y1 + HEIGHT / 2, y2 + HEIGHT / 2, side * max(24, abs(x2 - x1) / 2)
    path = f"M{x1:g} {y1:g}C{x1 + bend:g} {y1:g} {x2 - bend:g} {y2:g} {x2:g} {y2:g}"
    head = f"m{-5 * side} -3l{5 * side} 3l{-5 * side} 3"
    return _edge(edge, path + head, 0, 0, (x2 - 40 if side > 0 else x2, y2))


def _pass_box(entry: dict[str, Any]) -> Box:
    kind = "context" if entry["present"] else "absent"
    sub = "" if entry["present"] else "not in this pipeline"
    return Box(entry["name"], entry["name"], sub or entry["summary"], kind, entry["summary"] or entry["name"])


def _order_edge(edge: dict[str, Any]) -> Edge:
    tip = f"{edge['from']} runs before {edge['to']}: {edge['kind']}, {edge['site']}"
    return Edge(edge["from"], edge["to"], edge["kind"], "needs" if edge["kind"] == "needs" else "soft", tip)


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
