"""`turbogr diff`: dumped graphs, compared."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import OptionError, did_you_mean
from ..files import read_json, reading
from .common.output import FAILED, show

SUMMARY = "compare dumped graphs: between passes, runs or versions"


def arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("first", help="DIR[/rank0/GRAPH][:STEP], a dump directory or one graph of it")
    command.add_argument("second", help="the same; ':STEP' alone means the same graph at another step")


def run(options: argparse.Namespace) -> int:
    from ..graph.text import diff_text

    first = _graphs_at(options.first)
    second = _graphs_at(options.second if not options.second.startswith(":") else
                        options.first.rpartition(":")[0] + options.second)  # fmt: skip
    names = [n for n in first if n in second] or ([*first][:1] if len(first) == len(second) == 1 else [])
    if not names:
        raise OptionError(f"no graph in common: {', '.join(first)} and {', '.join(second)}")
    others = iter(second.values()) if names[0] not in second else None
    diffs = {}
    for name in names:
        other = second[name] if others is None else next(others)
        diffs[name] = diff_text(first[name], other, (f"{options.first} {name}", f"{options.second} {name}"))
    text = "\n".join(d for d in diffs.values() if d) or "no difference"
    show(options, diffs, text)
    return FAILED if any(diffs.values()) else 0


def _graphs_at(place: str) -> dict[str, str]:
    """Texts of the graphs under a dump directory, at a step or at the end."""
    from ..show.record import snapshot_text

    directory, colon, step = place.rpartition(":") if ":" in place else (place, "", "")
    root = Path(directory)
    levels = [sorted(root.glob(level)) for level in ("record.json", "*/record.json", "rank*/*/record.json")]
    files = next((files for files in levels if files), [])
    if not files:
        raise OptionError(f"{directory!r} is not a dump directory: no record.json in it")
    found = {}
    for file in files:
        with reading(file):
            record = read_json(file, dict)
            steps = record["steps"]
            wanted = steps[-1] if not colon else next(
                (s for s in steps if step in (str(s["number"]), f"{s['number']:03d}", s["name"])), None)  # fmt: skip
            if wanted is None:
                known = [s["name"] for s in steps]
                if len(files) == 1:
                    raise OptionError(f"{record['graph']} has no step {step!r}{did_you_mean(step, known)}; it has "
                                      f"{', '.join(known)}")  # fmt: skip
                continue
            found[str(record["graph"])] = snapshot_text(record, wanted["snapshot"])
    if not found:
        raise OptionError(f"no graph of {directory!r} has a step {step!r}")
    return found
