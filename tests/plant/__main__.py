"""python -m tests.plant [modules] --share 0.1: plant faults one at a time, and say which guard notices each.

wrong      numbers of a program differ from eager's: caught
fails      a rule or the pass fails and says so: costs speed, never a number
slower     only less is packed
same       graphs change, numbers do not
unchanged  it runs, and nothing comes of it
unreached  no program runs it
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import importlib
import json
import pickle
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import turbogr_compile.passes.rows as rows
from tests.fuzz.__main__ import swept
from tests.fuzz.aimed import aimed
from tests.fuzz.judge import quiet
from tests.fuzz.program import Program

from .draw import chosen, drawn, modules
from .faults import Fault, source_of
from .forks import Died, in_a_fork
from .planting import NotPlanted, living, plant
from .programs import Lines, Prepared, Seen, traced

FOLDER = str(Path(rows.__file__).parent)
LONGEST = 300.0  # seconds for what may never end, on a machine that others use too
UNNOTICED = ("same", "unchanged", "unreached")
WORST_FIRST = ("wrong", "fails", "slower", "same", "unchanged")


class Guards:
    """Programs that are right without a fault, with the lines that each of them runs."""

    def __init__(self, programs: list[tuple[str, Prepared]], kept: Path | None) -> None:
        self.programs = dict(programs)
        self.before: dict[str, Seen] = {}
        self.by_line: dict[tuple[str, int], set[str]] = {}
        self.recent: dict[str, list[str]] = {}  # by module: programs that noticed a fault
        stored = pickle.loads(kept.read_bytes()) if kept and kept.exists() else ("", {})
        known: dict[str, tuple[Seen, Lines]] = stored[1] if stored[0] == _sources() else {}
        for name, prepared in programs:
            if name not in known:
                try:
                    known[name] = in_a_fork(lambda p=prepared: _first_look(p), LONGEST)  # type: ignore[misc]
                except Died:
                    continue  # no guard
            seen, lines = known[name]
            if seen.verdict == "same" and not seen.loud:
                self.before[name] = seen
                for file, numbers in lines.items():
                    for number in numbers:
                        self.by_line.setdefault((file, number), set()).add(name)
        if kept is not None:
            kept.write_bytes(pickle.dumps((_sources(), known)))

    def reaching(self, fault: Fault) -> list[str]:
        """Programs that run what the fault changed, those first that noticed another fault of the module."""
        home = importlib.import_module(fault.module)
        statement = source_of(fault.module).body[fault.statement]
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            places = {(home.__file__ or "", line) for line in fault.lines}
        else:
            places = set(_places_of(fault.where))
        found = set().union(*(self.by_line.get(p, set()) for p in places))
        if fault.where.startswith("row_op("):
            named = {c.value for c in ast.walk(statement) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
            found |= {n for n in self.before if any(_matches(o, named) for o in self.programs[n].ops)}
        order = sorted(found)
        random.Random(str(fault)).shuffle(order)
        front = [n for n in self.recent.get(fault.module, ()) if n in found]
        return list(dict.fromkeys([*front[:12], *order]))

    def noticed(self, fault: Fault, names: list[str], seconds: float) -> dict[str, Any]:
        """In a fork: plant it, and try programs until one is wrong or time is up."""
        plant(fault)
        end, found = time.process_time() + seconds, {"verdict": "unchanged", "how": "", "tried": 0, "changed": 0}
        fails = 0
        for name in names:
            before = self.before[name]
            after = self.programs[name].try_(before)
            found["tried"] += 1
            verdict = "unchanged" if after.same_as(before) else _verdict(before, after)
            found["changed"] += verdict != "unchanged"
            if WORST_FIRST.index(verdict) < WORST_FIRST.index(found["verdict"]):
                found |= {"verdict": verdict, "how": f"{name}: {after.note or after.loud}", "by": name}
            fails += verdict == "fails"
            if verdict == "wrong" or fails == 6 or time.process_time() > end:
                break
        return found

    def ask(self, fault: Fault, seconds: float, most: int) -> dict[str, Any]:
        names = self.reaching(fault)
        answer: dict[str, Any] = {"fault": str(fault), "module": fault.module, "reached": len(names)}
        if not names:
            return {**answer, "verdict": "unreached", "how": ""}
        try:
            answer |= in_a_fork(lambda: self.noticed(fault, names[:most], seconds), LONGEST)
        except Died as error:
            planted = NotPlanted.__name__ not in str(error)
            answer |= {"verdict": "wrong" if planted else "not planted", "how": str(error)}
        if "by" in answer and answer["verdict"] == "wrong":
            recent = self.recent.setdefault(fault.module, [])
            if answer["by"] in recent:
                recent.remove(answer["by"])
            recent.insert(0, answer["by"])
        return answer


def _sources() -> str:
    texts = [p.read_bytes() for p in sorted(Path(FOLDER).rglob("*.py"))]
    return hashlib.sha1(b"".join(texts)).hexdigest()


def _first_look(prepared: Prepared) -> tuple[Seen, Lines]:
    with traced(FOLDER) as lines:
        seen = prepared.try_(None)
    return seen, lines


def _verdict(before: Seen, after: Seen) -> str:
    if after.verdict != "same":
        return "wrong"
    if after.loud:
        return "fails"
    return "slower" if after.work > before.work or after.fallbacks > before.fallbacks else "same"


def _matches(target: str, named: set[str]) -> bool:
    """'aten.softmax.int' is 'softmax'."""
    parts = target.split(".")
    return len(parts) > 1 and bool({parts[1], ".".join(parts[1:]), f"{parts[0]}::{parts[1]}"} & named)


def _places_of(name: str) -> list[tuple[str, int]]:
    """Lines that mention a table."""
    found = []
    for module in modules():
        home = importlib.import_module(module)
        for node in ast.walk(source_of(module)):
            if name in (getattr(node, "id", None), getattr(node, "attr", None)):
                found.append((home.__file__ or "", node.lineno))  # type: ignore[attr-defined]
    return found


def programs_of(kind: str, per: int) -> list[tuple[str, Program]]:
    return [*(swept(per, 0, "") if kind != "aimed" else ()), *(aimed() if kind != "swept" else ())]


def answers(path: Path | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.exists() else []


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.plant", description=__doc__)
    top.add_argument("modules", nargs="*", help="endings of module names; all of passes/rows unless said")
    top.add_argument("--share", type=float, default=0.1, help="of the faults that can be planted")
    top.add_argument("--drawn", type=int, help="about so many faults of all modules and kinds instead")
    top.add_argument("--only", nargs="+", default=[""], help="faults whose description contains one of these")
    top.add_argument("--programs", default="both", choices=("swept", "aimed", "both"), help="of tests.fuzz")
    top.add_argument("--named", nargs="+", default=[""], help="programs whose name contains one of these")
    top.add_argument("--words", type=int, default=1, help="every so many of the constructs of tests.fuzz")
    top.add_argument("--offset", type=int, default=0, help="first of those constructs")
    top.add_argument("--per", type=int, default=1, help="programs for each construct")
    top.add_argument("--seconds", type=float, default=8, help="of the processor for each fault")
    top.add_argument("--most", type=int, default=60, help="programs for each fault")
    top.add_argument("--total", type=float, default=float("inf"), help="seconds for everything")
    top.add_argument(
        "--out", type=Path, help="a line of JSON for each fault; those in it already are not planted again"
    )
    top.add_argument("--again", type=Path, help="what `--out` wrote before: plant those faults that went unnoticed")
    top.add_argument("--kept", type=Path, help="file that keeps what programs do without a fault")
    args = top.parse_args()
    end = time.time() + args.total
    names = [m for m in modules() if not args.modules or any(m.endswith(e) for e in args.modules)]
    todo = drawn(names, args.drawn) if args.drawn else chosen(names, 1.0 if args.again else args.share, args.only)
    done = {a["fault"] for a in answers(args.out)}
    again = {a["fault"] for a in answers(args.again) if a["verdict"] in UNNOTICED}
    todo = [f for f in todo if str(f) not in done and (args.again is None or str(f) in again)]
    counts: Counter[str] = Counter()
    with quiet():
        began = time.time()
        programs = [(n, Prepared(p)) for n, p in programs_of(args.programs, args.per)[args.offset :: args.words]
                    if any(word in n for word in args.named)]  # fmt: skip
        programs = [(n, p) for n, p in programs if p.valid]
        living()
        gc.collect()
        gc.freeze()
        print(f"{len(programs)} programs captured in {time.time() - began:.0f} s", flush=True)
        guards = Guards(programs, args.kept)
        print(
            f"{len(guards.before)} are right without a fault, {time.time() - began:.0f} s; {len(todo)} faults",
            flush=True,
        )
        for fault in todo:
            if time.time() > end:
                break
            began = time.time()
            answer = guards.ask(fault, args.seconds, args.most)
            answer["seconds"] = round(time.time() - began, 2)
            counts[answer["verdict"]] += 1
            print(f"{answer['verdict']:10} {fault}   {answer['how'][:150]} ({answer['seconds']} s)", flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(answer) + "\n")
    print(dict(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
