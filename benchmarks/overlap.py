"""What the pass `overlap` hides: two ranks, communication that takes as long as one says.

    python benchmarks/overlap.py [--latency 0.02] [--rounds 30] [--codegen aten] [--compute-by matmul]

A step fetches rows by an all-to-all while a dense part that needs none of them could run, and in the backward sends
their gradients back. Ranks are processes with one thread; collectives go through `runtime.latency.delayed_group`,
because on one machine gloo takes the cores that compute should have. Ways take turns, and every turn starts with a
barrier. Times are by the clock on the wall. With `--compute-by matmul` neighbours count, so read the minimum beside the
median; `--compute-by sleep` stands for a device that computes while the host waits, whatever else the machine does.
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
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as processes
from torch import Tensor, nn

from turbogr_compile.runtime.latency import delayed_group

ROWS, WIDTH = 512, 128
SCHEDULING = ["bucket-collectives", "overlap"]
WAYS = ("compute alone", "communication alone", "as written", "overlap")


def define_busy() -> None:
    """An op that takes so many seconds, forward and backward, and computes nothing meanwhile: it disturbs nobody."""

    @torch.library.custom_op("turbogr_benchmark::busy", mutates_args=())
    def busy(x: Tensor, seconds: float) -> Tensor:
        time.sleep(seconds)
        return x.clone()

    busy.register_fake(lambda x, seconds: torch.empty_like(x))
    busy.register_autograd(
        lambda ctx, grad: (torch.ops.turbogr_benchmark.busy(grad, ctx.seconds), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "seconds", inputs[1]),
    )


class Step(nn.Module):
    """Rows from the other rank, and a dense part that meets them at the end."""

    def __init__(self, group: Any, layers: int, tokens: int, asleep: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group, self.asleep = group, asleep  # seconds of each layer, where it sleeps
        self.rows = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.dense = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.x = nn.Parameter(torch.randn(tokens, WIDTH))

    def fetch(self) -> Tensor:
        return functional.all_to_all_single_autograd(self.rows, None, None, self.group)

    def meet(self, rows: Tensor) -> Tensor:
        h = self.x
        for layer in self.dense:
            h = torch.ops.turbogr_benchmark.busy(h, self.asleep) if self.asleep else torch.relu(layer(h))
        return (rows.mean(0) * h.mean(0)).sum()

    def forward(self) -> Tensor:
        return self.meet(self.fetch())


def ways(group: Any, layers: int, asleep: float, options: argparse.Namespace) -> dict[str, tuple[nn.Module, Any]]:
    """Each a module and the function to call; one module each, so that gradients do not meet."""
    made = {}
    for name in WAYS:
        step = Step(group, layers, options.tokens, asleep)
        body = {
            "compute alone": lambda s=step: s.meet(s.rows * 1.0), "communication alone": lambda s=step: s.fetch().sum(),
        }.get(name, step.forward)  # fmt: skip
        chosen = {
            "codegen": options.codegen,
            "on_error": "raise",
            "without": SCHEDULING if name == "as written" else [],
        }
        made[name] = (step, torch.compile(body, backend="turbogr", options=chosen))
    return made


def calibrated(seconds: float, tokens: int) -> int:
    """Layers whose forward takes about so long here."""
    probe = Step(None, 8, tokens)
    with torch.no_grad():
        rows = probe.rows * 1.0
        times = [timed(lambda: probe.meet(rows)) for _ in range(5)]
    return max(1, round(8 * seconds / min(times)))


def timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = delayed_group(options.latency, options.bandwidth)
    define_busy()
    asleep = options.compute / 8 if options.compute_by == "sleep" else 0.0
    layers = torch.tensor(8 if asleep else calibrated(options.compute, options.tokens))
    dist.broadcast(layers, 0)
    arms = ways(group, int(layers), asleep, options)
    for _, call in arms.values():  # compiles
        for _ in range(2):
            call().backward()
    samples: dict[str, dict[str, list[float]]] = {name: {"forward": [], "backward": []} for name in WAYS}
    for turn in range(options.rounds):
        for name in WAYS[turn % 4 :] + WAYS[: turn % 4]:
            dist.barrier()
            began = time.perf_counter()
            loss = arms[name][1]()
            middle = time.perf_counter()
            loss.backward()
            samples[name]["forward"].append(middle - began)
            samples[name]["backward"].append(time.perf_counter() - middle)
            arms[name][0].zero_grad()
    if rank == 0:
        Path(folder, "samples").write_text(json.dumps({"layers": int(layers), "samples": samples}))
    dist.barrier()
    dist.destroy_process_group()


def summary(samples: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Milliseconds, and what became of the exposed communication."""
    found: dict[str, Any] = {}
    for part in ("forward", "backward", "step"):
        for pick in (min, statistics.median):
            ms = {name: 1e3 * pick(_times(samples[name], part)) for name in WAYS}
            alone = ms["compute alone"]
            before, after = ms["as written"] - alone, ms["overlap"] - alone
            found[f"{part} {pick.__name__}"] = {
                **ms, "exposed before": before, "exposed after": after, "over compute": ms["overlap"] / alone,
                "cut": 1 - after / before if before > 0 else 0.0,
            }  # fmt: skip
    return found


def _times(of: dict[str, list[float]], part: str) -> list[float]:
    return [a + b for a, b in zip(of["forward"], of["backward"], strict=True)] if part == "step" else of[part]


def table(found: dict[str, Any]) -> str:
    names = [*WAYS, "exposed before", "exposed after"]
    lines = ["| ms | " + " | ".join(names) + " | cut | overlap / compute |", "|---" * (len(names) + 3) + "|"]
    for what, row in found.items():
        cells = [f"{row[name]:.1f}" for name in names]
        lines.append(f"| {what} | " + " | ".join(cells) + f" | {row['cut']:.0%} | {row['over compute']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--latency", type=float, default=0.020, help="seconds of each collective")
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes a second")
    parser.add_argument("--compute", type=float, default=0.020, help="seconds of compute in the forward, about")
    parser.add_argument("--compute-by", default="matmul", choices=("matmul", "sleep"))
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--codegen", default="aten", choices=("aten", "inductor"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(rank_main, (options, folder), nprocs=2)
        data = json.loads(Path(folder, "samples").read_text())
    found = summary(data["samples"])
    sys.stdout.write(f"{options.latency * 1e3:g} ms latency, {data['layers']} layers of {options.compute_by}, ")
    sys.stdout.write(f"codegen {options.codegen}, ")
    sys.stdout.write(f"{options.rounds} rounds, rank 0 of 2\n\n{table(found)}\n")
    if options.json:
        options.json.write_text(json.dumps({"summary": found, **data}, indent=1))


if __name__ == "__main__":
    main()
