"""torch's database of ops as a guard: declarations held against torch, and ops on rows against eager.

    python -m tests.plant.ops planted.jsonl --out ops.jsonl

takes the faults of passes/rows/ops that no program noticed.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.fuzz.judge import WRONG
from tests.ops.judge import judged
from tests.ops.samples import Entry, entries
from tests.ops.sweep import cases_of
from tests.ops.witness import studied

from .__main__ import UNNOTICED, answers
from .draw import chosen, modules
from .faults import Fault, source_of
from .forks import Died, in_a_fork
from .planting import living, plant

PER, CASES = 1, 4  # samples and programs for each entry of the database


def concerned(fault: Fault) -> list[Entry]:
    """Entries of the ops that the statement declares; those of its module where it declares none."""
    tree = source_of(fault.module)
    statements = [s for s in tree.body if _declares(s)]
    mine = [tree.body[fault.statement]] if _declares(tree.body[fault.statement]) else _using(fault, statements)
    names = {c.value.partition(".")[0] for s in mine for c in ast.walk(s)
             if isinstance(c, ast.Constant) and isinstance(c.value, str)}  # fmt: skip
    return [e for name, e in entries().items() if name.removeprefix("nn.functional.").partition(".")[0] in names]


def _declares(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("row_op(")


def _using(fault: Fault, statements: list[ast.stmt]) -> list[ast.stmt]:
    """Declarations that name the function; all of the module where it is a part of others."""
    found = [s for s in statements if any(getattr(n, "id", None) == fault.where for n in ast.walk(s))]
    return found or statements


def troubles(entry: Entry) -> dict[str, str]:
    """What speaks against the compiler here, by case."""
    found = {f"{r['op']} {r['claim']}": r["false"] for r in studied(entry, PER) if r.get("false")}
    for case in [*cases_of(entry, PER, 0)][:CASES]:
        record = judged(case)
        if record["status"] in WRONG or record["status"] == "pass-error":
            found[case.text] = f"{record['status']} {record['notes'][:1]}"
    return found


class Database:
    def __init__(self) -> None:
        self.before: dict[str, dict[str, str]] = {}

    def noticed(self, fault: Fault, names: list[str], seconds: float) -> str:
        plant(fault)
        end = time.process_time() + seconds
        for name in names:
            for case, said in troubles(entries()[name]).items():
                if case not in self.before[name]:
                    return f"{name}: {case}: {said}"[:200]
            if time.process_time() > end:
                break
        return ""

    def ask(self, fault: Fault, seconds: float) -> tuple[str, int]:
        names = [e.name for e in concerned(fault) if not e.name.startswith("nn:")]
        for name in names:
            if name not in self.before:
                self.before[name] = in_a_fork(lambda n=name: troubles(entries()[n]), 120)  # type: ignore[misc]
        try:
            return in_a_fork(lambda: self.noticed(fault, names, seconds), 60 + 20 * seconds), len(names)
        except Died as error:
            return str(error), len(names)


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.plant.ops", description=__doc__)
    top.add_argument("planted", type=Path, nargs="+", help="what `python -m tests.plant --out` wrote")
    top.add_argument("--out", type=Path, required=True)
    top.add_argument("--seconds", type=float, default=8, help="of the processor for each fault")
    top.add_argument("--total", type=float, default=float("inf"))
    args = top.parse_args()
    end = time.time() + args.total
    done = {a["fault"] for a in answers(args.out)}
    wanted = {a["fault"]: a for path in args.planted for a in answers(path)
              if a["verdict"] in UNNOTICED and ".ops." in a["module"] and a["fault"] not in done}  # fmt: skip
    faults = [f for f in chosen(modules(), 1.0) if str(f) in wanted]
    database, counts = Database(), Counter[str]()
    entries(), living(), gc.collect(), gc.freeze()
    for fault in faults:
        if time.time() > end:
            break
        caught, count = database.ask(fault, args.seconds)
        counts["caught" if caught else "survived"] += 1
        print(f"{'caught' if caught else 'survived':9} {fault}   {count} entries {caught[:140]}", flush=True)
        with args.out.open("a") as file:
            answer: dict[str, Any] = {**wanted[str(fault)], "entries": count, "ops": caught}
            file.write(json.dumps(answer) + "\n")
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
