"""`make count`: how large the house is, room by room, and who is leaned on most. Writes build/house.json.

    python tests/house/count.py [--json FILE]

Lines are all lines of Python; `fan-in` counts the modules of the house that import a module.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from pathlib import Path
from typing import Any

from floors import ROOT, contract, floors

PACKAGE = "turbogr_compile"
LONG = 500
MOST = 8


def modules() -> dict[str, Path]:
    """Every Python module of the product, by the name it is imported as."""
    beside = [r for floor in floors() for r in floor if (ROOT / r / "__init__.py").is_file()]
    found = {}
    for top in (ROOT / PACKAGE, *(ROOT / room for room in sorted(beside))):
        for file in sorted(top.rglob("*.py")):
            parts = list(file.relative_to(ROOT).with_suffix("").parts)
            parts = parts if parts[0] == PACKAGE else [PACKAGE, *parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(name: str, file: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the house that a module imports, anywhere in it."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            base = ".".join(above[: len(above) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module or "") if part)
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names}
    return {m for m in found if m in known} - {name}


def count() -> dict[str, Any]:
    known = modules()
    lines = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in known.items()}
    read_by = Counter(used for name, file in known.items() for used in imports(name, file, known))
    rooms: dict[str, dict[str, int]] = {}
    for name in known:
        room = rooms.setdefault([*name.split("."), ""][1] or "(door)", {"files": 0, "lines": 0, "long": 0})
        room["files"] += 1
        room["lines"] += lines[name]
        room["long"] += lines[name] > LONG
    return {
        "rooms": dict(sorted(rooms.items(), key=lambda item: -item[1]["lines"])),
        "files": len(known),
        "lines": sum(lines.values()),
        "long": {n: c for n, c in sorted(lines.items(), key=lambda item: -item[1]) if c > LONG},
        "fan-in": dict(read_by.most_common(MOST)),
        "exceptions": sum(len(c.get("ignore_imports", ())) for c in contract()["contracts"]),
    }


def text(counted: dict[str, Any]) -> str:
    rows = [f"{room:<14}{c['files']:>6}{c['lines']:>9}{c['long'] or '':>7}" for room, c in counted["rooms"].items()]
    return "\n".join(
        [f"{'room':<14}{'files':>6}{'lines':>9}{f'> {LONG}':>7}", *rows,
         f"{'all':<14}{counted['files']:>6}{counted['lines']:>9}{len(counted['long']):>7}", "",
         f"longer than {LONG} lines: " + (", ".join(f"{n} {c}" for n, c in counted["long"].items()) or "none"),
         "most imported: " + ", ".join(f"{n.removeprefix(PACKAGE + '.')} {c}" for n, c in counted["fan-in"].items()),
         f"exceptions to the contract: {counted['exceptions']}"]
    )  # fmt: skip


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, default=ROOT / "build" / "house.json")
    into = options.parse_args().json
    found = count()
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(text(found))
