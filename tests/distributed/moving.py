"""What ranks do in tests of the exchange inside of a graph: gradients against those of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import turbogr_compile
from turbogr_compile.runtime.balance import Balancer, Cost, RowExchange

WIDTH = 101  # a size that no batch has: equal sizes would be taken for the same one


class Model(nn.Module):
    """A layer where tokens are loaded, the exchange, and a mean over each sequence where it was sent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.double()
        self.exchange: Any = lambda x, *_: x

    def forward(self, x: Tensor, sequence: Tensor, empty: Tensor, *way: Tensor) -> Tensor:
        rows = self.exchange(self.before(x).tanh(), *way)
        sums = empty.index_add(0, sequence, rows)
        return self.after(sums.sin()).square().sum()


def sequences(world: int, step: int) -> tuple[np.ndarray, np.ndarray, list[Tensor]]:
    """Lengths and ranks of a global batch, and its tokens; the same on all ranks."""
    random = np.random.default_rng(step)
    counts = random.integers(2, 6, world)
    lengths = random.integers(1, 12, counts.sum()) * (1 + 5 * (random.random(counts.sum()) < 0.2))
    draw = torch.Generator().manual_seed(step)
    tokens = [torch.randn(int(n), WIDTH, generator=draw, dtype=torch.float64) for n in lengths]
    return lengths, counts, tokens


def gradients(model: nn.Module, loss: Tensor) -> Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def inputs(lengths: np.ndarray) -> tuple[Tensor, Tensor]:
    """The number of each row's sequence, and nothing yet for each sequence."""
    number = torch.arange(len(lengths)).repeat_interleave(torch.from_numpy(lengths))
    return number, torch.zeros(len(lengths), WIDTH, dtype=torch.float64)


def compared(rank: int, world: int, compiles: bool) -> dict[str, Any]:
    alone, model = Model(), Model()
    model.exchange = RowExchange()
    torch._dynamo.reset()
    run = turbogr_compile.compile(model, dynamic=True, fullgraph=True, codegen="aten") if compiles else model
    apart, moved, graphs = 0.0, 0, set()
    for step in range(4):
        lengths, counts, tokens = sequences(world, step)
        plan = Balancer().plan(Cost(0, 1, 0.1)(lengths), world, counts.tolist(), lengths)
        moved += plan.moved
        mine, sent_here = plan.given == rank, plan.ranks == rank
        x = torch.cat([t for t, m in zip(tokens, mine, strict=True) if m])
        loss = run(x, *inputs(lengths[sent_here]), *model.exchange.way(plan))
        found = gradients(model, loss)
        dist.all_reduce(found)
        wanted = gradients(alone, alone(torch.cat(tokens), *inputs(lengths)))
        apart = max(apart, (found - wanted).abs().max().item())
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return {"apart": apart, "moved": moved, "graphs": len(graphs), "scale": wanted.abs().max().item()}
