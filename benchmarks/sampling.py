"""Sampled softmax with negatives of its own for each position: turbogr against eager and Inductor, in one command.

    python benchmarks/sampling.py [--quick] [--threads 1,2] [--malloc tuned,default] [--json results.json]

One step is the loss and the gradients of queries and table; the gradient of the table is dense and new in every step,
zeros included, in all ways alike. No way has pads: what packing saves is not counted here. Ways take turns in rotating
order, in a process for each allocator (benchmarks/measure.py says why there are two) and number of threads; results are
compared before anything is timed. Medians, by processor time on one thread, by the clock on the wall on several.

FP16 reads negatives from a copy of the table, which has to follow the table. "fused FP16" does not count that: an
optimizer that writes every row can write both. "fused FP16, refreshed" counts a pass over all blocks that the step has
touched, which are nearly all of them here. Memory is what a step needs at its peak, beyond what is there before it,
once with the gradient of the table and once without, measured under the default allocator.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure import MALLOC, Effort, Neighbours, machine, say, seconds, system_share, take_turns
from plan import require_same
from torch import Tensor

from turbogr_compile.kernels import half_rows

ops = torch.ops.turbogr

Step = Callable[[], tuple[Tensor, ...]]
INDUCTOR, EAGER, FUSED, HALF, SHARED = "Inductor", "padded eager", "fused", "fused FP16", "fused, 8 share"
REFRESHED = "fused FP16, refreshed"
HIT = -1e4


def main() -> None:
    options = parse()
    if options.measure:
        options.json.write_text(json.dumps(measure(options)))
        return
    results: dict[str, Any] = {"machine": machine(), "runs": []}
    print(", ".join(f"{key} {value}" for key, value in results["machine"].items()), end="\n\n", flush=True)
    for malloc in options.malloc.split(","):
        for threads in options.threads.split(","):
            results["runs"].append(run := in_own_process(options, malloc, threads))
            print(table_of(run), end="\n\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def parse() -> argparse.Namespace:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--threads", default="1", help="numbers of threads, by comma")
    words.add_argument("--malloc", default="tuned,default", help="tuned, default or both, by comma")
    words.add_argument("--quick", action="store_true", help="a small table, few rounds: does it run")
    words.add_argument("--json", type=Path, help="write all samples to this file")
    words.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = words.parse_args()
    for name in options.malloc.split(","):
        if name not in MALLOC:
            sys.exit(f"sampling.py: unknown malloc {name!r}; known: {', '.join(MALLOC)}")
    for number in options.threads.split(","):
        if not number.isdecimal() or not 1 <= int(number) <= machine()["cores"]:
            sys.exit(f"sampling.py: --threads takes numbers from 1 to {machine()['cores']}; got {number!r}")
    return options


def in_own_process(options: argparse.Namespace, malloc: str, threads: str) -> dict[str, Any]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    environment = {"TURBOGR_KERNELS": "required", **inherited, **MALLOC[malloc], "OMP_NUM_THREADS": threads}
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "run.json"
        command = [sys.executable, __file__, "--measure", "--malloc", malloc, "--threads", threads, "--json", str(into)]
        command += ["--quick"] if options.quick else []
        if subprocess.run(command, env=environment).returncode:
            sys.exit(f"sampling.py: no figures for {malloc} malloc, {threads} threads: the reason is above")
        return json.loads(into.read_text())


# --- ways to do a step -------------------------------------------------------------------------------


class Problem:
    """Queries, their positives and negatives, and a table."""

    def __init__(self, count: int, width: int, positions: int, each: int) -> None:
        torch.manual_seed(0)
        self.table = (torch.randn(count, width) * 0.05).requires_grad_()
        self.query = torch.randn(positions, width).requires_grad_()
        self.own, self.ids = torch.randint(0, count, (positions,)), torch.randint(0, count, (positions, each))
        # Positives and negatives in one lookup: in two, there would be two dense gradients to add up.
        self.every = torch.cat([self.own[:, None], self.ids], 1)
        self.hits = (self.every == self.own[:, None]).index_fill_(1, torch.tensor([0]), False)
        self.half, self.scales = ops.half_rows(self.table.detach(), half_rows.BLOCK)

    def step(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def run() -> tuple[Tensor, ...]:
            total = loss(self.query, self.table)
            return total.detach(), *torch.autograd.grad(total, (self.query, self.table))

        return run

    def with_softmax(self, scores: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def loss(query: Tensor, table: Tensor) -> Tensor:
            return -torch.where(self.hits, HIT, scores(query, table)).log_softmax(1)[:, 0].sum()

        return loss

    def by_bmm(self, query: Tensor, table: Tensor) -> Tensor:
        return torch.bmm(F.embedding(self.every, table), query.unsqueeze(2)).squeeze(2)

    def by_product(self, query: Tensor, table: Tensor) -> Tensor:
        """Inductor makes one loop of this, without a tensor of all rows."""
        return (F.embedding(self.every, table) * query.unsqueeze(1)).sum(-1)

    def by_lookup_dot(self, query: Tensor, table: Tensor) -> Tensor:
        return ops.lookup_dot(query, table, self.every, -1.0)

    def fused(self, group: int = 1, *copy: Any) -> Callable[[Tensor, Tensor], Tensor]:
        attributes = 1.0, -1.0, HIT, group, "softmax"
        return lambda query, table: ops.sampled_loss_total(query, table, self.own, self.ids, None, *attributes, *copy)

    def refreshed(self) -> tuple[Tensor, ...]:
        found = self.step(self.fused(1, self.half, None, self.scales))()
        half_rows.refresh(self.half, self.scales, self.table, half_rows.BLOCK, self.ids)
        return found

    def ways(self) -> dict[str, Step]:
        compiled = {
            INDUCTOR: torch.compile(self.with_softmax(self.by_product), dynamic=False),
            "Inductor, bmm": torch.compile(self.with_softmax(self.by_bmm), dynamic=False),
        }
        return {
            EAGER: self.step(self.with_softmax(self.by_bmm)),
            **{name: self.step(loss) for name, loss in compiled.items()},
            "lookup_dot": self.step(self.with_softmax(self.by_lookup_dot)),
            FUSED: self.step(self.fused()),
            HALF: self.step(self.fused(1, self.half, None, self.scales)),
            REFRESHED: self.refreshed,
            SHARED: self.step(self.fused(8)),
        }


def check(ways: dict[str, Step]) -> None:
    expected = ways[FUSED]()
    for name, way in ways.items():
        if name == SHARED:  # another loss
            way()
            continue
        require_same(f"{name} and {FUSED}", way(), expected, 1e-2 if "FP16" in name else 1e-3)


# --- one process -------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    threads = int(options.threads)
    torch.set_num_threads(threads)
    sizes = (20_000, 32, 64, 32) if options.quick else (1_000_000, 128, 1024, 512)
    problem = Problem(*sizes)
    ways = problem.ways()
    say(f"{options.malloc} malloc, {threads} threads: compiling and comparing")
    check(ways)
    neighbours = Neighbours()
    samples = take_turns(ways, Effort(2, 3, 1.0) if options.quick else Effort(9, 15, 60.0), called_before=True)
    memory = {name: peak_of(way) for name, way in ways.items()} if options.malloc == "default" else {}
    run = {"malloc": options.malloc, "threads": threads, "sizes": sizes, "neighbours": neighbours.share()}
    return {**run, "samples": samples, "memory": memory, "table bytes": problem.table.numel() * 4}


def peak_of(way: Step) -> int | None:
    """Bytes at the peak of one step, beyond those that were there before; None where the system does not tell."""
    try:
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        way()
        return status("VmHWM") - before
    except OSError:
        return None


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def table_of(run: dict[str, Any]) -> str:
    """Medians and ratios, as text."""
    threads, samples = run["threads"], {name: s for name, s in run["samples"].items() if name != "GEMM"}
    times = {name: seconds(s, threads) for name, s in samples.items()}
    count, width, positions, each = run["sizes"]
    clock = "processor time" if threads == 1 else "wall time"
    lines = [
        f"{count} x {width} table, {positions} positions, {each} negatives each; {run['malloc']} malloc, "
        f"{threads} threads, median {clock}; others took {run['neighbours'] or 0:.0%} of the machine"
    ]
    best = min((times[n] for n in times if n.startswith(INDUCTOR) and times[n]), default=None)
    for name, time in times.items():
        if time is None:
            lines.append(f"  {name:24s} {samples[name]['failed']}")
            continue
        line = f"  {name:24s} {1e3 * time:8.1f} ms ({system_share(samples[name]):3.0%} system)"
        line += f"   best Inductor / this {best / time:5.2f}" if best else ""
        line += f"   this / {FUSED} {time / times[FUSED]:5.2f}" if times[FUSED] else ""
        if peak := run["memory"].get(name):
            line += (
                f"   peak {peak / 2**20:6.0f} MB, {max(peak - run['table bytes'], 0) / 2**20:6.0f} without the table's"
            )
        lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
