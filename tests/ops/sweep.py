"""All cases of an entry, and all entries in child processes: an op that kills its process costs itself only."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.judge import WRONG

from .cases import TURNS, Case, Place, places
from .idioms import IDIOMS, Idiom
from .judge import judged
from .samples import Entry, Sample, covering, entries

WORST = 60  # seconds for all cases of an entry


def rows_of(entry: Entry, per: int, seed: int) -> Iterator[Case]:
    """Every argument value at least once, leaves and places in turn."""
    kinds = [d for d in (entry.dtype, torch.int64, torch.bool) if d is not None and d in entry.dtypes]
    for turn, dtype in enumerate(dict.fromkeys(kinds)):
        least = per if turn == 0 else max(1, per // 6)
        samples = covering(entry.samples(dtype), least)
        if turn:
            samples = samples[:least]
        chance = random.Random(f"{entry.name} {dtype} {seed}")
        for number, sample in enumerate(samples):
            spots = list(_spots(sample))
            if not spots:
                continue
            leaf, place = chance.choice([s for s in spots if s[0] == spots[0][0]] if chance.random() < 0.7 else spots)
            alike = [i for i, t in sample.tensors() if t.shape == sample.leaves[leaf].shape and i != leaf]
            rows = tuple(sorted({leaf, *alike})) if chance.random() < 0.6 else (leaf,)
            comes, read = TURNS[(number + seed) % len(TURNS)]
            form = "function" if chance.random() < 0.6 else chance.choice([name for name, _ in entry.forms])
            yield Case(entry, dtype, sample, rows, place, comes, read, form)


def _spots(sample: Sample) -> Iterator[tuple[int, Place]]:
    for i, leaf in sample.tensors():
        if leaf.numel() and leaf.dim():
            yield from ((i, place) for place in places(leaf.shape))


def idioms_of(entry: Entry, per: int, seed: int) -> Iterator[Idiom]:
    """Every argument value in some idiom; each idiom with some value."""
    dtype = entry.dtype
    if dtype is None:
        return
    samples = [s for s in entry.samples(dtype) if s.leaves and Idiom(entry, s, "scores").fits()]
    covered = covering(samples, per)
    names = list(IDIOMS)
    random.Random(f"{entry.name} {seed}").shuffle(names)
    for turn in range(max(len(covered), per) if covered else 0):
        sample = covered[turn % len(covered)]
        yield Idiom(entry, sample, names[turn % len(names)])


def cases_of(entry: Entry, per: int, seed: int) -> Iterator[Case | Idiom]:
    try:
        yield from rows_of(entry, per, seed)
        if not entry.name.startswith("nn:"):
            yield from idioms_of(entry, per, seed)
    except NotImplementedError as error:  # samples that cannot be made here
        print(f"{entry.name}: {error}", file=sys.stderr)


def chosen(only: str) -> list[str]:
    return [name for name in entries() if only in name]


def child(names: list[str], per: int, seed: int) -> None:
    """Records of these entries as lines of JSON on standard output; 'begin' lines say where it is."""
    for name in names:
        print(json.dumps({"begin": name}), flush=True)
        end = time.time() + WORST
        try:
            for case in cases_of(entries()[name], per, seed):
                record = judged(case)
                if record["status"] in WRONG:
                    record["confirmed"] = judged(case, dynamo=True)["status"]
                    if record["confirmed"] == "same":  # ops that seed themselves draw otherwise when traced
                        record["status"] = "unconfirmed"
                print(json.dumps({"op": name, **record}), flush=True)
                if time.time() > end:
                    break
        except Exception as error:  # the database itself: samples that need something this machine lacks
            why = f"samples: {type(error).__name__}: {str(error)[:120]}"
            print(json.dumps({"op": name, "case": name, "status": "skip", "why": why}), flush=True)


def child_command(per: int, seed: int) -> list[str]:
    return [sys.executable, "-m", "tests.ops", "child", "--per", str(per), "--seed", str(seed)]


def sweep(names: list[str], command: list[str], seconds: float = float("inf")) -> list[dict[str, Any]]:
    """Run entries in a child; where it dies, go on in another with the next entry."""
    records, end = [], time.time() + seconds
    while names and time.time() < end:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n".join(names))
        process.stdin.close()
        begun = ""
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            record = json.loads(line)
            if "begin" in record:
                begun = record["begin"]
                if time.time() > end:
                    process.kill()
                    break
            else:
                records.append(record)
        if process.wait() == 0:
            break
        if time.time() < end:
            why = f"the process ended with {process.returncode}"
            records.append({"op": begun, "case": begun, "status": "killed", "notes": [why]})
        names = names[names.index(begun) + 1 :] if begun else []
    return records


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    asked = [r for r in records if r["status"] != "skip"]
    by_op: dict[str, Counter[str]] = defaultdict(Counter)
    for r in asked:
        by_op[r["op"]].update([r["status"], *(["packed"] if r.get("packed") else [])])
    faults = [r for r in asked if r["status"] not in ("same",)]
    return {
        "entries": len({r["op"] for r in records}), "entries asked": len(by_op), "cases": len(asked),
        "status": dict(Counter(r["status"] for r in asked)), "packed": sum(bool(r.get("packed")) for r in asked),
        "skipped": dict(Counter(r["why"].split(":")[0] for r in records if r["status"] == "skip").most_common(12)),
        "faults": faults, "ops": {op: dict(c) for op, c in sorted(by_op.items())},
    }  # fmt: skip


def write(records: list[dict[str, Any]], path: Path | None, **about: Any) -> dict[str, Any]:
    found = {**about, **summary(records)}
    for key in ("entries", "entries asked", "cases", "status", "packed"):
        print(f"{key:16} {found[key]}")
    for r in found["faults"]:
        note = r["notes"][0].splitlines()[0][:110] if r.get("notes") else ""
        print(f"{r['status']:10} python -m tests.ops show '{r['case']}'   {note}")
    if path is not None:
        path.write_text(json.dumps(found, indent=1))
    return found
