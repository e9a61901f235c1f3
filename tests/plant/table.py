"""python -m tests.plant.table *.jsonl: which guard caught how many faults of which module, as a table for the docs."""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from .__main__ import UNNOTICED, answers
from .draw import says_less
from .survivors import WORDS, named, survivors

CAUGHT = ("programs", "aimed", "database", "tests")
LEFT = ("fails", "slower", "less", "stated", "same", "unchanged", "unreached")
NAMES = {
    "programs": "wrong in a program of the sweep", "aimed": "wrong in an aimed program", "database": "torch's database",
    "tests": "rule tests", "fails": "fails aloud", "slower": "only slower",
    "less": "says less, or the same", "stated": "survives, for a reason", "same": "graph changes, numbers do not",
    "unchanged": "nothing changes", "unreached": "not reached",
}  # fmt: skip

STATED = {s.fault: s.word for s in survivors()}


def outcome(answer: dict[str, Any]) -> str:
    """The guard that caught it, or what is known of it."""
    if answer.get("ops"):
        return "database"
    if answer.get("test"):
        return "tests"
    if answer["verdict"] == "wrong":
        return "aimed" if answer.get("by", "").startswith("aimed") else "programs"
    if answer["verdict"] in UNNOTICED and named(answer["fault"]) in STATED:
        return "stated"
    if answer["verdict"] in UNNOTICED and says_less(answer["fault"]):
        return "less"
    return str(answer["verdict"])


def merged(paths: list[Path]) -> dict[str, tuple[str, str]]:
    """(module, outcome) of each fault, by its name: what the sharpest of its guards said."""
    order = (*CAUGHT, *LEFT)
    found: dict[str, tuple[str, str]] = {}
    for path in paths:
        for answer in answers(path):
            said = outcome(answer)
            name = named(answer["fault"])
            before = found.get(name)
            if said in order and (before is None or order.index(said) < order.index(before[1])):
                found[name] = answer["module"], said
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
        print(*sorted(f"{said:10} {fault}" for fault, (_, said) in found.items() if said in LEFT[4:]), sep="\n")
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
    words = Counter(STATED[name] for name, (_, said) in found.items() if said == "stated")
    print(*(f"{count} {word}: {WORDS[word]}" for word, count in words.most_common()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
