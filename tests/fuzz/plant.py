"""Has the judge teeth? Plant faults one at a time, run programs of every construct, and say which it notices.

    python -m tests.fuzz.plant turbogr_compile.passes.rows.peeling --every 10 --seconds 30 --out planted.json

Every mutant lives in a fork of this process. Caught: a program that was right is wrong now, or a pass fails. Shy: only
less is packed. Survived: nothing changed on the programs that were tried; either they do not get there, or the fault
changes no number.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .generate import GENTLE, generate, words
from .judge import WRONG, judge, quiet
from .mutants import Mutant, mutants
from .program import Program

Baseline = list[tuple[Program, str, bool]]


def baseline(per: int, every: int) -> Baseline:
    """Programs of every construct, with what comes of them without a fault; only those that are right."""
    found: Baseline = []
    for word in words()[::every]:
        for seed in range(per):
            program = generate(seed, word, hostility=GENTLE)
            verdict = judge(program)
            if verdict.status == "same" and verdict.packed:
                found.append((program, verdict.status, verdict.packed))
    random.Random(0).shuffle(found)
    return found


def noticed(programs: Baseline, seconds: float) -> tuple[str, str]:
    """(caught, how), (shy, how) or (survived, how many programs)."""
    end, shy, number = time.time() + seconds, "", 0
    for number, (program, _, packed) in enumerate(programs, 1):
        verdict = judge(program)
        if verdict.status in WRONG or verdict.status == "pass-error":
            said = verdict.notes[0].splitlines()[0][:100] if verdict.notes else ""
            return "caught", f"{verdict.status} after {number} programs: {program.hash} {said}"
        if packed and not verdict.packed:
            shy = shy or f"program {number}, {program.hash}, is no longer packed"
        if time.time() > end:
            break
    return ("shy", shy) if shy else ("survived", f"{number} programs")


def in_a_fork(mutant: Mutant, programs: Baseline, seconds: float) -> tuple[str, str]:
    """The fault dies with the process that it is planted in."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            mutant.plant()
            answer = noticed(programs, seconds)
        except BaseException as error:
            answer = ("caught", f"{type(error).__name__}: {error}"[:200])
        os.write(writing, json.dumps(answer).encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return tuple(json.loads(said)) if said else ("caught", "the process died")


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.fuzz.plant", description=__doc__)
    top.add_argument("modules", nargs="+")
    top.add_argument("--every", type=int, default=1, help="plant every so many of the faults")
    top.add_argument("--words", type=int, default=1, help="take every so many of the constructs")
    top.add_argument("--per", type=int, default=1, help="programs for each construct")
    top.add_argument("--seconds", type=float, default=60, help="for each fault")
    top.add_argument("--total", type=float, default=float("inf"), help="seconds for everything")
    top.add_argument("--out", type=Path)
    args = top.parse_args()
    end = time.time() + args.total
    faults = [m for name in args.modules for m in mutants(name)]
    random.Random(1).shuffle(faults)
    programs = baseline(args.per, args.words)
    print(f"{len(faults)} faults can be planted; {len(programs)} programs are right without them", flush=True)
    found: list[dict[str, Any]] = []
    with quiet():
        for fault in faults[:: args.every]:
            if time.time() > end:
                break
            verdict, how = in_a_fork(fault, programs, args.seconds)
            found.append({"fault": str(fault), "verdict": verdict, "how": how})
            print(f"{verdict:9} {fault}   {how}", flush=True)
    print(Counter(f["verdict"] for f in found))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
