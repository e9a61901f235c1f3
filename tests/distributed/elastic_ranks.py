"""What ranks of the elastic tests do: lose each other, test their collectives, save and load."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_models import Model, batch, sharded_model, whole
from torch import nn

from turbogr_compile import CheckpointError, Checkpoints, RanksLost, RowAdagrad, random_state, watch_ranks
from turbogr_compile.runtime import selftest
from turbogr_compile.runtime.selftest import CollectivesFail, check_collectives

# --- ranks that are lost -------------------------------------------------------------------------------


def _loop(group: Any, rank: int, act: Callable[[], bool]) -> str:
    """Five steps; rank 1 acts in step 3, and goes on if that returns True. What the watch said."""
    try:
        with watch_ranks(every=0.2, patience=2) as watch:
            for step in range(5):
                watch.step = step
                if rank == 1 and step == 3 and not act():
                    break
                dist.all_reduce(torch.ones(1), group=group)
    except (RanksLost, IndexError) as error:
        return f"{type(error).__name__} {getattr(error, 'ranks', '')} {error}"
    return "finished"


def lost(rank: int, world: int, folder: str) -> None:
    """One after another, with a group each; last of all rank 1 is killed, and the others write what was said."""
    said: dict[str, str] = {}
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    wake, survivors = threading.Event(), dist.new_group([0, 2])

    def fail() -> bool:
        raise IndexError("row 8 of 7")

    def stop() -> bool:
        os.kill(os.getpid(), signal.SIGSTOP)
        return True

    def kill() -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    acts = {"fine": lambda: True, "fail": fail, "finish": lambda: False, "hang": lambda: wake.wait(6), "stop": stop,
            "kill": kill}  # fmt: skip
    for name, act in acts.items():
        group = dist.new_group(timeout=timedelta(seconds=2))
        said[name] = _loop(group, rank, act)
        if name == "stop" and rank != 1:
            dist.barrier(survivors)  # both have asked
            os.kill(pids[1], signal.SIGCONT)
        if name != "kill":
            dist.barrier()
    torch.save(said, Path(folder) / f"said{rank}")
    os._exit(0)


# --- collectives ---------------------------------------------------------------------------------------


def collectives(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {"first": check_collectives(dtypes=[torch.float16]), "again": check_collectives(dtypes=[])}
    sound = dist.all_to_all_single

    def zeros(output: Any, *rest: Any, **given: Any) -> None:
        sound(output, *rest, **given)
        if rank == world - 1:
            output.zero_()

    def swapped(output: Any, given: Any, group: Any = None) -> None:
        output.copy_(torch.full_like(output, rank + 1))

    for name, op, broken in (("zeros", "all_to_all_single", zeros), ("own", "all_gather_single", swapped)):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CollectivesFail) as caught:
            patch.setattr(selftest.dist, op, broken)
            check_collectives(dtypes=[torch.bfloat16])
        found[name] = str(caught.value)
    with pytest.raises(CollectivesFail) as caught:
        check_collectives(dtypes=[torch.float8_e4m3fn])
    found["fp8"] = str(caught.value)
    model = nn.Sequential(nn.Embedding(61, 4, dtype=torch.float64))
    before = len(selftest._TESTED)
    from turbogr_compile import RowWise, plan, shard

    shard(model, plan(model, None, {"0": RowWise(wire="bfloat16")}))
    found["by shard"] = len(selftest._TESTED) - before
    return found


# --- checkpoints ---------------------------------------------------------------------------------------

PLACEMENTS = ["rows", "hash", "columns", "table", "hierarchical", "replicated"]


def _state(placement: str, lr: float) -> dict[str, Any]:
    model = sharded_model(Model(), placement)
    dense = torch.optim.Adam(model.parameters(), lr=lr)
    rows = {} if placement == "replicated" else {"rows": RowAdagrad(model, lr=lr)}
    return {"model": model, "dense": dense, **rows}


def _steps(state: dict[str, Any], first: int, last: int) -> Any:
    """The same batches on all ranks: how many there are does not show."""
    for number in range(first, last):
        for optimizer in (o for name, o in state.items() if name != "model"):
            optimizer.zero_grad()
        state["model"](*batch(0, number)).backward()
        for optimizer in (o for name, o in state.items() if name != "model"):
            optimizer.step()
    return {"table": whole(state["model"].items), "dense": state["model"].inner.weight.detach()}


def saved(rank: int, world: int, folder: str) -> dict[str, Any]:
    found = {}
    for placement in PLACEMENTS:
        state = _state(placement, 0.1)
        _steps(state, 0, 3)
        Checkpoints(f"{folder}/{placement}").save(3, state)
        found[placement] = _steps(state, 3, 5)
    torch.manual_seed(rank)
    Checkpoints(f"{folder}/random").save(1, {"random": random_state()})
    found["random"] = torch.rand(2)
    return found


def loaded(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for placement in PLACEMENTS:
        if placement == "hierarchical" and world % 2:
            continue
        state = _state(placement, 0.7)
        with torch.no_grad():
            for p in [*state["model"].parameters(), *state["model"].buffers()]:
                p.zero_()
        assert Checkpoints(f"{folder}/{placement}").load(state) == 3
        found[placement] = _steps(state, 3, 5)
    torch.manual_seed(100)
    Checkpoints(f"{folder}/random").load({"random": random_state()})
    found["random"] = torch.rand(2)
    other = {"model": sharded_model(Model(), "hash"), "dense": torch.optim.Adam([torch.zeros(1)])}
    if rank == 1:  # one rank alone sees that something is wrong, and all say so
        other["more"] = other["dense"]
    found["refused"] = []
    for state, name in ((other, "rows"), ({"model": other["model"]}, "table")):
        with pytest.raises(CheckpointError) as caught:
            Checkpoints(f"{folder}/{name}").load(state)
        found["refused"].append(str(caught.value))
    return found


def killed_while_saving(rank: int, world: int, folder: str) -> None:
    """Rank 1 dies when it writes its tensors; the others fail, and the checkpoint before is the latest."""
    checkpoints, state = Checkpoints(folder), _state("rows", 0.1)
    checkpoints.save(1, state)
    if rank == 1:
        writer = torch.distributed.checkpoint.FileSystemWriter
        writer.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        checkpoints.save(2, state)
    except (RuntimeError, CheckpointError) as error:
        torch.save(f"{type(error).__name__} {checkpoints.steps}", f"{folder}/said{rank}")
    os._exit(0)
