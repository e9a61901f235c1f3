"""What padded eager needs for the batch that a compiled run trains on: measured, or that it fails at a limit.

    python -m turbogr_compile.training.compare_memory RUN [LIMIT_GIB]

Eager runs one step in a process of its own, which may have so many bytes more than it starts with; one that needs more
fails there, cleanly. How much it needs at least is counted without allocating anything.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .config import Config, read_file
from .memory import eager_estimate, status

GIB = 2**30


def compare_memory(config: Config, run: Path, limit: int) -> dict[str, Any]:
    """Of the run in a folder, which has ended, and of eager with the same model, batch and data."""
    from . import build

    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    catalogue = build.histories(config, run / "data").catalogue
    eager: dict[str, Any] = {"estimate": eager_estimate(config, catalogue), "limit": limit, **_in_eager(run, limit)}
    needed = eager["peak"] if eager["outcome"] == "ran" else eager["estimate"]
    ratio = needed / summary["peak_memory"] if summary["peak_memory"] else None
    found = {"turbogr": {"peak": summary["peak_memory"], "mfu": summary["mfu"]}, "eager": eager, "ratio": ratio}
    return found | {"text": text_of(found)}


def text_of(found: dict[str, Any]) -> str:
    eager, peak = found["eager"], found["turbogr"]["peak"]
    lines = [f"turbogr's step took {peak / GIB:.2f} GiB at its peak (measured)"] if peak else []
    lines += [f"padded eager needs {eager['estimate'] / GIB:.2f} GiB at least for the same batch (counted)"]
    if eager["outcome"] == "ran":
        lines += [f"padded eager took {eager['peak'] / GIB:.2f} GiB (measured), {found['ratio']:.1f} times as much"]
    else:
        ratio = f"; by the count it needs {found['ratio']:.1f} times as much as turbogr" if found["ratio"] else ""
        lines += [f"padded eager fails when it may have {eager['limit'] / GIB:.1f} GiB: {eager['error']}{ratio}"]
    return "\n".join(lines)


def _in_eager(run: Path, limit: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "turbogr_compile.training.compare_memory", str(run), str(limit / GIB)]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        return {"outcome": "failed", "error": said, "peak": None}


def main(run: Path, limit: int) -> dict[str, Any]:
    import resource

    from .loop import train

    config = Config.read(read_file(run / "run.json"))
    data = str(run / "data") if config.data == "generated" else config.data
    alone: dict[str, Any] = {
        "backend": "eager",
        "features": (),
        "steps": 1,
        "accumulate": 1,
        "evaluate_users": 0,
        "save_every": 0,
    }
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + limit, resource.RLIM_INFINITY))
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = train(dataclasses.replace(config, data=data, **alone), folder, quiet=True)
        except (MemoryError, RuntimeError) as error:
            told = (str(error) or "MemoryError").strip().splitlines()[0]
            return {"outcome": "failed", "error": told, "peak": None}
    return {"outcome": "ran", "error": "", "peak": result.summary["peak_memory"]}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(float(sys.argv[2] if sys.argv[2:] else 12) * GIB))))
