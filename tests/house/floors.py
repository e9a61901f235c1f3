"""The contract of pyproject.toml, read; and the floors of the house drawn from it for docs/architecture.md.

python tests/house/floors.py --write        put the drawing into the document
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

try:
    import tomllib
except ImportError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- floors: drawn from the contract in pyproject.toml -->\n", "<!-- end of floors -->"
SAYS = {
    "commands": "the command line, one file per command",
    "benchmarks": "measured comparisons and small programs",
    "training": "the main job: data, models, loop, report",
    "testing": "helpers for authors of rules and passes",
    "api": "compile, explain, replay",
    "backend": "one Dynamo graph on its road to a target",
    "deferral": "outputs that wait: record, tensor, step, flush, liveness, model",
    "passes": "one pass per file │ one target per file │ discrete-event simulation",
    "check": "instruments that judge: verify, numerics, validate, bisection",
    "rules": "declarative rewrites │ instruments that tell: records, dumps, viewer",
    "runtime": "around a step: prologue, ahead, draws, ranks, sharding, balance",
    "pipeline": "passes as values, order, manager, options, the target protocol",
    "capture": "Dynamo's graph → functional ATen → one normal form",
    "graph": "nodes, sizes, metadata, user lines, costs, text",
    "kernels": "ops of the turbogr namespace │ every private torch API │ sampled losses",
    "registry": "rooms, and things found in them by name",
    "files": "files that are never half written │ errors │ torch.ops.turbogr on demand",
}


def contract() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["tool"]["importlinter"]


def floors() -> list[list[str]]:
    """Rooms from the roof down; those of one floor do not know each other."""
    house = next(c for c in contract()["contracts"] if c["name"].startswith("the house"))
    return [[room.strip(" ()") for room in floor.split("|")] for floor in house["layers"]]


def drawing() -> str:
    names = [" │ ".join(floor) for floor in floors()]
    width = max(map(len, names))
    rows = [f"{name:<{width}}   {SAYS[floor[0]]}" for name, floor in zip(names, floors(), strict=True)]
    return "```\n" + "\n".join(rows) + "\n```\n"


def written() -> str:
    """What the document shows now."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


def write() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(text.replace(BEGIN + written() + END, BEGIN + drawing() + END), encoding="utf-8")


if __name__ == "__main__":
    write() if "--write" in sys.argv else sys.stdout.write(drawing())
