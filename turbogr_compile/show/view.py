"""The viewer: one HTML page, offline, made from the records of a dump directory.

Python prepares the data (totals, ranking, pictures) and the page draws only what is looked at. Nothing of the user's
text ever becomes markup: data travels as JSON, the script inserts it as text, and the page's content policy lets
no other script run and nothing be loaded.
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ..errors import TurbogrError
from ..files import read_json, replace_file
from .diagram import before_of, change_svg, order_svg, snapshot_of
from .record import FORMAT
from .style import PALETTE, STYLE
from .timeline import timeline_svg

PICTURES = 1_200_000  # characters of embedded pictures; single rewrites go without beyond that
ROLES = ("captured", "joint", "forward", "backward", "inference")


def write_view(directory: Path) -> Path:
    """Make `index.html` of a dump directory from its run.json and records; returns its path."""
    directory = Path(directory)
    run = _read(directory / "run.json")
    records = []
    for path in directory.glob("*/*/record.json"):
        record = _read(path)
        if record.get("format") != FORMAT:
            found = record.get("format")
            raise TurbogrError(f"{path} has format {found}, this turbogr reads {FORMAT}: compile again to renew it")
        records.append({"rank": path.parent.parent.name.removeprefix("rank"), **record})
    records.sort(key=_place_of)
    page = directory / "index.html"
    replace_file(page, render(records, run))
    return page


def render(records: list[dict[str, Any]], run: dict[str, Any]) -> str:
    """The page as text; `records` as documented in record.py, `run` as in run.json."""
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    script = environment.get_template("view.js.j2").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("view.html.j2").render(
        data=Markup(_json(page_model(records, run))),
        style=Markup(PALETTE + STYLE + environment.get_template("view.css.j2").render()),
        script=Markup(script),
        script_digest=digest,
        graphs=len(records),
    )


def page_model(records: list[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any]:
    """Everything the page shows, as plain data."""
    album = _Album()
    graphs = [_graph(record, album) for record in records]
    for record, graph in zip(records, graphs, strict=True):
        _rewrite_pictures(record, graph, album)
    return {"run": run, "totals": totals(records), "graphs": graphs, "pictures": album.pictures}


def totals(records: list[dict[str, Any]]) -> dict[str, int]:
    """Numbers of the first screen. A pass that runs on several graphs counts once."""
    steps = [s for r in records for s in r["steps"]]
    return {
        "graphs": len(records),
        "ran": len({s["name"] for s in steps if s["status"] in ("changed", "unchanged")}),
        "fired": len({s["name"] for s in steps if s["status"] == "changed"}),
        "skipped": len({s["name"] for s in steps if s["status"] == "skipped"}),
        "failed": len({s["name"] for s in steps if s["status"] == "failed"}),
        "rewrites": sum(len(s["rewrites"]) for s in steps),
        "near_misses": sum(len(s["near_misses"]) for s in steps),
        "remarks": sum(len(r["remarks"]) for r in records),
    }


def ranked_misses(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Near misses of a graph, the nearest first, each with the number of its step."""
    found = [{**miss, "step": step["number"]} for step in record["steps"] for miss in step["near_misses"]]
    return sorted(found, key=lambda m: (-m["matched"] / max(m["total"], 1), len(m["obstacles"]), -m["total"]))


def _graph(record: dict[str, Any], album: _Album) -> dict[str, Any]:
    rank, number = str(record.get("rank", 0)), _number(record)
    name = record["graph"] if number != record["graph"] else f"{number}-{record['role']}"
    steps: list[dict[str, Any]] = []
    timelines: list[dict[str, Any]] = []
    for i, step in enumerate(record["steps"]):
        before, after = before_of(record, i), snapshot_of(record, i)
        shown = {k: v for k, v in step.items() if k not in ("near_misses", "snapshot", "timeline")}
        picture = album.add(_picture(record, before, after, step["name"])) if before != after else None
        misses = len(step["near_misses"])
        steps.append({**shown, "misses": misses, "before": before, "after": after, "picture": picture})
        if "timeline" in step:
            timelines.append(_timeline(step, album))
    order = record["order"]
    return {
        "key": f"rank{rank}/{name}", "name": name, "rank": rank, "graph": number, "role": record["role"],
        "nodes": [{k: v for k, v in n.items() if k != "args" and v not in ("", None, [])} for n in record["nodes"]],
        "lines": record["lines"],
        "snapshots": edits(record["snapshots"]),
        "steps": steps,
        "misses": ranked_misses(record),
        "remarks": record["remarks"],
        "texts": record.get("texts", {}),
        "timelines": timelines,
        "order": album.add(order_svg(order, embedded=True)) if order["passes"] else None,
        "edges": order["edges"],
    }  # fmt: skip


def _timeline(step: dict[str, Any], album: _Album) -> dict[str, Any]:
    """A picture, and what runs beside the compute as rows for those who cannot see it."""
    *_, last = step["timeline"]["arms"]
    beside = [
        {**b, "exposed": sum(w["end"] - w["start"] for w in last["waits"] if b["name"] in w["for"].split(", "))}
        for b in last["blocks"]
        if b["stream"] != "compute"
    ]
    picture = timeline_svg(step["timeline"], f"{step['name']}: schedule by estimate", embedded=True)
    return {"step": step["number"], "name": step["name"], "picture": album.add(picture), "beside": beside}


def edits(snapshots: list[list[int]]) -> list[list[list[Any]]]:
    """Each snapshot as [position, how many to drop, ids to put there] against the one before.

    A page then grows with what changed, not with the size of the graph times the number of rewrites.
    """
    result, before = [], list[int]()
    for after in snapshots:
        blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        result.append([[i, j - i, after[k:m]] for tag, i, j, k, m in blocks if tag != "equal"])
        before = after
    return result


def _rewrite_pictures(record: dict[str, Any], graph: dict[str, Any], album: _Album) -> None:
    """A picture for each single rewrite, as long as the page stays light."""
    for step in graph["steps"]:
        before, drawn = step["before"], []
        for number, rewrite in enumerate(step["rewrites"], 1):
            after = rewrite.get("snapshot")
            picture = None
            if after is not None and after != before and len(step["rewrites"]) > 1 and album.room:
                picture = album.add(_picture(record, before, after, f"{step['name']} {number}"))
            drawn.append({**rewrite, "picture": picture})
            before = before if after is None else after
        step["rewrites"] = drawn


def _picture(record: dict[str, Any], before: int, after: int, title: str) -> str:
    """For the narrow panel: one node of surroundings; the files beside the page show more."""
    return change_svg(record, before, after, title, hops=1, embedded=True)


class _Album:
    """Pictures of a page, each stored once: ranks of a job usually draw the same ones."""

    def __init__(self) -> None:
        self.pictures: list[str] = []
        self._places: dict[str, int] = {}
        self._size = 0

    @property
    def room(self) -> bool:
        return self._size < PICTURES

    def add(self, picture: str) -> int:
        if picture not in self._places:
            self._places[picture] = len(self.pictures)
            self.pictures.append(picture)
            self._size += len(picture)
        return self._places[picture]


def _json(data: Any) -> str:
    """JSON that cannot end or reopen the script element it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _number(record: dict[str, Any]) -> str:
    """'0.0' of graph '0.0-forward'."""
    return record["graph"].replace(f"-{record['role']}", "", 1)


def _place_of(record: dict[str, Any]) -> tuple[Any, ...]:
    """Ranks and graphs by number ('10.0' after '2.0'), roles in the order of the road."""
    role = ROLES.index(record["role"]) if record["role"] in ROLES else len(ROLES)
    return _natural(record["rank"]), _natural(_number(record)), role, record["role"]


def _natural(text: Any) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(text)) if part]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = read_json(path, dict)
        return found
    except FileNotFoundError:
        raise TurbogrError(
            f"no {path.name} in {path.parent}: not a dump directory; make one with options={{'dump': '...'}}"
        ) from None
    except ValueError as error:
        raise TurbogrError(f"cannot read {path}: {error}; remove that directory and compile again") from error
