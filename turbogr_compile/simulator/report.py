"""A simulation as data, as text and as one page for a browser, each with everything that went into it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OptionError
from ..files import replace_file
from ..show.page import render
from ..show.table import table
from . import charts
from .events import RESOURCES
from .figures import PROVENANCES, Figure, assumptions
from .variants import FEATURES, Loads, Outcome, Variant, simulate
from .workload import Compute

NOTE = "Simulated, not measured: no NPU has run this, and the figures are no better than the assumptions below."
PAPER = {
    "scaling": Figure(0.97, "", "paper-reported", "scale and definition not known"),
    "utilisation": Figure(0.94, "", "paper-reported", "NPU utilisation; definition not known"),
}
PAPER_NOTE = (
    "Paper-reported figures (arXiv 2605.13433, abstract) are for another machine, model and data; "
    "they stand beside the simulated ones for orientation, and no agreement is claimed."
)
MODEL = (
    "Each device has four resources (compute, links in the node, links across nodes, host) that serve tasks in the "
    "order of issue; a collective starts when its last member is ready. Utilisation is the share of time in which a "
    "device computes, whatever the efficiency of its kernels: it is not MFU. Scaling is throughput per device over "
    "that of the smallest scale, of the same variant. No failures, no contention between jobs, rows spread evenly over "
    "shards. Replicas of a hierarchical plan stay exact: each node receives every row that any node updated."
)
SHOWN_STEPS = 2
COLUMNS = 118


def run(compute: Compute, variants: Sequence[Variant], scales: Sequence[int], steps: int) -> dict[str, Any]:
    """All variants at all scales, as plain data."""
    loads = Loads(compute.workload, compute, steps)
    outcomes: list[dict[str, Any]] = []
    shown = []
    for variant in variants:
        base = 0.0
        for devices in sorted(scales):
            found = simulate(compute, variant, devices, loads)
            base = base or found.tokens_per_second
            outcomes.append(_facts(found, base))
        shown.append(_timeline(found))
    known = [
        *compute.workload.assumptions(),
        *assumptions(compute.workload, "workload"),
        *assumptions(compute.cluster, "cluster"),
        *compute.calibration.assumptions(),
    ]
    return {
        "note": NOTE,
        "device": compute.calibration.device,
        "steps": steps,
        "scales": sorted(scales),
        "variants": [{"name": v.name, "features": sorted(v.features)} for v in variants],
        "outcomes": outcomes,
        "paper-reported": {name: {"value": float(f), "source": f.source} for name, f in PAPER.items()},
        "assumptions": known,
        "timelines": shown,
    }


def _facts(found: Outcome, base: float) -> dict[str, Any]:
    return {
        "variant": found.variant,
        "devices": found.devices,
        "step_seconds": found.step_seconds,
        "tokens_per_second": found.tokens_per_second,
        "scaling": found.tokens_per_second / base,
        "utilisation": found.usage.compute,
        "exposed_communication": found.usage.communication,
        "exposed_host": found.usage.host,
        "waiting": found.usage.waiting,
        "communicating": found.communicating,
        "mfu": found.mfu,
        "imbalance": found.imbalance,
    }


def _timeline(found: Outcome) -> dict[str, Any]:
    """Tasks of the first device during the last steps."""
    begin = found.end - SHOWN_STEPS * found.step_seconds
    lanes: dict[str, list[tuple[str, float, float]]] = {resource: [] for resource in RESOURCES}
    for task in found.timeline.tasks:
        start, end = np.clip([task.start[0], task.end[0]], begin, found.end)
        if end > start:
            for resource in task.on:
                lanes[resource].append((task.name, float(start - begin), float(end - start)))
    return {
        "variant": found.variant,
        "devices": found.devices,
        "seconds": SHOWN_STEPS * found.step_seconds,
        "lanes": lanes,
    }


# --- text ------------------------------------------------------------------------------------------------


def text(data: dict[str, Any]) -> str:
    """Tables for a terminal."""
    heads = ["variant", "devices", "step", "utilisation", "scaling", "MFU", "exposed comm.", "waiting", "imbalance"]
    rows = []
    for variant in data["variants"]:
        for o in (o for o in data["outcomes"] if o["variant"] == variant["name"]):
            first = o["devices"] == data["scales"][0]
            rows.append([
                o["variant"] if first else "", str(o["devices"]), f"{o['step_seconds'] * 1e3:.1f} ms",
                f"{o['utilisation']:.1%}", f"{o['scaling']:.3f}", f"{o['mfu']:.1%}",
                f"{o['exposed_communication']:.1%}", f"{o['waiting']:.1%}", f"{o['imbalance']:.1%}",
            ])  # fmt: skip
    paper = data["paper-reported"]
    reported = f"{paper['utilisation']['value']:.0%}", f"{paper['scaling']['value']:.2f}"
    rows.append(["paper-reported", "?", "", *reported, "", "", "", ""])
    known = [[a["part"], a["name"], a["text"], a["provenance"], a["source"]] for a in data["assumptions"]]
    meaning = "\n".join(f"  {name}: {what}" for name, what in PROVENANCES.items())
    return "\n\n".join([
        f"{data['device']}, {data['steps']} steps\n{data['note']}",
        table(rows, heads),
        textwrap.fill(PAPER_NOTE, COLUMNS),
        textwrap.fill(MODEL, COLUMNS),
        table(known, ["part", "assumption", "value", "provenance", "source"]),
        f"Provenances\n{meaning}",
    ])  # fmt: skip


# --- page ------------------------------------------------------------------------------------------------


def page(data: dict[str, Any]) -> str:
    """One file, offline, light and dark."""
    styles = _styles([v["name"] for v in data["variants"]], {v["name"]: v["features"] for v in data["variants"]})
    largest = [o for o in data["outcomes"] if o["devices"] == data["scales"][-1]]
    paper = {name: figure["value"] for name, figure in data["paper-reported"].items()}

    def lines(key: str, show: Any) -> str:
        return charts.lines(data["outcomes"], key, styles, paper[key], f"paper-reported  {show(paper[key])}", show)

    return render(
        Path(__file__).with_name("page.html.j2"),
        data=data,
        largest=largest,
        features=FEATURES,
        paper_note=PAPER_NOTE,
        model=MODEL,
        provenances=PROVENANCES,
        styles=styles,
        shares=charts.SHARES,
        utilisation=lines("utilisation", lambda v: f"{v:.0%}"),
        scaling=lines("scaling", lambda v: f"{v:.2f}"),
        bars=charts.shares(largest),
        timelines=charts.timelines(data["timelines"]),
    )


def write_page(path: Path, data: dict[str, Any]) -> None:
    try:
        replace_file(path, page(data))
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror}") from error


def _styles(names: list[str], features: dict[str, list[str]]) -> dict[str, str]:
    """A colour for each variant; with rows inside of nodes it keeps the colour, and is dashed."""
    colours: dict[frozenset[str], str] = {}
    styles = {}
    for name in names:
        base = frozenset(features[name]) - {"hierarchical"}
        colour = colours.setdefault(base, f"c{len(colours) % 7}")
        styles[name] = colour + (" dashed" if "hierarchical" in features[name] else "")
    return styles
