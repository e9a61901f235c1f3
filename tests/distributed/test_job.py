"""The training job on ranks: no rank builds more of a table than it has, and all rank items as one process does."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # ranks import these modules by their bare names

import job_ranks
from ranks import run_ranks

from turbogr_compile.training import build


def test_ranks_hold_and_score_their_own_rows(tmp_path):
    build.histories(job_ranks.CONFIG, tmp_path / "data")
    one = job_ranks.job(0, 1, str(tmp_path), name="alone")
    found = run_ranks(job_ranks.job, 3, folder=str(tmp_path))
    whole = one["rows"]
    assert whole.shape == (job_ranks.ITEMS + 1, 16) and 0.019 < whole.std() < 0.021 and not whole[0].any()
    assert torch.equal(torch.cat([rank["rows"] for rank in found])[: len(whole)], whole)
    for rank in found:
        assert rank["made"] <= 1.01 * whole.nbytes / 3
        assert rank["ranked"] < whole.nbytes / 20
        assert rank["quality"] == one["quality"] and rank["baselines"] == one["baselines"]
    assert one["quality"]["count"] == 19
