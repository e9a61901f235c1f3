"""python -m tests.plant.table *.jsonl: which guard caught how many faults of which module, as a table for the docs."""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch

from turbogr_compile.passes.rows.declaration import _DECLARED as DECLARED

from .__main__ import UNNOTICED, answers
from .faults import source_of

CAUGHT = ("programs", "aimed", "database", "tests")
LEFT = ("fails", "slower", "less", "same", "unchanged", "unreached")
NAMES = {
    "programs": "wrong in a program of the sweep", "aimed": "wrong in an aimed program", "database": "torch's database",
    "tests": "rule tests", "fails": "fails aloud", "slower": "only slower",
    "less": "says less, or the same", "same": "graph changes, numbers do not",
    "unchanged": "nothing changes", "unreached": "not reached",
}  # fmt: skip


def outcome(answer: dict[str, Any]) -> str:
    """The guard that caught it, or what is known of it."""
    if answer.get("ops"):
        return "database"
    if answer.get("test"):
        return "tests"
    if answer["verdict"] == "wrong":
        return "aimed" if answer.get("by", "").startswith("aimed") else "programs"
    if answer["verdict"] in UNNOTICED and says_less(answer["fault"]):
        return "less"
    return str(answer["verdict"])


# A declaration without a part of it: of the op, or of calls with that argument, nothing is known, and they stay padded.
_LESS = re.compile(r" row_op\(.*: (leave out '|without (axes|zeros|reads|spans)=)|: without strict=True$")
_ALL = ": every argument is said to be read"


def says_less(fault: str) -> bool:
    """Can it change no number, whatever the program, by what was done?"""
    if not fault.endswith(_ALL):
        return bool(_LESS.search(fault))
    module, _, line = fault.split(" ")[0].rpartition(":")
    statement = next((s for s in source_of(module).body if s.lineno == int(line)), None)
    calls = [n for n in ast.walk(statement) if isinstance(n, ast.Call)] if statement is not None else []
    names = [a.value for a in calls[0].args if isinstance(a, ast.Constant)] if calls else []
    return bool(names) and all(_reads_all(str(name)) for name in names)


def _reads_all(name: str) -> bool:
    """Is there no argument of the op that its declaration does not read already?"""
    short, _, overload = name.partition(".")
    packet, models = getattr(torch.ops.aten, short, None), set(DECLARED[name].models)
    if packet is None or "*" in models:
        return packet is not None
    schemas = [getattr(packet, o)._schema for o in packet.overloads() if o == overload or not overload]
    taken = [{a.name for a in s.arguments} for s in schemas if any("Tensor" in str(a.type) for a in s.arguments)]
    return all(names <= models for names in taken if not names & {"out", "values"})


def merged(paths: list[Path]) -> dict[str, tuple[str, str]]:
    """(module, outcome) of each fault: what the sharpest of its guards said."""
    order = (*CAUGHT, *LEFT)
    found: dict[str, tuple[str, str]] = {}
    for path in paths:
        for answer in answers(path):
            said = outcome(answer)
            before = found.get(answer["fault"])
            if said in order and (before is None or order.index(said) < order.index(before[1])):
                found[answer["fault"]] = answer["module"], said
    return found


def group(module: str) -> str:
    parts = module.split(".passes.")[1].split(".")
    return "/".join(parts[:2]) if len(parts) > 2 else "/".join(parts)


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.plant.table", description=__doc__)
    top.add_argument("answers", nargs="+", type=Path, help="what the guards wrote")
    top.add_argument("--survivors", action="store_true", help="faults that no guard caught, instead")
    args = top.parse_args()
    found = merged(args.answers)
    if args.survivors:
        print(*sorted(f"{said:10} {fault}" for fault, (_, said) in found.items() if said in LEFT[3:]), sep="\n")
        return 0
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for module, said in found.values():
        counts[group(module)][said] += 1
        counts["all"][said] += 1
    columns = [c for c in (*CAUGHT, *LEFT) if counts["all"][c]]
    print("| module | planted |", " | ".join(NAMES[c] for c in columns), "|")
    print("|---" * (len(columns) + 2) + "|")
    for name, mine in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"| {name} | {sum(mine.values())} |", " | ".join(str(mine[c] or "") for c in columns), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
