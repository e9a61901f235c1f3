"""Training with the loss outside of a compiled model, on two ranks; each function returns how far it is from eager."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipelines import PASSES
from sharded_models import Model, batch, sharded_model
from torch import nn
from torch.distributed._functional_collectives import all_reduce

import turbogr_compile
from turbogr_compile.runtime.sharding import RowSGD, average_gradients
from turbogr_compile.testing import Flops

DDP = nn.parallel.DistributedDataParallel


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items, self.up, self.head = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 16), nn.Linear(16, 50)
        self.unused = nn.Linear(3, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.up(self.items(ids))))


def _batches(rank: int, steps: int = 4) -> Any:
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(1, 50, (4, 12), generator=generator) * (
            torch.arange(12) < torch.tensor([[3], [9], [5], [2]])
        )
        yield ids, ids.roll(-1, 1) * (ids != 0) * (ids.roll(-1, 1) != ids[:, :1])


def _trained(called: nn.Module, model: nn.Module, rank: int, reads: bool) -> tuple[list[float], float]:
    """What was seen, and FLOPs of all steps but the first, in which things are tried out and compiled."""
    optimizer, losses, first = torch.optim.SGD(model.parameters(), lr=0.5), [], 0
    with Flops() as flops:
        for ids, target in _batches(rank):
            optimizer.zero_grad()
            logits = called(ids)
            loss = F.cross_entropy(logits.view(-1, 50), target.view(-1), ignore_index=0)
            if reads and rank == 0:
                losses.append(logits.mean().item())
            loss.backward()
            optimizer.step()
            if reads and rank == 0:
                losses.append(logits.sum().item())
            losses.append(loss.item())
            first = first or flops.total
    return losses, float(flops.total - first)


def ddp(rank: int, world: int, order: str, find_unused: bool = False, reads: bool = False) -> dict[str, Any]:
    """DDP around the compiled model, the model compiled inside of DDP, or DDP compiled: against DDP in eager."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    theirs = Rows()
    if not find_unused:
        del theirs.unused
    ours = copy.deepcopy(theirs)
    inside = _with_the_loss_inside(copy.deepcopy(theirs), rank)
    expected, eager = _trained(DDP(theirs, find_unused_parameters=find_unused), theirs, rank, reads)
    options = {"target": "eager", "deferral": True, "verify": "fast", "worth": "always"}
    if order == "ddp(compile(model))":
        called: Any = DDP(torch.compile(ours, backend="turbogr", options=options), find_unused_parameters=find_unused)
    elif order == "compile(ddp(model))":
        called = torch.compile(DDP(ours, find_unused_parameters=find_unused), backend="turbogr", options=options)
    else:
        ours.compile(backend="turbogr", options=options)
        called = DDP(ours, find_unused_parameters=find_unused)
    found, deferred = _trained(called, ours, rank, reads)
    gaps = [abs(a - b) for a, b in zip(expected, found, strict=True)]
    gaps += [(p - q).abs().max().item() for p, q in zip(theirs.parameters(), ours.parameters(), strict=True)]
    return {"worst": max(gaps), "flops": eager / deferred, "of the whole step": deferred / inside}


def _with_the_loss_inside(model: nn.Module, rank: int) -> float:
    def loss(ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(ids).view(-1, 50), target.view(-1), ignore_index=0)

    options = {"target": "eager", "deferral": False, "verify": "fast", "worth": "always"}
    step = torch.compile(loss, backend="turbogr", options=options)
    first = 0
    with Flops() as flops:
        for batch in _batches(rank):
            step(*batch).backward()
            first = first or flops.total
    return float(flops.total - first)


def programs(rank: int, world: int, first: int, count: int) -> dict[str, Any]:
    """Random user programs whose reads happen on one rank alone: what became of them, and those that differ."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from tests.deferral import random_programs

    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    found: dict[str, Any] = {"fine": 0}
    for seed in range(first, first + count):
        verdict, source = random_programs.run(seed)
        if verdict in random_programs.FINE:
            found["fine"] += 1
        else:
            found[f"seed {seed}"] = f"{verdict}\n{source}"
    return found


# --- graphs that exchange data --------------------------------------------------------------------------


class Tables(Model):
    """Rows of scores, with a table over all ranks."""

    def forward(self, ids: torch.Tensor, wanted: torch.Tensor, user: torch.Tensor) -> torch.Tensor:
        h = self.out(torch.tanh(self.inner(self.items(ids) + self.users(user)[:, None])))
        return h * self.items(wanted)


def sharded(rank: int, world: int, how: str) -> dict[str, Any]:
    """A sharded table, its loss outside, and a rank that alone looks at what came out: as without deferral."""
    losses = {}
    for deferral in (False, True):
        torch._dynamo.reset()
        model = sharded_model(Tables().double(), "rows")
        rows, dense = RowSGD(model, lr=0.1), torch.optim.SGD(model.parameters(), 0.1)
        options = {"codegen": "aten", "on_error": "raise", "passes": [PASSES[how]], "deferral": deferral}
        run = torch.compile(model, backend="turbogr", dynamic=True, options=options)
        batches = [batch(rank, number) for number in range(6)]
        losses[deferral] = []
        for given in batches if how == "sync" else turbogr_compile.ahead(batches):
            model.zero_grad()
            scores = run(*given)
            loss = F.softplus(-scores.sum(-1)).mean()
            loss.backward()
            average_gradients(model)
            dense.step(), rows.step()
            if rank == 0:
                losses[deferral].append(scores.mean().item())
            losses[deferral].append(loss.item())
    return {"worst": max(abs(a - b) for a, b in zip(losses[False], losses[True], strict=True))}


class Averaged(nn.Module):
    """Rows that are centred over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.head = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.items(ids)
        return self.head(x - all_reduce(x.mean((0, 1)), "sum", dist.group.WORLD) / dist.get_world_size())


def collective(rank: int, world: int) -> dict[str, Any]:
    """A collective inside of the model. One rank alone reads its output, another one never does."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    theirs = Averaged()
    ours = copy.deepcopy(theirs)
    called = torch.compile(ours, backend="turbogr", options={"target": "eager", "deferral": True})
    seen: list[list[float]] = [[], []]
    for model, run, found in ((theirs, theirs, seen[0]), (ours, called, seen[1])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for ids, target in _batches(rank):
            optimizer.zero_grad()
            logits = run(ids)
            loss = F.cross_entropy(logits.view(-1, 50), target.view(-1), ignore_index=0)
            loss.backward()
            optimizer.step()
            if rank == 0:
                found.append(logits.sum().item())
            unread = run(ids)
            if rank == 0:
                found.append(unread.sum().item())
            found.append(loss.item())
    return {"worst": max(abs(a - b) for a, b in zip(*seen, strict=True))}
