"""python -m tests.ops sweep | child | show | witness | derive | coverage"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .cases import Case
from .idioms import Idiom
from .judge import judged
from .sweep import child, child_command, chosen, sweep, write


def show(text: str) -> int:
    case = Case.parse(text) if text.count("|") == 7 else Idiom.parse(text)
    for dynamo in (False, True):
        print("through torch.compile:" if dynamo else "without Dynamo:", json.dumps(judged(case, dynamo), indent=1))
    values = [f"{tuple(v.shape)} {v.dtype}" if hasattr(v, "shape") else repr(v) for v in case.sample.leaves]
    print("arguments:", *values, sep="\n    ")
    return 0


def main() -> int:
    top = argparse.ArgumentParser(prog="python -m tests.ops", description=__doc__)
    kinds = top.add_subparsers(dest="what", required=True)
    for name in ("sweep", "child", "witness"):
        p = kinds.add_parser(name)
        p.add_argument(
            "--per", type=int, default=6, help="cases of each kind for an entry, or more where it has more values"
        )
        p.add_argument("--seed", type=int, default=0)
        p.add_argument("--only", default="", help="entries whose name contains this")
        p.add_argument("--out", type=Path)
        p.add_argument("--seconds", type=float, default=float("inf"))
        p.add_argument("--records", type=Path, help="every record as a line of JSON, for `coverage`")
    kinds.add_parser("show").add_argument("case")
    kinds.add_parser("derive")
    kinds.add_parser("coverage").add_argument("records", nargs="*", type=Path, help="what sweeps left with --records")
    args = top.parse_args()
    if args.what == "show":
        return show(args.case)
    if args.what == "derive":
        from .derive import write as write_table

        write_table(chosen(""))
        return 0
    if args.what == "coverage":
        from . import coverage

        if args.records:
            coverage.keep(json.loads(line) for path in args.records for line in path.read_text().splitlines())
        coverage.PAGE.write_text(coverage.page())
        return 0
    if args.what == "child":
        child(sys.stdin.read().split("\n"), args.per, args.seed)
        return 0
    if args.what == "witness":
        from .witness import report

        return report(chosen(args.only), args.per, args.out)
    records = sweep(chosen(args.only), child_command(args.per, args.seed), args.seconds)
    found = write(records, args.out, seed=args.seed, per=args.per)
    if args.records is not None:
        args.records.write_text("".join(json.dumps(r) + "\n" for r in records))
    return int(any(r["status"] not in ("pass-error", "unconfirmed") for r in found["faults"]))


if __name__ == "__main__":
    sys.exit(main())
