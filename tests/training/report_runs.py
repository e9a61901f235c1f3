"""Run folders as the training loop writes them, small and made up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

HOSTILE = '</style></script><img src=x onerror=alert(1)> & "quoted" \x00\x1b[31m'


def step(number: int, seconds: float, loss: float, memory: float | None = 400e6) -> dict[str, Any]:
    return {
        "step": number, "loss": loss, "seconds": seconds, "tokens": 1000, "padded": 4000, "flops": 2e9,
        "memory": memory,
    }  # fmt: skip


def loss(number: int) -> float:
    return 2 + 5 * math.exp(-number / 20)


def write_run(folder: Path, name: str, seconds: float = 0.1, apart: float = 0.0, steps: int = 40, memory: float = 4e8,
              finished: bool | None = True, facts: dict[str, Any] | None = None) -> Path:  # fmt: skip
    """`finished` None leaves no summary, as a killed run does."""
    folder.mkdir(parents=True)
    remark = {
        "kind": "applied", "id": "packed", "pass": "pack-rows", "text": "9 values live on u0 rows",
        "line": "model.py:16  x = self.items(ids) * valid",
    }  # fmt: skip
    ours = "turbogr" in name
    about = {
        "format": 1, "name": name, "model": "hstu", "config": {"batch": 8, "backend": name},
        "parameters": {"dense": 120_000, "tables": 64_000}, "machine": {"cpu": "a processor", "cores": 2},
        "versions": {"torch": "2.13.0"}, "options": [], "remarks": [remark] if ours else [],
        "passes": [{"graph": "0.0-captured", "text": "003  pack-rows  changed"}] if ours else [],
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps({**about, **(facts or {})}))
    lines = [
        step(i, 5.0 if i == 1 else seconds * (1 + i % 3 / 10), loss(i) + apart * i, memory) for i in range(1, steps + 1)
    ]
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evals = [{"step": s, "hr@10": 0.1 + s / 1000, "ndcg@10": 0.05 + s / 2000, "count": 100} for s in (20, 40)]
    (folder / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evals))
    if finished is not None:
        summary = {
            "steps": steps, "seconds": 9.0, "tokens_per_second": 1000 / seconds, "mfu": 0.3, "gemm_flops": 1e11,
            "padding_saved": 0.75, "peak_memory": memory, "first_loss": loss(1), "last_loss": loss(steps),
            "hr@10": 0.14, "ndcg@10": 0.07, "finished": finished, "reason": "" if finished else "out of memory",
        }  # fmt: skip
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
