"""A fixed sample of the database: declarations are true, and ops with rows, or inside of idioms, give what eager gives.

`known.txt` lists what is wrong today by the text of the case; mended ones must go. The whole sweep:
`python -m tests.ops sweep --out sweep.json`.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.fuzz.judge import WRONG

from .judge import judged
from .samples import entries
from .sweep import cases_of, sweep
from .witness import studied

KNOWN = Path(__file__).with_name("known.txt")
# Ops whose arguments meanings, attention and emission fold away, or have in the past; and a few of everything else.
RULED = (
    "add", "sub", "rsub", "mul", "div.floor_rounding", "div.trunc_rounding", "softmax.with_dtype", "log_softmax",
    "clamp", "where", "masked_fill", "cumsum", "index_select", "nn.functional.cross_entropy", "nn.functional.embedding",
    "maximum", "sort",
)  # fmt: skip
PER = 2


@lru_cache(maxsize=1)
def records() -> dict[str, dict[str, Any]]:
    found = {}
    for name in RULED:
        for case in [*cases_of(entries()[name], PER, 0)][:6]:
            found[case.text] = judged(case)
    return found


def faulty(record: dict[str, Any]) -> bool:
    return record["status"] in WRONG or record["status"] == "pass-error"


def known() -> set[str]:
    return {line.partition("  ")[0] for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")}


def test_ops_give_what_eager_gives():
    found = [r for text, r in records().items() if faulty(r) and text not in known()]
    lines = [f"python -m tests.ops show '{r['case']}'   {r['status']} {r['notes'][:1]}" for r in found]
    assert not found, "\n".join(lines)


def test_known_faults_are_still_there():
    mended = [text for text in known() if text not in records() or not faulty(records()[text])]
    assert not mended, "\n".join(["mended: remove from tests/ops/known.txt", *mended])


def test_most_cases_can_be_asked():
    asked = [r for r in records().values() if r["status"] != "skip"]
    assert len(asked) > 0.6 * len(records())
    assert sum(bool(r.get("packed")) for r in asked) > 0.5 * len(asked)


def test_declarations_are_true():
    found = [r for name in [*entries()][::14] if not name.startswith("nn:") for r in studied(entries()[name], 1)]
    assert sum("claim" in r for r in found) > 100
    assert not [r for r in found if r.get("false")]


DIES = """
import os, sys
for name in sys.stdin.read().split():
    print('{"begin": "%s"}' % name, flush=True)
    if name == "b":
        os.abort()
    print('{"op": "%s", "case": "%s", "status": "same"}' % (name, name), flush=True)
"""


def test_an_op_that_kills_its_process_costs_itself_only():
    found = sweep(["a", "b", "c"], [sys.executable, "-c", DIES])
    assert [(r["op"], r["status"]) for r in found] == [("a", "same"), ("b", "killed"), ("c", "same")]


if __name__ == "__main__":
    for text, record in records().items():
        if faulty(record):
            print(f"{text}  {record['status']}: {record['notes'][0].splitlines()[0][:60]}")
