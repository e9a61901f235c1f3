"""Train a small recommender on several ranks, and go on where it stopped, on any number of them.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/distributed.py --folder out/distributed

A step takes the same 24 histories however many ranks there are (any number that divides 24), so losses can be compared.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import turbogr_compile as turbogr

GLOBAL_BATCH, LENGTH, ITEMS = 24, 20, 1000


class Recommender(nn.Module):
    """Scores the next item against one drawn at random. Pads are 0."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, width, padding_idx=0)
        self.places = nn.Embedding(LENGTH, width)
        self.mix = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, ids: Tensor, others: Tensor) -> Tensor:
        x = self.items(ids) + self.places.weight[: ids.shape[1]]
        h = self.mix(x.cumsum(1))[:, :-1]
        margin = (h * (self.items(ids[:, 1:]) - self.items(others))).sum(-1)
        counts = ids[:, 1:] != 0
        return (F.softplus(-margin) * counts).sum() / (GLOBAL_BATCH * LENGTH / dist.get_world_size())


class Histories:
    """Batches of this rank: a share of the step's histories, which depend on the step alone. Knows where it is."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done = steps, 0

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for step in range(self.done, self.steps):
            draw = torch.Generator().manual_seed(step)
            start = torch.randint(1, ITEMS // 2, (GLOBAL_BATCH, 1), generator=draw)
            ids = start + torch.arange(LENGTH) * torch.randint(1, 4, (GLOBAL_BATCH, 1), generator=draw)
            ids = ids * (torch.arange(LENGTH) < torch.randint(4, LENGTH, (GLOBAL_BATCH, 1), generator=draw))
            others = torch.randint(1, ITEMS, (GLOBAL_BATCH, LENGTH - 1), generator=draw)
            yield step, ids.chunk(ranks)[rank], others.chunk(ranks)[rank]

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def train(args: argparse.Namespace, in_step: Callable[[int], None] = lambda step: None) -> float:
    """The loss of the last step, over all ranks. `in_step` is called between the forward and the backward of a step."""
    torch.manual_seed(0)
    model = Recommender()
    plan = turbogr.plan(model, tables={"items": turbogr.RowWise()})
    turbogr.shard(model, plan)
    options = {"passes": ["expand-lookups{ahead=true}"], "codegen": args.codegen}
    loss_of = torch.compile(model, backend="turbogr", dynamic=True, options=options)
    rows = turbogr.RowAdagrad(model, lr=0.1)
    dense = torch.optim.Adam(model.parameters(), lr=0.01)
    data, checkpoints = Histories(args.steps), turbogr.Checkpoints(args.folder)
    random = turbogr.random_state()
    state: dict[str, Any] = {"model": model, "rows": rows, "dense": dense, "data": data, "random": random}
    done = checkpoints.load(state)
    say(f"{dist.get_world_size()} ranks, " + (f"go on after step {done}" if done else "begin"))

    total = torch.zeros(())
    with turbogr.watch_ranks() as watch:
        for step, ids, others in turbogr.ahead(data):
            watch.step = step
            loss = loss_of(ids, others)
            in_step(step)
            dense.zero_grad()
            loss.backward()
            turbogr.average_gradients(model)
            dense.step(), rows.step()
            data.done = step + 1
            if data.done % args.every == 0 or data.done == args.steps:
                total = loss.detach() / dist.get_world_size()
                dist.all_reduce(total)
                say(f"step {data.done} loss {total.item():.9f}")
                checkpoints.save(data.done, state)
    return total.item()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="out/distributed", help="of checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument("--codegen", default="inductor", help="'aten' compiles in no time and runs slower")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that ranks wait for each other")
    return parser


def main() -> None:
    args = options().parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
