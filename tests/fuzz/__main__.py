"""python -m tests.fuzz run | sweep | list | compare | show"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

from . import work
from .aimed import aimed
from .generate import GENTLE, HOSTILE, generate, words
from .narrow import narrowed
from .program import Program
from .report import Tally, run_all
from .shrink import shrink

MANY = 0.04  # share of programs with more columns than a narrow type counts
LOUD = 5e3  # embeddings so large that scores leave what finite masks are assumed to hide


def seeded(first: int, count: int, loud: float, dtype: str = "float64") -> Iterator[tuple[str, Program]]:
    if dtype == "float64":
        yield from ((f"seed {seed}", generate(seed, loud=loud)) for seed in range(first, first + count))
    else:
        programs = ((f"seed {seed}", generate(seed, loud=loud, long=MANY)) for seed in range(first, first + count))
        yield from narrowed(programs, dtype)


def rounded(programs: Iterator[tuple[str, Program]], capacity: int | None) -> Iterator[tuple[str, Program]]:
    return ((name, replace(program, capacity=capacity)) for name, program in programs)


def swept(per: int, first: int, only: str) -> Iterator[tuple[str, Program]]:
    """So many programs for every construct that contain it."""
    for word in words():
        if only not in word:
            continue
        left = per
        for seed in range(first, first + 6 * per):
            # Alone among ordinary things every other time: what else is hostile may hide it.
            program = generate(seed, word, hostility=GENTLE if seed % 2 == 0 else HOSTILE)
            if word in program.words and left:
                left -= 1
                yield f"{word} {seed}", program


def run(args: argparse.Namespace) -> int:
    tally = Tally(args.shrink, args.scripts)
    programs = rounded(seeded(args.seed, args.n, LOUD if args.loud else 1.0, args.dtype), args.capacity)
    run_all(programs, tally, args.seconds, verify=args.verify)
    about = {"loud": args.loud, "verify": args.verify, "capacity": args.capacity, "dtype": args.dtype}
    tally.write(args.json, what="run", first=args.seed, n=args.n, **about)
    return bool(tally.failures)


def sweep(args: argparse.Namespace) -> int:
    tally = Tally(args.shrink, args.scripts)
    programs = rounded(chain(swept(args.per, args.seed, args.only), aimed(args.seed, args.only)), args.capacity)
    programs = narrowed(programs, args.dtype) if args.dtype != "float64" else programs
    run_all(programs, tally, args.seconds, verify=args.verify)
    tally.write(args.json, what="sweep", first=args.seed, per=args.per, capacity=args.capacity, dtype=args.dtype)
    shy = [w for w in words() if args.only in w and not tally.words[w]["packed"]]
    print(f"{len(shy)} constructs in no packed program: {', '.join(shy)}")
    return bool(tally.failures)


def listed(args: argparse.Namespace) -> int:
    for _, program in seeded(args.seed, args.n, 1.0):
        print(json.dumps(work.measure(program)), flush=True)
    return 0


def compare(args: argparse.Namespace) -> int:
    old, new = ([json.loads(line) for line in path.read_text().splitlines() if line] for path in (args.old, args.new))
    found = work.lost(old, new)
    print(*found, sep="\n")
    names = {e["hash"] for e in new}
    gained = [
        e for e in new if e["packed"] and not {o["hash"]: o for o in old}.get(e["hash"], {"packed": True})["packed"]
    ]
    missing = sum(e["hash"] not in names for e in old)
    print(f"{len(found)} programs lost rows, {len(gained)} are packed now; {missing} of the old list were not run")
    return bool(found)


def show(args: argparse.Namespace) -> int:
    program = generate(args.seed, args.word, hostility=GENTLE if args.word and args.seed % 2 == 0 else HOSTILE)
    print((shrink(program) if args.small else program).script(f"seed {args.seed} {args.word}"))
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    kinds = top.add_subparsers(required=True)
    for name, action in (("run", run), ("sweep", sweep), ("list", listed), ("compare", compare), ("show", show)):
        p = kinds.add_parser(name)
        p.set_defaults(action=action)
        if name == "compare":
            p.add_argument("old", type=Path)
            p.add_argument("new", type=Path)
            continue
        p.add_argument("--seed", type=int, default=0)
        if name in ("run", "list"):
            p.add_argument("--n", type=int, default=1000)
        if name in ("run", "sweep"):
            p.add_argument("--seconds", type=float, default=float("inf"))
            p.add_argument("--json", type=Path, help="append a line of JSON to this file")
            p.add_argument("--shrink", type=int, default=20, help="failures to make small and to confirm")
            p.add_argument("--scripts", type=Path, help="folder for scripts of failures")
            p.add_argument("--verify", default="fast", help="option 'verify' of the compiler")
            p.add_argument("--capacity", type=int, help="round numbers of packed rows up to multiples of this")
            p.add_argument(
                "--dtype", choices=("float64", "float32", "float16", "bfloat16"), default="float64",
                help="what programs compute in; narrow ones are held against float64",
            )  # fmt: skip
            p.add_argument("--loud", action="store_true", help="scores beyond what finite masks are assumed to hide")
        if name == "sweep":
            p.add_argument("--per", type=int, default=3, help="programs for each construct")
            p.add_argument("--only", default="", help="constructs whose name contains this")
        if name == "show":
            p.add_argument("--word", default="", help="a construct to force")
            p.add_argument("--small", action="store_true", help="shrink it first")
    return top


if __name__ == "__main__":
    arguments = parser().parse_args()
    sys.exit(arguments.action(arguments))
