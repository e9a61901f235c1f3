"""The report: one page about one or several runs. Everything on it is in their folders; nothing is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from turbogr_compile.errors import OptionError
from turbogr_compile.files import replace_file
from turbogr_compile.show.charts import COLOURS, Bar, Series, axis, bars, plot
from turbogr_compile.show.page import render
from turbogr_compile.show.style import PALETTE, STYLE
from turbogr_compile.show.timeline import timeline_svg

from .comparison import Comparison, baseline_of, compare, loss_differences
from .runs import Run, number, read_run
from .words import byte_text, count, factor, loss_text, percent, scientific, seconds_text

MOST_POINTS = 300  # of a line; a picture has no room for more
MOST_REMARKS = 200
ROWS = 8  # of a table that stands beside a curve
# Blue is turbogr's, the baseline is grey; the others of the palette follow.
OURS, BASE, OTHERS = "c3", "c0", ("c1", "c4", "c2", "c5", "c6")
PAPER = (
    ("activation memory", "70 % less"),
    ("latency", "2.2x lower"),
    ("imbalance between devices", "47 % to 2.4 %"),
    ("all-to-all", "75.9 % less"),
    ("NPU utilisation", "94 %"),
    ("MFU", "54.71 %"),
    ("scaling", "0.97"),
)


def write_report(
    runs: Sequence[Path], out: Path, *, title: str = "Training with turbogr", baseline: str | None = None
) -> Path:
    """Read run folders and write the page to `out`; returns its path. `baseline` is the name of a run."""
    if not runs:
        raise OptionError("a report is about runs: name at least one run folder")
    read = [read_run(Path(folder)) for folder in runs]
    out = Path(out)
    page = render(Path(__file__).with_name("page.html.j2"), **page_model(read, title, baseline, out.parent))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_file(out, page)
    except OSError as error:
        raise OptionError(f"cannot write {out}: {error.strerror}") from error
    return out


def page_model(runs: Sequence[Run], title: str, baseline: str | None = None, beside: Path = Path()) -> dict[str, Any]:
    """Everything the page shows, as plain data and pictures."""
    names = _names(runs)
    base = baseline_of(runs, baseline)
    styles = _styles(runs, base)
    compared = [compare(run, base) for run in runs if run is not base]
    shown = [{"name": n, "style": s, "run": r, **_row(r)} for n, s, r in zip(names, styles, runs, strict=True)]
    dashed = dict(zip(map(id, runs), zip(names, styles, strict=True), strict=True))
    return {
        "title": title,
        "runs": shown,
        "baseline": dashed[id(base)][0],
        "totals": _totals(base, compared, dashed),
        "comparisons": [_comparison_row(c, dashed[id(c.run)][0]) for c in compared],
        "charts": _charts(runs, base, dashed),
        "losses": _loss_table(runs, names),
        "options": [{"name": n, "options": _listed(r.facts, "options")} for n, r in zip(names, runs, strict=True)],
        "remarks": _remarks(runs, names),
        "passes": [
            {"name": n, "texts": [p for p in _listed(r.facts, "passes") if isinstance(p, dict)]}
            for n, r in zip(names, runs, strict=True)
            if _listed(r.facts, "passes")
        ],
        "schedules": [
            {"title": f"{n}: {what}", "picture": Markup(timeline_svg(t, f"{n}: {what}", embedded=True))}
            for n, r in zip(names, runs, strict=True)
            for what, t in r.schedules
        ],
        "schedule_style": Markup(PALETTE + STYLE) if any(r.schedules for r in runs) else "",
        "viewers": [
            {"name": n, "link": os.path.relpath(r.viewer, beside)}
            for n, r in zip(names, runs, strict=True)
            if r.viewer is not None
        ],
        "settings": _settings(runs, names),
        "problems": [{"name": n, "texts": r.problems} for n, r in zip(names, runs, strict=True) if r.problems],
        "paper": PAPER,
    }


def _listed(facts: dict[str, Any], name: str) -> list[Any]:
    found = facts.get(name)
    return found if isinstance(found, list) else []


def _names(runs: Sequence[Run]) -> list[str]:
    """Each by its own; runs of the same name get their folder's beside it."""
    names = [run.name for run in runs]
    return [f"{n} ({r.folder.name})" if names.count(n) > 1 else n for n, r in zip(names, runs, strict=True)]


def _styles(runs: Sequence[Run], base: Run) -> list[str]:
    rest = [run for run in runs if run is not base]
    order = (OURS, *OTHERS)
    # The baseline is drawn below and broader, or a curve on top of it would hide it.
    found = {id(base): f"{BASE} below"}
    for i, run in enumerate(rest):
        found[id(run)] = order[i % len(order)] + (" dashed" if i >= len(order) else "")
    assert len(order) < COLOURS
    return [found[id(run)] for run in runs]


def _row(run: Run) -> dict[str, Any]:
    first, last = (run.values("loss") or [(0, math.nan)])[0][1], (run.values("loss") or [(0, math.nan)])[-1][1]
    return {
        "state": "finished" if run.finished else "not finished",
        "reason": run.reason,
        "steps": len(run.steps),
        "first_loss": loss_text(first),
        "last_loss": loss_text(last),
        "seconds": seconds_text(run.seconds()),
        "throughput": count(run.tokens_per_second()),
        "mfu": percent(run.mfu()),
        "memory": byte_text(run.peak_memory()),
        "padding": percent(run.padding()),
        "hr": percent(run.quality("hr@10"), 2),
        "ndcg": percent(run.quality("ndcg@10"), 2),
        "parameters": _parameters(run.facts.get("parameters")),
    }


def _parameters(known: Any) -> str:
    if not isinstance(known, dict):
        return "–"
    return ", ".join(f"{count(number(v))} {k}" for k, v in known.items())


# --- headline ------------------------------------------------------------------------------------------


def _totals(base: Run, compared: Sequence[Comparison], named: dict[int, tuple[str, str]]) -> list[tuple[str, str]]:
    """Big figures and what they are. About the first run beside the baseline, or the only one."""
    if not compared:
        parts = [
            (loss_text(base.values("loss")[-1][1]) if base.values("loss") else "–", "last loss"),
            (count(base.tokens_per_second()), "items a second"),
            (byte_text(base.peak_memory()), "peak memory above the start"),
            (percent(base.padding()), "of the padded positions hold no item"),
            (percent(base.mfu()), "MFU, of the measured speed of a matrix product"),
        ]
        return [part for part in parts if part[0] != "–"]
    first = compared[0]
    ours, theirs = named[id(first.run)][0], named[id(base)][0]
    alone = f"{theirs} has no figure for it"
    memory, other = first.run.peak_memory(), base.peak_memory()
    against = f"{byte_text(memory)} instead of {byte_text(other)}" if other is not None else alone
    difference = first.largest_difference
    parts = [
        (factor(first.speedup), f"faster a step than {theirs}, median of single ratios"),
        (factor(other / memory) if other and memory else byte_text(memory), f"less peak memory: {against}"),
        (percent(first.run.padding()), f"of the positions are pads, which {ours} need not compute"),
        (percent(first.run.mfu()), f"MFU of {ours}; {theirs} {percent(base.mfu())}"),
        (scientific(difference), f"largest difference of the losses in {first.same_steps} steps"),
    ]
    return [part for part in parts if part[0] != "–"]


def _comparison_row(one: Comparison, name: str) -> dict[str, str]:
    where = f", at step {one.largest_at}" if one.largest_at is not None else ""
    relative = f" ({scientific(one.relative_difference)} of the loss)" if one.relative_difference is not None else ""
    return {
        "name": name,
        "speedup": factor(one.speedup),
        "memory": percent(one.memory_saved),
        "difference": f"{scientific(one.largest_difference)}{where}{relative}",
        "steps": str(one.same_steps),
    }


# --- pictures ------------------------------------------------------------------------------------------


def _charts(runs: Sequence[Run], base: Run, named: dict[int, tuple[str, str]]) -> dict[str, Markup | None]:
    # The baseline first: what is drawn later lies on top.
    order = sorted(runs, key=lambda r: r is not base)

    def over_steps(title: str, of: Callable[[Run], list[tuple[int, float]]], show: Callable[[float], str],
                   skip: Run | None = None, zero: bool = False, most: bool = False) -> Markup | None:  # fmt: skip
        drawn = [
            Series(named[id(r)][0], thinned(of(r), most), named[id(r)][1]) for r in order if r is not skip and of(r)
        ]
        return _plot(title, drawn, show, zero)

    quality = {}
    for key, title in (("hr@10", "HR@10"), ("ndcg@10", "NDCG@10")):
        drawn = []
        for r in order:
            points = [(e["step"], v) for e in r.evals if (v := number(e.get(key))) is not None]
            name, style = named[id(r)]
            tips = [f"{name}, step {step}: {percent(v, 2)}" for step, v in points]
            drawn += [Series(name, points, style, tips)] if points else []
        quality[key.split("@")[0]] = _plot(title, drawn, lambda v: percent(v, 1), zero=True, dots=True)

    def per_run(title: str, of: Callable[[Run], float | None], show: Callable[[float | None], str]) -> Markup | None:
        rows = [Bar(named[id(r)][0], of(r), show(of(r)), named[id(r)][1]) for r in order]
        return Markup(bars(title, rows, width=380)) if any(b.length is not None for b in rows) else None

    return {
        "loss": over_steps("Loss of each step", lambda r: r.values("loss"), axis_text),
        "difference": over_steps(
            "Distance of the losses from the baseline's", lambda r: _distances(r, base), scientific,
            skip=base, zero=True, most=True,
        ),
        "seconds": per_run("Median time of a step", lambda r: r.seconds(), seconds_text),
        "throughput": per_run("Items a second", lambda r: r.tokens_per_second(), count),
        "memory": per_run("Peak memory", lambda r: r.peak_memory(), byte_text),
        **quality,
    }  # fmt: skip


def _distances(run: Run, base: Run) -> list[tuple[int, float]]:
    return [(step, abs(d)) for step, d in loss_differences(run, base)]


def _plot(
    title: str, drawn: Sequence[Series], show: Callable[[float], str], zero: bool, dots: bool = False
) -> Markup | None:
    values = [v for s in drawn for _, v in s.points if math.isfinite(v)]
    if not values:
        return None
    steps = [float(step) for s in drawn for step, _ in s.points]
    x = axis(steps, lambda v: f"{v:g}")
    return Markup(plot(title, drawn, x, axis(values, show, zero), "step", dots=dots, left=76))


def thinned(points: Sequence[tuple[int, float]], most: bool = False) -> list[tuple[float, float]]:
    """At most MOST_POINTS: neighbours become their mean, or their largest, so that no outlier of a distance is lost."""
    width = math.ceil(len(points) / MOST_POINTS)
    if width <= 1:
        return [(float(step), value) for step, value in points]
    found = []
    for i in range(0, len(points), width):
        group = points[i : i + width]
        values = [v for _, v in group]
        found.append((float(group[-1][0]), max(values) if most else sum(values) / len(values)))
    return found


def axis_text(value: float) -> str:
    return f"{value:.4g}"


# --- tables --------------------------------------------------------------------------------------------


def _loss_table(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """Losses of a few steps, evenly spread: the curves as numbers."""
    curves = [dict(run.values("loss")) for run in runs]
    steps = sorted(set().union(*curves))
    if not steps:
        return {"head": [], "rows": []}
    places = sorted({round(i * (len(steps) - 1) / max(min(ROWS, len(steps)) - 1, 1)) for i in range(ROWS)})
    chosen = [steps[p] for p in places if p < len(steps)]
    rows = [[str(step), *(loss_text(c[step], 6) if step in c else "–" for c in curves)] for step in chosen]
    return {"head": ["step", *names], "rows": rows}


def _remarks(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """In the order of the source, once each: graphs of one model repeat themselves."""
    found: dict[tuple[str, ...], None] = {}
    for name, run in zip(names, runs, strict=True):
        for remark in _listed(run.facts, "remarks"):
            if isinstance(remark, dict):
                fields = tuple(str(remark.get(k) or "") for k in ("line", "kind", "pass", "text", "hint"))
                found.setdefault((*fields, name))
    keys = ("line", "kind", "pass", "text", "hint", "run")
    shown = [dict(zip(keys, remark, strict=True)) for remark in found]
    return {"shown": shown[:MOST_REMARKS], "left": max(len(shown) - MOST_REMARKS, 0)}


def _settings(runs: Sequence[Run], names: Sequence[str]) -> list[dict[str, Any]]:
    """Configuration, machine and versions; a value that all runs share is written once."""
    found = []
    for part, title in (("config", "configuration"), ("machine", "machine"), ("versions", "versions")):
        values: list[dict[str, Any]] = [v if isinstance(v := run.facts.get(part), dict) else {} for run in runs]
        keys = list(dict.fromkeys(key for v in values for key in v))
        rows = []
        for key in keys:
            texts = [_text(v[key]) if key in v else "–" for v in values]
            rows.append({"key": key, "same": len(set(texts)) == 1, "texts": texts})
        if rows:
            found.append({"title": title, "names": list(names), "rows": rows})
    return found


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
