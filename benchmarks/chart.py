"""Pictures of a run, from its JSON: one page for a browser, offline, and one overview as SVG.

python benchmarks/chart.py results.json [--html results.html] [--svg overview.svg]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import report
from plan import OPTIMIZER, OURS, STEP, TRAINING
from report import Run, Sheet

BAR, GAP, NAMES, LENGTH, FIGURES = 18, 8, 200, 300, 140  # pixels: heights, then widths of the three columns
INK, DIM, GREY, ACCENT, LINE = "#1f2328", "#59636e", "#b8c1cc", "#0a66c2", "#d1d9e0"
FONT = "font-family:system-ui,'Segoe UI','DejaVu Sans',sans-serif"
PAGE = f"""\
body {{ {FONT}; color:{INK}; background:#fff; margin:2rem auto; max-width:1400px; padding:0 1.5rem; line-height:1.45 }}
h1 {{ font-size:1.5rem; margin-bottom:.2rem }} h2 {{ font-size:1.15rem; margin:2.4rem 0 .2rem }}
p {{ color:{DIM}; max-width:60rem; margin:.3rem 0 }}
.panels {{ display:flex; flex-wrap:wrap; gap:.6rem 1.6rem; margin:.8rem 0 }}
details {{ margin:.6rem 0 }} summary {{ cursor:pointer; color:{ACCENT} }}
.wide {{ overflow-x:auto }}
table {{ border-collapse:collapse; font-size:.82rem; margin:.4rem 0; font-variant-numeric:tabular-nums }}
caption {{ text-align:left; font-weight:600; padding:.7rem 0 .3rem; white-space:nowrap }}
th, td {{ padding:.2rem .6rem; border-bottom:1px solid {LINE}; text-align:right; vertical-align:bottom }}
th {{ font-weight:500; color:{DIM} }} .label {{ text-align:left; white-space:nowrap }}
"""


@dataclass(frozen=True)
class Bar:
    name: str
    length: float | None  # None: there is none to show
    figure: str
    ours: bool = False


def html(results: dict[str, Any]) -> str:
    """The whole page."""
    shown = {run["table"]: run for run in headline(results["runs"])}
    sections = "".join(section(run, results["runs"]) for run in shown.values())
    costs = "".join(f'<div class="wide">{html_table(sheet)}</div>' for sheet in report.allocator(results["runs"]))
    costs = f"<h2>What the allocator costs</h2><p>{ALLOCATOR}</p>{costs}" if costs else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>turbogr: kernels on the CPU</title>'
        f"<style>{PAGE}</style><body><h1>turbogr: kernels on the CPU</h1>"
        f"<p>{escape(report.about(results['machine']))}</p>"
        f'<div class="panels">{overview(results)}</div>{sections}{costs}</body></html>\n'
    )


ALLOCATOR = (
    "By default glibc gives large blocks back to the system and takes them anew in every step, page by page. "
    "Padded models pay most for it. The pictures above are of runs with large blocks kept."
)


def headline(runs: list[Run]) -> list[Run]:
    """Of each table, what was measured with most threads, and with large blocks kept where there is a choice."""
    best: dict[str, Run] = {}
    for run in runs:
        known = best.get(run["table"])
        if known is None or _rank(run) > _rank(known):
            best[run["table"]] = run
    return list(best.values())


def _rank(run: Run) -> tuple[int, bool]:
    return run["threads"], run["malloc"] == "tuned"


def section(run: Run, runs: list[Run]) -> str:
    pictures = "".join(panel(run, group) for group in run["groups"])
    same = [report.sheet(other) for other in runs if other["table"] == run["table"]]
    tables = "".join(f'<div class="wide">{html_table(sheet)}</div>' for sheet in same)
    notes = "".join(f"<p>{escape(note)}</p>" for note in report.notes(run))
    return (
        f"<h2>{escape(run['title'])}</h2><p>{escape(report.conditions(run))}</p>{notes}"
        f'<div class="panels">{pictures}</div><details><summary>all figures</summary>{tables}</details>'
    )


def html_table(sheet: Sheet) -> str:
    def row(cells: list[str], tag: str) -> str:
        kinds = [' class="label"' if i < sheet.labels else "" for i in range(len(cells))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    body = "".join(f"<tr>{row(cells, 'td')}</tr>" for cells in sheet.rows)
    return f"<table><caption>{escape(sheet.title)}</caption><tr>{row(sheet.head, 'th')}</tr>{body}</table>"


# --- pictures ----------------------------------------------------------------------------------------


def overview(results: dict[str, Any]) -> str:
    """How many times faster than the padded way that is listed first, for training."""
    bars = [bar for run in headline(results["runs"]) for bar in _speedups(run)]
    if not bars:
        return ""
    under = report.conditions(next(run for run in headline(results["runs"]) if _speedups(run)))
    return picture("Forward and backward: times faster than the padded way", under, bars, names=430)


def _speedups(run: Run) -> list[Bar]:
    if run["ours"] != OURS:
        return []
    base = run["against"][0]
    found = []
    for group in run["groups"]:
        times = report.ratio(run, group, base)
        if group["part"] in (TRAINING, STEP) and times is not None and "padded" in base:
            share = report.utilisation(run, group)
            figure = f"{times:.1f}x" + (f"   MFU {share:.0%}" if share is not None else "")
            found.append(Bar(f"{run['table']}, {group['name']}, over {base}", times, figure, ours=True))
    return found


def panel(run: Run, group: dict[str, Any]) -> str:
    """Time of each way, and how many times faster ours is."""
    under = f"{run['unit']}; x: {run['ours']} is that many times faster"
    return picture(f"{group['name']}, {group['part']}", under, list(_times(run, group)))


def _times(run: Run, group: dict[str, Any]) -> Iterator[Bar]:
    ours = report.time_of(run, group, run["ours"])
    for way in report.way_names({"groups": [group]}):
        took = report.time_of(run, group, way)
        if took is None or ours is None:
            yield Bar(way, None, "does not run")
        elif way == run["ours"]:
            share = report.utilisation(run, group)
            figure = report.figure(took, run["unit"]) + (f"   MFU {share:.0%}" if share is not None else "")
            yield Bar(way, took, figure, ours=True)
        else:
            over = "" if way == OPTIMIZER else f"   {report.ratio_text(took / ours)}"
            yield Bar(way, took, report.figure(took, run["unit"]) + over)
    if (least := report.floor(run, group)) is not None:
        yield Bar("floor", least, report.figure(least, run["unit"]))


def picture(title: str, under: str, bars: list[Bar], names: int = NAMES) -> str:
    """Horizontal bars on one linear scale from zero."""
    top, width = 48, names + LENGTH + FIGURES
    height = top + len(bars) * (BAR + GAP)
    longest = max((bar.length for bar in bars if bar.length is not None), default=1.0)
    parts = [
        f'<text x="0" y="16" font-weight="600" fill="{INK}">{escape(title)}</text>',
        f'<text x="0" y="34" font-size="12" fill="{DIM}">{escape(under)}</text>',
    ]
    for number, bar in enumerate(bars):
        y = top + number * (BAR + GAP)
        long = 0.0 if bar.length is None else max(1.0, bar.length / longest * LENGTH)
        weight, colour = ("600", ACCENT) if bar.ours else ("400", GREY)
        parts += [
            f'<text x="{names - 10}" y="{y + 14}" text-anchor="end" font-weight="{weight}" fill="{INK}">'
            f"{escape(bar.name)}</text>",
            f'<rect x="{names}" y="{y}" width="{long:.1f}" height="{BAR}" rx="2" fill="{colour}"/>',
            f'<text x="{names + long + 8:.1f}" y="{y + 14}" font-weight="{weight}" fill="{INK if bar.length else DIM}" '
            f'xml:space="preserve">{escape(bar.figure)}</text>',
        ]
    parts.append(f'<line x1="{names}" x2="{names}" y1="{top - 4}" y2="{height}" stroke="{DIM}"/>')
    size = f'width="{width + 24}" height="{height + 16}" viewBox="-12 -4 {width + 24} {height + 16}"'
    look = f'style="{FONT};background:#fff" font-size="13"'
    label = f'role="img" aria-label="{escape(title)}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {look} {label}>{"".join(parts)}</svg>'


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("results", type=Path)
    words.add_argument("--html", type=Path)
    words.add_argument("--svg", type=Path)
    options = words.parse_args()
    results = report.read(options.results)
    if options.html:
        options.html.write_text(html(results), encoding="utf-8")
    if options.svg:
        options.svg.write_text(overview(results) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
