"""What ranks of the sharding tests do: train a model beside its unsharded twin, and say how far they are apart."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from turbogr_compile.runtime import sharding
from turbogr_compile.runtime.sharding import (
    ColumnWise,
    Hierarchical,
    LazyAdam,
    Replicated,
    RowAdagrad,
    RowSGD,
    RowWise,
    RowWiseAdagrad,
    TableWise,
)

ROWS, WIDTH = 61, 10
PLACEMENTS = {
    "rows": RowWise(),
    "hash": RowWise(order="hash"),
    "columns": ColumnWise(),
    "table": TableWise(rank=1),
    "replicated": Replicated(),
    "hierarchical": Hierarchical(),
    "half": RowWise(wire="float16"),
}


class Model(nn.Module):
    """Two lookups in one table, one in another; rows that occur often and rows that do not."""

    def __init__(self, padding_idx: int | None = 0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.items = nn.Embedding(ROWS, WIDTH, padding_idx=padding_idx)
        self.users = nn.Embedding(7, WIDTH)
        self.inner, self.out = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, ids: Tensor, wanted: Tensor, user: Tensor) -> Tensor:
        h = self.out(torch.tanh(self.inner(self.items(ids) + self.users(user)[:, None])))
        score = (h * self.items(wanted)).sum(-1)
        return nn.functional.softplus(-score).mean()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Other sizes in every step, the same on all ranks, so that the mean over ranks is the mean over all."""
    random = torch.Generator().manual_seed(100 * step + rank)
    rows, length = 2 + step % 3, 3 + step % 5
    ids = torch.randint(0, ROWS, (rows, length), generator=random) * torch.randint(0, 2, (rows, 1), generator=random)
    return ids, torch.randint(0, ROWS, (rows, length), generator=random), torch.randint(0, 7, (rows,), generator=random)


def compiled(model: nn.Module, how: str) -> Any:
    torch._dynamo.reset()
    if how == "eager":
        return model
    if how == "turbogr" or how.startswith("expanded"):
        more = ["expand-lookups"] if how.startswith("expanded") else []
        options = {"codegen": "aten", "on_error": "raise", "passes": more}
        return torch.compile(model, backend="turbogr", dynamic=True, fullgraph=True, options=options)
    return torch.compile(model, backend=how, dynamic=True, fullgraph=True)


OPTIMIZERS = {
    "sgd": (RowSGD, torch.optim.SGD, {"lr": 0.3}),
    "adagrad": (RowAdagrad, torch.optim.Adagrad, {"lr": 0.2, "lr_decay": 0.01}),
    "adam": (LazyAdam, torch.optim.SparseAdam, {"lr": 0.05}),
    "rowwise": (RowWiseAdagrad, None, {"lr": 0.2}),
}


class WholeRowWiseAdagrad:
    """The reference: dense, row by row."""

    def __init__(self, parameters: list[Tensor], lr: float, eps: float = 1e-10) -> None:
        self.parameters, self.lr, self.eps = parameters, lr, eps
        self.sums = [torch.zeros(p.shape[0], dtype=p.dtype) for p in parameters]

    def step(self) -> None:
        with torch.no_grad():
            for p, sums in zip(self.parameters, self.sums, strict=True):
                sums += p.grad.square().mean(1)
                p -= self.lr * p.grad / (sums.sqrt() + self.eps)[:, None]


def sharded_model(model: nn.Module, placement: str) -> nn.Module:
    nodes = dist.get_world_size() // 2
    mesh = init_device_mesh("cpu", (nodes, 2)) if placement == "hierarchical" else None
    tables = {"items": PLACEMENTS[placement]}
    return sharding.shard(model, sharding.plan(model, mesh, tables))


def whole(table: nn.Module) -> Tensor:
    """The table as one process would have it, from all ranks."""
    if isinstance(table, nn.Embedding):
        return table.weight.detach()
    ids = torch.arange(table.num_embeddings)
    with torch.no_grad():
        return table(ids)


def train(
    rank: int, world: int, placements: list[str], ways: list[str], optimizers: list[str], steps: int = 20,
    dtype: torch.dtype = torch.float64,
) -> dict[tuple[str, str, str], Any]:  # fmt: skip
    found = {}
    for placement in placements:
        for how in ways:
            for optimizer in optimizers:
                found[placement, how, optimizer] = train_one(rank, world, placement, how, optimizer, steps, dtype)
    return found


def train_one(
    rank: int, world: int, placement: str, how: str, optimizer: str, steps: int, dtype: torch.dtype
) -> dict[str, Any]:
    alone = Model().to(dtype)
    model = sharded_model(copy.deepcopy(alone), placement)
    ours, theirs, given = OPTIMIZERS[optimizer]
    spread = bool(sharding.sharded_tables(model))
    rows = ours(model, **given) if spread else None
    table = [] if spread else [model.items.weight]
    dense: list[Any] = [torch.optim.SGD(_dense(model, table), 0.1)]
    reference = theirs or WholeRowWiseAdagrad
    if table:
        dense.append(reference(table, **given))
    rest = [p for p in alone.parameters() if p is not alone.items.weight]
    lone = [torch.optim.SGD(rest, 0.1), reference([alone.items.weight], **given)]
    step, graphs, worst = compiled(model, how), set(), 0.0
    for number in range(steps):
        losses = [alone(*batch(r, number)) for r in range(world)]
        for p in alone.parameters():
            p.grad = None
        torch.stack(losses).mean().backward()
        if theirs is torch.optim.SparseAdam:
            _sparse(alone.items.weight, world, number)
        for o in lone:
            o.step()
        loss = step(*batch(rank, number))
        model.zero_grad()
        loss.backward()
        sharding.average_gradients(model)
        if table and theirs is torch.optim.SparseAdam:
            _sparse(model.items.weight, world, number)
        for o in [*dense, *([rows] if rows else [])]:
            o.step()
        worst = max(worst, (loss - losses[rank]).abs().item())
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    worst = max(worst, (whole(model.items) - alone.items.weight.detach()).abs().max().item())
    apart = [(a - b).abs().max().item() for a, b in zip(rest, _dense(model, table), strict=True)]
    shard = model.items.shard.clone() if spread else None
    return {"worst": max(worst, *apart), "graphs": len(graphs), "shard": shard, "loss": loss.item()}


def _dense(model: nn.Module, table: list[Tensor]) -> list[Tensor]:
    return [p for p in model.parameters() if not any(p is t for t in table)]


def _sparse(weight: Tensor, world: int, step: int) -> None:
    """The gradient as SparseAdam wants it: of the rows that were looked up, the padding aside."""
    rows = torch.cat([x.flatten() for rank in range(world) for x in batch(rank, step)[:2]]).unique()
    rows = rows[rows != 0]
    weight.grad = torch.sparse_coo_tensor(rows[None], weight.grad[rows], weight.shape, check_invariants=True)
