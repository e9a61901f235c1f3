"""Two processes under gloo: each collective of torch through GE's, and a sharded embedding that trains."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from turbogr_compile.lowering.ge.graph import GraphError, from_proto
from turbogr_compile.lowering.ge.interpreter import Interpreter
from turbogr_compile.lowering.torchair import load as torchair

from .simulator import needs_torchair

pytestmark = needs_torchair
PROGRAM = Path(__file__).with_name("two_ranks.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_ranks():
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
              "TURBOGR_TORCHAIR": str(torchair.find()), "PYTHONPATH": str(PROGRAM.parents[2])}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM)], env={**os.environ, **common, "RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 0 and "all collectives agree" in text, text[-3000:]


def test_collective_without_a_process_group():
    torchair.simulated()
    import torch
    from torchair._ge_concrete_graph import ge_apis as ge
    from torchair.ge._ge_graph import GeGraph

    made = GeGraph(name="alone")
    with made:
        x = ge.Data(index=0, dtype=0, shape=[2], placement="CPU", node_name="x")
        y = ge.HcomAllReduce(x, reduction="sum", group="tag=;rank_list=0,1", fusion=0)
        y.set_meta(torch.empty(2))
        ge.NetOutput([y])
    with pytest.raises(GraphError, match=r"needs a process group\n  try: torch.distributed.init_process_group"):
        Interpreter(from_proto(made._proto)).run([torch.ones(2)])
