"""`turbogr explain`: what each pass did to a function, or why it did not."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import OptionError, did_you_mean
from .common.model import compiled, model_arguments
from .common.output import show

SUMMARY = "compile a function and explain what each pass did or why it did not"


def arguments(command: argparse.ArgumentParser) -> None:
    model_arguments(command)
    command.add_argument("--rule", metavar="NAME", help="show this pass or rule only")
    command.add_argument("--notes", action="store_true", help="also show what passes and targets noted, such as rows")
    command.add_argument("--html", metavar="DIR", type=Path, help="also write dumps and the viewer page there")


def run(options: argparse.Namespace) -> int:
    from ..show.report import report_text

    report = compiled(options, dump=options.html, on_error="raise")
    records = [_only(r, options.rule) for r in report.records]
    if options.rule and not any(r["steps"][1:] for r in records):
        names = {s["name"] for r in report.records for s in r["steps"]} | {
            w["rule"] for r in report.records for s in r["steps"] for w in (*s["rewrites"], *s["near_misses"])
        }
        raise OptionError(f"no pass or rule named {options.rule!r} ran{did_you_mean(options.rule, names)}")
    page = f"\n\nviewer: {options.html / 'index.html'}" if options.html else ""
    noted = "".join(f"\n\n{text}" for text in _notes(records)) if options.notes else ""
    show(options, records, report_text(records, timing=True) + noted + page)
    return 0


def _notes(records: list[dict[str, Any]]) -> Iterator[str]:
    for record in records:
        for step in record["steps"]:
            for name, text in step.get("notes", {}).items():
                yield f"{record['graph']} {step['name']}: {name}\n{text}"
        for name, text in record.get("texts", {}).items():
            yield f"{record['graph']} target {record['target']}: {name}\n{text}"


def _only(record: dict[str, Any], rule: str | None) -> dict[str, Any]:
    """The record reduced to one pass or rule."""
    if rule is None:
        return record
    steps = [
        s | {k: [x for x in s[k] if rule in (s["name"], x["rule"])] for k in ("rewrites", "near_misses")}
        for s in record["steps"]
        if s["status"] == "input" or rule in (s["name"], *(x["rule"] for x in s["rewrites"] + s["near_misses"]))
    ]
    return record | {"steps": steps, "remarks": [r for r in record["remarks"] if r["pass"] == rule]}
