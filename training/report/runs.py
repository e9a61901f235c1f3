"""Run folders as data. A run that was killed has no summary; what its steps tell takes the place of it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbogr_compile.errors import TurbogrError
from turbogr_compile.files import Damaged, read_json, read_text

FORMAT = 1
WARM = 2  # steps that compile or find cold caches; left out of speeds where there are more than that


@dataclass(frozen=True)
class Run:
    """One run folder. `problems` are what is missing from it or cannot be read, in a sentence each."""

    folder: Path
    name: str
    facts: dict[str, Any]
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    summary: dict[str, Any]
    compared: dict[str, Any]  # with padded eager on the same batch, as `turbogr train --compare-memory` found
    schedules: list[tuple[str, dict[str, Any]]]  # name and timeline, from the run's dump
    viewer: Path | None
    problems: list[str]

    @property
    def finished(self) -> bool:
        return bool(self.summary.get("finished"))

    @property
    def reason(self) -> str:
        """Why the run ended before its end, where that is known."""
        known = self.summary.get("reason")
        return "" if self.finished else str(known or "the run was ended before it could say why")

    @property
    def warm_steps(self) -> list[dict[str, Any]]:
        """Steps whose time means something: without those that compile."""
        return self.steps[WARM:] if len(self.steps) > 2 * WARM else self.steps[1:] or self.steps

    def values(self, key: str) -> list[tuple[int, float]]:
        """(step, value) for the steps that have it."""
        return [(s["step"], v) for s in self.steps if (v := number(s.get(key))) is not None]

    def seconds(self) -> float | None:
        """Median of a step."""
        return median([v for s in self.warm_steps if (v := number(s.get("seconds"))) is not None])

    def tokens_per_second(self) -> float | None:
        known = [(number(s.get("tokens")), number(s.get("seconds"))) for s in self.warm_steps]
        return median([t / s for t, s in known if t is not None and s])

    def padding(self) -> float | None:
        """Share of the positions that hold no item."""
        known = [(number(s.get("tokens")), number(s.get("padded"))) for s in self.steps]
        valid, padded = sum(t for t, p in known if t and p), sum(p for t, p in known if t and p)
        return 1 - valid / padded if padded else None

    def flops_per_second(self) -> float | None:
        known = [(number(s.get("flops")), number(s.get("seconds"))) for s in self.warm_steps]
        return median([f / s for f, s in known if f is not None and s])

    def mfu(self) -> float | None:
        """Of the measured speed of a matrix product, by the medians of steps; else what the run itself says."""
        peak, speed = number(self.summary.get("gemm_flops")), self.flops_per_second()
        return speed / peak if peak and speed is not None else number(self.summary.get("mfu"))

    def peak_memory(self) -> float | None:
        known = number(self.summary.get("peak_memory"))
        return known if known is not None else max((v for _, v in self.values("memory")), default=None)

    def quality(self, key: str) -> float | None:
        """The last evaluation."""
        known = [v for e in self.evals if (v := number(e.get(key))) is not None]
        return known[-1] if known else number(self.summary.get(key))


def number(value: Any) -> float | None:
    """As a float, or None for what is no number. Losses may be NaN: curves then have a gap."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond all floats
        return None


def median(values: Sequence[float]) -> float | None:
    known = [v for v in values if math.isfinite(v)]
    return statistics.median(known) if known else None


def read_run(folder: Path) -> Run:
    """Whatever is there; only a folder without steps and without run.json is refused."""
    folder = Path(folder)
    problems: list[str] = []
    if not (folder / "run.json").exists() and not (folder / "steps.jsonl").exists():
        raise TurbogrError(
            f"{folder} is no run folder: neither run.json nor steps.jsonl in it; `turbogr train` writes one"
        )
    facts = _object(folder / "run.json", problems)
    if facts.get("format", FORMAT) != FORMAT:
        found = facts["format"]
        raise TurbogrError(f"{folder / 'run.json'} has format {found}, this turbogr reads {FORMAT}: train again")
    # A run without a summary did not finish, which is said elsewhere.
    summary = _object(folder / "summary.json", problems) if (folder / "summary.json").exists() else {}
    steps = _by_step(_lines(folder / "steps.jsonl", problems))
    evals = _by_step(_lines(folder / "evals.jsonl", problems))
    compared = _object(folder / "compared.json", problems) if (folder / "compared.json").exists() else {}
    name = str(facts.get("name") or folder.name)
    dump = folder / "dump"
    viewer = dump / "index.html" if (dump / "index.html").is_file() else None
    return Run(folder, name, facts, steps, evals, summary, compared, _schedules(dump, problems), viewer, problems)


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        found = read_json(path)
    except FileNotFoundError:
        problems.append(f"no {path.name}")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
        return {}
    if not isinstance(found, dict):
        problems.append(f"{path.name} holds no object")
        return {}
    return found


def _lines(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """A run that is killed may leave half a line."""
    try:
        text = read_text(path, errors="replace")
    except (OSError, Damaged):
        problems.append(f"no {path.name}")
        return []
    found, broken = [], []
    for place, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if isinstance(entry, dict) and type(entry.get("step")) is int and number(entry["step"]) is not None:
            found.append(entry)
        else:
            broken.append(place)
    if broken:
        problems.append(f"{path.name}: {len(broken)} unreadable lines, the first is line {broken[0]}")
    return found


def _by_step(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In order; a resumed run writes some steps again, and the last word counts."""
    return [entry for _, entry in sorted({e["step"]: e for e in entries}.items())]


def _schedules(dump: Path, problems: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Timelines of the first rank's graphs."""
    found = []
    for path in sorted(dump.glob("rank0/*/record.json")):
        record = _object(path, problems)
        for step in record.get("steps", []):
            if step.get("timeline", {}).get("arms"):
                found.append((f"{record.get('graph', path.parent.name)}, {step['name']}", step["timeline"]))
    return found
