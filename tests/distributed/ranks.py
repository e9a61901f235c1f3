"""Run a function on several ranks, and get what each of them returned.

    found = run_ranks(train, 2, placement="rows")          # train(rank, world, **given) of a module beside this one

One process imports everything and forks the ranks, before anything starts a thread: imports would take most of the
time, and what the first graph imports is a good part of them. Ranks meet at a file. What hangs is killed, and the test
fails with what the ranks said.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent


class RanksFailed(AssertionError):
    """Some rank raised, died or hung."""


def run_ranks(
    function: Callable[..., Any], world: int, *, timeout: float = 120, compiles: bool = False, **given: Any
) -> list[Any]:
    """What `function(rank, world, **given)` returned on each rank. What it `compiles` with is then imported once."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(given, f"{folder}/given")
        module = Path(sys.modules[function.__module__].__file__ or "").stem
        command = [sys.executable, __file__, module, function.__name__, str(world), folder, str(timeout)]
        command += ["compiles"] if compiles else []
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        here = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout + 60, env={**os.environ, **here}
        )
        if done.returncode:
            raise RanksFailed(f"{function.__name__} on {world} ranks\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}")
        return [torch.load(f"{folder}/found{rank}", weights_only=False) for rank in range(world)]


def several(rank: int, world: int, calls: dict[str, tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    """Functions one after another on the same ranks, each as (module, name, given): starting ranks takes seconds."""
    return {
        label: getattr(importlib.import_module(module), name)(rank, world, **given)
        for label, (module, name, given) in calls.items()
    }


def run_several(world: int, calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]], **rest: Any) -> dict[str, Any]:
    """What each call returned, as a list over ranks."""
    named = {
        label: (Path(sys.modules[f.__module__].__file__ or "").stem, f.__name__, given)
        for label, (f, given) in calls.items()
    }
    found = run_ranks(several, world, calls=named, **rest)
    return {label: [rank[label] for rank in found] for label in calls}


def _rank(rank: int, world: int, module: str, name: str, folder: str, timeout: float) -> None:
    faulthandler.dump_traceback_later(timeout - 5, exit=True, file=sys.stdout)
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", world)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
        function = getattr(importlib.import_module(module), name)
        found = function(rank, world, **torch.load(f"{folder}/given", weights_only=False))
        torch.save(found, f"{folder}/found{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sys.stdout.write(f"--- rank {rank}\n{traceback.format_exc()}")
        sys.stdout.flush()
        os._exit(1)  # others must not wait for what this process would still do


def _compile_something() -> None:
    """A first graph imports a thousand modules, once for all ranks. No gradient: autograd's threads do not fork."""
    sys.path.append(str(HERE.parents[1]))
    from tests.unmeasured import guards_are_not_timed

    torch.compile(lambda x: x * 2, backend="turbogr", options={"codegen": "aten", "deferral": False})(torch.ones(2))
    torch._dynamo.reset()
    guards_are_not_timed()


def main() -> int:
    module, name, world, folder, timeout, *compiles = sys.argv[1:]
    importlib.import_module(module)
    if compiles:
        _compile_something()
    context = multiprocessing.get_context("fork")
    given = (int(world), module, name, folder, float(timeout))
    ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(int(world))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(float(timeout))
    for rank in ranks:
        if rank.is_alive():
            rank.kill()
            rank.join()
    return sum(rank.exitcode != 0 for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
