"""runtime.latency: a group on which collectives take as long as one says."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from turbogr_compile.errors import OptionError
from turbogr_compile.runtime.latency import delayed_group

from .overlap_ranks import latencies
from .ranks import run_ranks

SECONDS, BANDWIDTH = 0.1, 1e6
BYTES = {
    "all_reduce": 16e3, "all_gather": 32e3, "reduce_scatter": 16e3, "all_to_all": 16e3, "broadcast": 16e3,
    "several": 32e3, "barrier": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return run_ranks(latencies, 2, seconds=SECONDS, bandwidth=BANDWIDTH)


@pytest.mark.parametrize("what", BYTES)
def test_a_collective_takes_what_was_asked_for(found, what):
    """The least of several, within 5 %: a busy machine only ever takes longer."""
    wanted = SECONDS + BYTES[what] / BANDWIDTH
    for rank in found:
        issued, there, right = rank[what]
        assert right and wanted <= there < 1.05 * wanted, (what, there, wanted)
        assert issued < wanted / 4, "issuing does not wait"


@pytest.mark.parametrize("seconds, bandwidth", [(-1, 1e9), (0.1, 0)], ids=["negative latency", "no bandwidth"])
def test_bad_settings(seconds, bandwidth):
    with pytest.raises(OptionError, match="a latency is not negative and a bandwidth positive"):
        delayed_group(seconds, bandwidth)


def test_no_job():
    if dist.is_initialized():
        pytest.skip("another test of this process has a group")
    with pytest.raises(OptionError, match=r"needs torch\.distributed.init_process_group"):
        delayed_group(0.1)
