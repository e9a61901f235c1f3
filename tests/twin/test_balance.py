"""Projected balance of attention: between pipes, and between cores on a batch with a heavy tail.

These are counts of a run in the twin, the same every time; nothing here is a measurement of speed.
"""

from __future__ import annotations

from functools import cache

import pytest

from turbogr_compile.kernels.twin import device
from turbogr_compile.kernels.twin.cost import imbalance
from turbogr_compile.kernels.twin.launch import Report, reports
from turbogr_compile.kernels.twin.workloads import WORKLOADS, Batch

CORES = 40
# Cycles that SiLU in fp32 with its casts, scale and mask takes a vector core for one pair, by the documented rates.
VECTOR_CYCLES = 0.15
BATCH = Batch(sequences=32, longest=1024, fill=0.3, heads=4, head_dim=64)


@cache
def launched(workload: str) -> dict[str, Report]:
    with reports() as seen, device(cores=CORES):
        WORKLOADS[workload][0](BATCH)
    return {report.op: report for report in seen}


def test_the_batch_has_a_heavy_tail():
    lengths = BATCH.lengths
    assert lengths.max() > 3 * lengths.float().mean() and lengths.max() > 4 * lengths.median()


def test_attention_is_near_the_bound_of_the_vector_pipe():
    report = launched("attention-silu")["jagged_attention"]
    bound = VECTOR_CYCLES * BATCH.pairs * BATCH.heads / CORES
    assert max(core["busy"]["V"] for core in report.cores) <= bound
    # The core that ends last, all waiting included.
    assert max(core["totals"]["finish"] for core in report.cores) <= 1.3 * bound


@pytest.mark.parametrize("workload", ["attention-silu", "attention-softmax"])
@pytest.mark.parametrize("op", ["jagged_attention", "jagged_attention_backward"])
def test_cores_have_as_much_to_do(workload: str, op: str):
    report = launched(workload)[op]
    assert len(report.cores) == CORES
    assert imbalance(report) < 0.05
