"""Tables of a run, from its JSON.

python benchmarks/report.py results.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import PEAK, peak_speed, seconds, system_share
from plan import OPTIMIZER, STEP, TRAINING

UNITS = {"ms": 1e3, "s": 1.0}
BUSY = 0.03  # share of the processors that others may take before the figures are not worth much
Run = dict[str, Any]  # one table under one allocator with one number of threads


@dataclass(frozen=True)
class Sheet:
    """A table of texts: the first `labels` columns to the left, figures to the right."""

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str]
    labels: int = 2


def sheets(results: dict[str, Any]) -> Iterator[Sheet]:
    """All tables of a run, and at the end what the allocator does to them."""
    for run in results["runs"]:
        yield sheet(run)
    yield from allocator(results["runs"])


# --- one table ---------------------------------------------------------------------------------------


def sheet(run: Run) -> Sheet:
    ways = way_names(run)
    over = [way for way in run["against"] if way in ways]
    has_floor, has_flops = OPTIMIZER in ways, any(group["flops"] for group in run["groups"])
    head = ["", "", *ways, *(f"over {way}" for way in over)]
    head += ["MFU"] * has_flops + ["floor", f"limit over {over[0]}"] * has_floor
    rows, last = [], None
    for group in run["groups"]:
        row = ["" if group["name"] == last else group["name"], group["part"]]
        row += [figure(time_of(run, group, way), run["unit"]) for way in ways]
        row += [ratio_text(ratio(run, group, way)) for way in over]
        row += [share(utilisation(run, group))] * has_flops
        if has_floor:
            least = floor(run, group)
            row += [figure(least, run["unit"]), ratio_text(_divided(time_of(run, group, over[0]), least))]
        rows.append(row)
        last = group["name"]
    return Sheet(f"{run['title']} · {conditions(run)}", head, rows, notes(run))


def conditions(run: Run) -> str:
    threads = "1 thread" if run["threads"] == 1 else f"{run['threads']} threads"
    clock = "processor time" if run["threads"] == 1 else "wall time"
    counts = {len(s["wall"]) for g in run["groups"] for s in g["ways"].values() if "wall" in s}
    return f"{run['malloc']} malloc · {threads}, {clock} in {run['unit']} · medians of {_span(counts)} rounds"


def notes(run: Run) -> list[str]:
    found = [run["about"]]
    peaks = [peak_speed(g["ways"], run["threads"]) / 1e9 for g in run["groups"] if "wall" in g["ways"].get(PEAK, {})]
    if peaks:
        found.append(f"MFU is of the best matrix product in the same rounds: {_span(peaks)} GFLOP/s.")
    for group in run["groups"]:
        found += [f"{group['name']}: {note}" for note in group["notes"]]
    for (way, why), parts in failures(run).items():
        found.append(f"{way}, {' and '.join(parts)}: {why}")
    if (run["neighbours"] or 0) > BUSY:
        found.append(f"Other processes took {run['neighbours']:.0%} of the processors meanwhile: measure again.")
    return found


def failures(run: Run) -> dict[tuple[str, str], list[str]]:
    """Ways that did not run and why, with the parts where that was so."""
    found: dict[tuple[str, str], list[str]] = {}
    for group in run["groups"]:
        for way, samples in group["ways"].items():
            parts = found.setdefault((way, samples["failed"]), []) if "failed" in samples else []
            parts += [group["part"]] * (group["part"] not in parts)
    return found


def way_names(run: Run) -> list[str]:
    return list(dict.fromkeys(way for group in run["groups"] for way in group["ways"] if way != PEAK))


def time_of(run: Run, group: dict[str, Any], way: str) -> float | None:
    samples = group["ways"].get(way)
    return seconds(samples, run["threads"]) if samples else None


def ratio(run: Run, group: dict[str, Any], way: str) -> float | None:
    """How many times faster ours is."""
    return _divided(time_of(run, group, way), time_of(run, group, run["ours"]))


def utilisation(run: Run, group: dict[str, Any], way: str | None = None) -> float | None:
    took = time_of(run, group, way or run["ours"])
    if not group["flops"] or took is None:
        return None
    return group["flops"] / took / peak_speed(group["ways"], run["threads"])


def floor(run: Run, group: dict[str, Any]) -> float | None:
    optimizer = time_of(run, group, OPTIMIZER)
    if not group["flops"] or optimizer is None:
        return None
    return group["flops"] / peak_speed(group["ways"], run["threads"]) + optimizer


# --- the allocator -----------------------------------------------------------------------------------


def allocator(runs: list[Run]) -> Iterator[Sheet]:
    """The same processor time under glibc's defaults and with large blocks kept, for what both have measured."""
    rows: list[list[str]] = []
    for default in (run for run in runs if run["malloc"] == "default" and run["threads"] == 1):
        kept = [r for r in runs if r["malloc"] == "tuned" and r["threads"] == 1 and r["table"] == default["table"]]
        tuned = {(group["name"], group["part"]): group for run in kept for group in run["groups"]}
        for group in default["groups"]:
            other = tuned.get((group["name"], group["part"]))
            if other is not None and group["part"] in (TRAINING, STEP):
                rows += _compared(default, group, other)
    if rows:
        head = ["", "", "default ms", "in the system", "tuned ms", "in the system", "default over tuned"]
        yield Sheet("What the allocator costs · 1 thread, processor time", head, rows, [])


def _compared(run: Run, default: dict[str, Any], tuned: dict[str, Any]) -> Iterator[list[str]]:
    name = f"{run['table']}, {default['name']}"
    for way in way_names({"groups": [default]}):
        before, after = time_of(run, default, way), time_of(run, tuned, way)
        if before is not None and after is not None:
            shares = [share(system_share(group["ways"][way])) for group in (default, tuned)]
            figures = [figure(before, "ms"), shares[0], figure(after, "ms"), shares[1], ratio_text(before / after)]
            yield [name, way, *figures]
            name = ""


# --- text --------------------------------------------------------------------------------------------


def _span(numbers: Collection[float]) -> str:
    low, high = f"{min(numbers, default=0):.0f}", f"{max(numbers, default=0):.0f}"
    return low if low == high else f"{low} to {high}"


def _divided(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None else None


def figure(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    value *= UNITS[unit]
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def text(shown: Sheet) -> str:
    heads = [_folded(words) for words in shown.head]
    height = max(map(len, heads))
    lines = [[("" if i < height - len(h) else h[i - height + len(h)]) for h in heads] for i in range(height)]
    body = aligned([*lines, *shown.rows], shown.labels)
    return "\n".join([shown.title, *body[:height], "─" * max(map(len, body)), *body[height:], *shown.notes]) + "\n"


def _folded(head: str, width: int = 9) -> list[str]:
    """Heads of columns on several lines, or a table would not fit a terminal."""
    lines: list[str] = []
    for word in head.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines or [""]


def aligned(rows: list[list[str]], labels: int = 1) -> list[str]:
    """Columns of equal width, the first ones to the left and figures to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def cell(text: str, i: int) -> str:
        return text.ljust(widths[i]) if i < labels else text.rjust(widths[i])

    return ["  ".join(cell(text, i) for i, text in enumerate(row)).rstrip() for row in rows]


def about(machine: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" if name not in ("cpu", "isa") else str(value) for name, value in machine.items())


def markdown(shown: Sheet) -> str:
    rule = ["---"] * shown.labels + ["---:"] * (len(shown.head) - shown.labels)
    lines = [f"| {' | '.join(cells)} |" for cells in (shown.head, rule, *shown.rows)]
    return "\n".join([f"**{shown.title}**", "", *lines, "", *(f"{note}  " for note in shown.notes)]) + "\n"


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("results", type=Path, help="JSON of benchmarks/kernels.py")
    words.add_argument("--markdown", action="store_true")
    options = words.parse_args()
    results = read(options.results)
    print(about(results["machine"]), end="\n\n")
    print("\n".join((markdown if options.markdown else text)(shown) for shown in sheets(results)))


def read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read results from {path}: {error}")


if __name__ == "__main__":
    main()
