"""The same command under torchrun: tables spread over two ranks, resumed from where both stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALLEST = [
    *("--dim", "16", "--layers", "1", "--max-len", "24", "--batch", "4", "--negatives", "16", "--threads", "1"),
    *("--users", "60", "--items", "50", "--mean-length", "8", "--evaluate-users", "20", "--save-every", "2"),
    *("--order", "balanced", "--deterministic", "--quiet"),
]


def two_ranks(out: Path, *flags: str) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["turbogr_compile", "train", "--out", str(out), *flags]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens ") == 1  # one rank speaks
    return [json.loads(line)["loss"] for line in (out / "steps.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_ranks_go_on_where_they_stopped(tmp_path):
    whole = two_ranks(tmp_path / "whole", *SMALLEST, "--steps", "4")
    assert two_ranks(tmp_path / "run", *SMALLEST, "--steps", "2") == whole[:2]
    assert two_ranks(tmp_path / "run", "--resume", "--steps", "4", "--quiet") == whole
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["finished"] and summary["hr@10"] is not None


@pytest.mark.slow
def test_semi_async_is_named(tmp_path):
    assert len(two_ranks(tmp_path / "run", *SMALLEST, "--steps", "3", "--features", "semi-async")) == 3
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["options"][0].startswith("semi-async") and about["machine"]["ranks"] == 2
