"""What running ahead hides: two ranks with a sharded table, communication that takes as long as one says.

    python benchmarks/pipeline.py [--latency 0.015] [--compute 0.06] [--rounds 5] [--steps 12] [--json FILE]

A step looks rows of its batch up, runs a dense part, sends gradients of rows back and updates them. Four exchanges are
needed: counts, ids, rows, gradients. `sync` waits for all of them; `prefetch`, the default in a loop over `ahead`, has
the first two done by the worker during the step before; `semi-async` all four. Compute sleeps: it stands for a device
that computes while the host is free, whatever else the machine does. Ways take turns, loop by loop; the first steps of
each loop do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from overlap import define_busy
from torch import Tensor, nn

import turbogr_compile
from turbogr_compile.runtime.latency import delayed_group
from turbogr_compile.runtime.sharding import staleness

ROWS, WIDTH, IDS, FILLING = 20_000, 64, 2000, 3
WAYS = {"sync": "expand-lookups{ahead=false}", "prefetch": "", "semi-async": "expand-lookups{staleness=1}"}


class Step(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.dense, self.seconds = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1), seconds

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.ops.turbogr_benchmark.busy(self.items(ids), self.seconds)
        return self.dense(h).square().mean()


class Way:
    """A model of its own, with tables whose exchanges are slow."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.model = name, Step(options.compute / 2)
        turbogr_compile.shard(self.model, turbogr_compile.plan(self.model, None, {"items": turbogr_compile.RowWise()}))
        table = self.model.items.table
        table.group, table.ahead = (delayed_group(options.latency) for _ in range(2))
        self.rows = turbogr_compile.RowAdagrad(self.model, lr=0.05)
        self.dense = torch.optim.SGD(self.model.parameters(), 0.05)
        passes = [WAYS[name]] if WAYS[name] else []
        self.run = torch.compile(self.model, backend="turbogr", options={"on_error": "raise", "passes": passes})

    def loop(self, batches: list[Tensor]) -> list[float]:
        """Seconds of each step once the loop is under way."""
        seconds, began = [], 0.0
        for ids in turbogr_compile.ahead(batches):
            self.model.zero_grad()
            self.run(ids).backward()
            turbogr_compile.average_gradients(self.model)
            self.dense.step(), self.rows.step()
            now = time.perf_counter()
            seconds.append(now - began)
            began = now
        return seconds[FILLING:]


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    define_busy()
    random = torch.Generator().manual_seed(rank)
    popular = 1.0 / torch.arange(1, ROWS + 1) ** 1.05
    batches = [torch.multinomial(popular, IDS, True, generator=random) for _ in range(options.steps + FILLING)]
    ways = {name: Way(name, options) for name in WAYS}
    for way in ways.values():  # compiles
        way.loop(batches[: FILLING + 1])
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds):
        for name in [*ways][turn % 3 :] + [*ways][: turn % 3]:
            dist.barrier()
            samples[name] += ways[name].loop(batches)
    if rank == 0:
        Path(folder, "samples").write_text(json.dumps(samples))
        fraction = staleness(ways["semi-async"].model)["items"].stale_row_fraction
        Path(folder, "table").write_text(table(samples, options) + f"\n\nstale rows: {fraction:.0%} of those fetched\n")
    dist.barrier()
    dist.destroy_process_group()


def table(samples: dict[str, list[float]], options: argparse.Namespace) -> str:
    lines = ["| ms of a step | minimum | median | median over compute |", "|---|---|---|---|"]
    for name, seconds in samples.items():
        middle = statistics.median(seconds)
        lines.append(f"| {name} | {1e3 * min(seconds):.1f} | {1e3 * middle:.1f} | {middle / options.compute:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--latency", type=float, default=0.015, help="seconds of each collective")
    parser.add_argument("--compute", type=float, default=0.060, help="seconds of compute in a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="that count in each round")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(rank_main, (options, folder), nprocs=2)
        found = Path(folder, "table").read_text()
        if options.json:
            options.json.write_text(Path(folder, "samples").read_text())
    what = f"{options.latency * 1e3:g} ms a collective, {options.compute * 1e3:g} ms of compute"
    sys.stdout.write(f"{what}, {options.rounds * options.steps} steps each, rank 0 of 2\n\n{found}")


if __name__ == "__main__":
    main()
