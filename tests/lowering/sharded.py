"""A small SASRec whose item table is spread over the ranks of a group, and the program that one rank runs.

Which rows to ask of whom depends on the ids alone, so `route` runs outside of the compiled step, as a data loader would
run it. Inside are the exchange of rows, the model, and in the backward the exchange of their gradients.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn

from turbogr_compile.lowering.torchair import native

ITEMS, WIDTH, LENGTH, BATCH = 40, 16, 12, 4


class Route(NamedTuple):
    asked: Tensor  # rows of mine that the ranks ask for, in the order of ranks
    place: Tensor  # where, among the rows I get, each of my lookups finds its own
    sent: list[int]  # rows that I send, to each rank
    received: list[int]


def route(ids: Tensor) -> Route:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    unique, place = torch.unique(ids, return_inverse=True)
    wanted = torch.bincount(unique // (ITEMS // ranks), minlength=ranks)
    counts = torch.empty_like(wanted)
    dist.all_to_all_single(counts, wanted)
    asked = unique.new_empty(int(counts.sum()))
    dist.all_to_all_single(asked, unique, counts.tolist(), wanted.tolist())
    return Route(asked - rank * (ITEMS // ranks), place, counts.tolist(), wanted.tolist())


class Whole(nn.Module):
    """The table of one process."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.clone())

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class Shard(nn.Module):
    """One rank's rows of the table, and the rows that the others have."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(table.chunk(dist.get_world_size())[dist.get_rank()].clone())

    def forward(self, r: Route) -> Tensor:
        mine = F.embedding(r.asked, self.weight)
        rows = functional.all_to_all_single_autograd(mine, r.received, r.sent, dist.group.WORLD)
        return F.embedding(r.place, rows)


class SASRec(nn.Module):
    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.items = items
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def loss(self, ids: Tensor, history: Any, candidates: Any, total: Tensor) -> Tensor:
        """Of the next item against one that was not next, summed over positions that count; `total` of all ranks."""
        valid = ids != 0
        x = self.items(history) * WIDTH**0.5 + self.positions(torch.arange(ids.shape[1]))
        h = self.norm(x)
        score = self.query(h) @ self.key(h).transpose(1, 2) / WIDTH**0.5
        past = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        score = score.masked_fill(~(past & valid[:, None, :]), -1e9)
        x = x + score.softmax(-1) @ self.value(h)
        x = self.last(x + self.feed(x))
        wanted, other = self.items(candidates).unbind(0)
        margin = (x * wanted).sum(-1) - (x * other).sum(-1)
        return (F.softplus(-margin) * valid).sum() / total


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of all ranks: histories padded on the right, the next item and another one."""
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(1, ITEMS, (2 * BATCH, LENGTH + 1), generator=random)
    lengths = torch.randint(2, LENGTH + 1, (2 * BATCH, 1), generator=random)
    ids = torch.where(torch.arange(LENGTH + 1) < lengths + 1, ids, 0)
    return ids[:, :-1] * (ids[:, 1:] != 0), ids[:, 1:], torch.randint(1, ITEMS, (2 * BATCH, LENGTH), generator=random)


def train(rank: int) -> dict[str, Any]:
    """Steps through `ascend-sim` beside the whole model in this process; the largest difference, and the graphs."""
    torch.manual_seed(0)
    table = torch.randn(ITEMS, WIDTH)
    whole, sharded = SASRec(Whole(table)), SASRec(Shard(table))
    options = {"target": "ascend-sim", "on_error": "raise"}
    step = torch.compile(sharded.loss, backend="turbogr", options=options, dynamic=True, fullgraph=True)

    @torch.compile(backend="turbogr", options=options)
    def add_up(gradients: list[Tensor]) -> list[Tensor]:
        return functional.all_reduce_coalesced(gradients, "sum", dist.group.WORLD)

    worst, losses, graphs = 0.0, [], []
    for number in range(3):
        ids, wanted, other = batch(number)
        total = (ids != 0).sum().float()
        alone = whole.loss(ids, ids, torch.stack([wanted, other]), total)
        alone.backward()

        part = slice(rank * BATCH, (rank + 1) * BATCH)
        mine = ids[part]
        history, candidates = route(mine), route(torch.stack([wanted[part], other[part]]))
        with native.watching() as seen:
            loss = step(mine, history, candidates, total)
            loss.backward()
            dense = [p for name, p in sharded.named_parameters() if name != "items.weight"]
            for p, gradient in zip(dense, add_up([p.grad for p in dense]), strict=True):
                p.grad = gradient
        graphs += seen
        together = loss.detach().clone()
        dist.all_reduce(together)
        losses.append(together.item())
        worst = max(worst, abs(together.item() - alone.item()))
        for model in (whole, sharded):
            torch.optim.SGD(model.parameters(), lr=0.5).step()
            model.zero_grad()
        pairs = zip(whole.parameters(), sharded.parameters(), strict=True)
        for name, (a, b) in zip(dict(whole.named_parameters()), pairs, strict=True):
            a = a.chunk(2)[rank] if name == "items.weight" else a
            worst = max(worst, (a - b).abs().max().item())
    return {"worst": worst, "losses": losses, "graphs": [described(g) for g in graphs]}


def described(loaded: native.LoadedGraph) -> dict[str, Any]:
    graph = loaded.graph
    assert graph is not None
    return {
        "runs": loaded.runs,
        "nodes": [
            {"name": n.name, "type": n.type, "stream": n.labels.get("_user_stream_label", ""),
             "inputs": [s.node for s in n.inputs if s], "after": list(n.controls)}
            for n in graph.nodes
        ],
    }  # fmt: skip


def main(meeting_point: str, answer: str) -> None:
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    found = train(rank)
    dist.barrier()
    dist.destroy_process_group()
    with open(f"{answer}{rank}", "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
