"""What a run of many programs found: counts, differences by class, scripts; one line of JSON for the record."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config

from .classes import classify
from .judge import WRONG, Verdict, confirm, judge
from .program import Program
from .shrink import shrink


@dataclass
class Tally:
    """Counts of a run; failures are shrunk and confirmed as far as the budget goes."""

    shrinks: int = 20  # failures to make small
    folder: Path | None = None  # where scripts go; None: standard output
    counts: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    words: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    began: float = field(default_factory=time.time)

    def add(self, verdict: Verdict, name: str) -> None:
        counts = self.counts
        counts["cases"] += 1
        counts[verdict.status] += 1
        counts["packed"] += verdict.packed
        counts["batches"] += len(verdict.kinds)
        counts["packed batches"] += verdict.packed_calls
        counts.update({f"batches: {text}": count for text, count in verdict.agreed.items()})
        counts["fallbacks"] += sum(verdict.fallbacks.values())
        if not verdict.packed:
            self.remarks.update(r.split("]")[0] + "]" for r in verdict.remarks if r.startswith("missed"))
            counts["refused with remark"] += any(r.startswith("missed") for r in verdict.remarks)
        for word in verdict.program.words:
            self.words[word].update([verdict.status, *(["packed"] if verdict.packed else [])])
        if verdict.wrong or verdict.status == "pass-error":
            self._failure(verdict, name)

    def _failure(self, verdict: Verdict, name: str) -> None:
        small = verdict
        if verdict.wrong and self.shrinks > 0:
            self.shrinks -= 1
            small = judge(shrink(verdict.program))
            confirmed = confirm(small.program)
            self.counts["confirmed" if confirmed.wrong else "not confirmed"] += 1
            small.notes.insert(0, f"through torch.compile: {confirmed.status}")
        kind = classify(small) if small.wrong else f"{small.status}: {small.notes[0][:60] if small.notes else ''}"
        self.classes[kind].append(name)
        self._show(small, name, kind)

    def _show(self, verdict: Verdict, name: str, kind: str) -> None:
        title = "\n".join([f"{name}: {kind}", *(n.splitlines()[0] for n in verdict.notes[:3] if n)])
        script = verdict.program.script(title)
        if self.folder is None:
            print(script, file=sys.stderr, flush=True)
        else:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{name.replace(':', '-').replace(' ', '-').replace('/', '-')}.py").write_text(script)

    @property
    def failures(self) -> int:
        return sum(self.counts[w] for w in WRONG)

    def record(self, **about: Any) -> dict[str, Any]:
        seconds = time.time() - self.began
        cases = max(self.counts["cases"] - self.counts["invalid"], 1)
        return {
            **about, **self.counts, "packed share": round(self.counts["packed"] / cases, 4),
            "packed share of batches": round(self.counts["packed batches"] / max(self.counts["batches"], 1), 4),
            "seconds": round(seconds, 1), "cases per second": round(self.counts["cases"] / seconds, 2),
            "classes": {k: len(v) for k, v in sorted(self.classes.items())},
            "examples": {k: v[:8] for k, v in sorted(self.classes.items())}, 
            "why not": dict(self.remarks.most_common(12)),
        }  # fmt: skip

    def write(self, path: Path | None, **about: Any) -> None:
        found = self.record(**about)
        for key, value in found.items():
            if not isinstance(value, dict):
                print(f"{key:26} {value}")
        for kind, examples in sorted(self.classes.items()):
            print(f"    {len(examples):4} {kind:50} {', '.join(examples[:6])}")
        if path is not None:
            with path.open("a") as file:
                file.write(json.dumps(found) + "\n")


def run_all(programs: Iterable[tuple[str, Program]], tally: Tally, seconds: float, **options: Any) -> None:
    """Judge until there is no program or no time left."""
    end = time.time() + seconds
    # A graph is garbage in cycles, and what is imported is most of what there is to look through for it.
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    # Programs share next to nothing: what torch keeps of one costs more than it saves the others.
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        for name, program in programs:
            if time.time() > end:
                break
            tally.add(judge(program, **options), name)
