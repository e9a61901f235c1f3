"""What ranks of the training job hold, and how they rank: run by test_job.py, on each rank and in one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from turbogr_compile.training import build
from turbogr_compile.training.config import Config
from turbogr_compile.training.data import Batches
from turbogr_compile.training.evaluation import Evaluation
from turbogr_compile.training.ranks import Ranks

ITEMS = 30_000
CONFIG = Config.read({"dim": 16, "layers": 1, "max_len": 12, "batch": 4, "users": 50, "items": ITEMS, "mean_length": 8,
                      "evaluate_users": 19, "malloc": "default"})  # fmt: skip


def job(rank: int, world: int, folder: str, name: str = "") -> dict[str, Any]:
    """Rows that this rank has, bytes of the largest tensor that was made for them, and quality."""
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = build.recommender(CONFIG, ITEMS, table="meta")
        build.place_tables(model, CONFIG, world)
    made = max(e.self_cpu_memory_usage for e in seen.events())
    histories = build.histories(CONFIG, _own(folder, name or str(rank)))
    batches = Batches(histories, CONFIG.batch, CONFIG.max_len, 0, rank=rank, world=world)
    table: Any = model.items
    with torch.no_grad():  # rows that are there twice tie, on whichever ranks they are
        table.shard[:] = table.shard.sign() * 0.01
    evaluation = Evaluation(model, CONFIG, batches, Ranks(rank, world))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        quality = evaluation()
    ranked = max(e.self_cpu_memory_usage for e in seen.events())
    again = build.recommender(CONFIG, ITEMS, table="meta")
    build.place_tables(again, CONFIG, world)
    rows: Any = again.items
    return {"made": made, "ranked": ranked, "rows": rows.shard.clone(), "quality": quality.as_dict(),
            "baselines": evaluation.baselines}  # fmt: skip


def _own(folder: str, name: str) -> Path:
    """Generated data as a run has them; each rank reads a copy of its own."""
    mine = Path(folder) / f"data-{name}"
    shutil.copytree(Path(folder) / "data", mine)
    return mine
