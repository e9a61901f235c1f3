"""What ranks do in tests of pipelining: routing a batch ahead, and semi-async training."""

from __future__ import annotations

import logging
from typing import Any

import torch
from edges import Seen
from sharded_models import OPTIMIZERS, Model, batch, sharded_model, whole
from torch import Tensor, nn
from torch.func import functional_call

import turbogr_compile
from turbogr_compile.errors import PipelineError
from turbogr_compile.runtime import sharding
from turbogr_compile.runtime.prologue import RanksApart
from turbogr_compile.runtime.sharding import staleness
from turbogr_compile.runtime.sharding.stale import TooStale

PASSES = {
    "sync": "expand-lookups{ahead=false}",
    "prefetch": "expand-lookups",
    "held": "expand-lookups{staleness=1, warmup=1000}",  # the machinery of semi-async, and nothing stale
    "semi": "expand-lookups{staleness=1, warmup=3}",
    "cold": "expand-lookups{staleness=1}",
}


def compiled(model: Any, how: str, dynamic: bool | None = True) -> tuple[Any, Seen]:
    torch._dynamo.reset()
    seen = Seen()
    options = {"codegen": "aten", "on_error": "raise", "passes": [PASSES[how]], "instruments": [seen]}
    if how == "prefetch":
        del options["passes"]  # by default
    return torch.compile(model, backend="turbogr", dynamic=dynamic, fullgraph=True, options=options), seen


class Job:
    """A model with tables over ranks, its optimizers, and a compiled step."""

    def __init__(self, how: str, optimizer: str = "adagrad", dynamic: bool | None = True) -> None:
        self.model = sharded_model(Model().double(), "rows")
        rows, _, given = OPTIMIZERS[optimizer]
        self.rows, self.dense = rows(self.model, **given), torch.optim.SGD(self.model.parameters(), 0.1)
        self.run, self.seen = compiled(self.model, how, dynamic)

    def step(self, given: tuple[Tensor, ...]) -> float:
        self.model.zero_grad()
        loss = self.run(*given)
        loss.backward()
        sharding.average_gradients(self.model)
        self.dense.step(), self.rows.step()
        return loss.item()

    @property
    def table(self) -> Any:
        return self.model.items.table


def data(rank: int, steps: int) -> list[tuple[Tensor, ...]]:
    return [batch(rank, number) for number in range(steps)]


def train(rank: int, world: int, how: str, steps: int = 20, optimizer: str = "adagrad") -> dict[str, Any]:
    job = Job(how, optimizer)
    batches = data(rank, steps)
    losses = [job.step(given) for given in (batches if how == "sync" else turbogr_compile.ahead(batches))]
    seen = staleness(job.model).get("items")
    return {
        "losses": losses, "table": whole(job.model.items), "dense": job.model.inner.weight.detach().clone(),
        "remarks": job.seen.remarks, "delays": dict(seen.delays) if seen else {},
        "fraction": seen.stale_row_fraction if seen else 0.0, "counts": (job.table.updates, job.table.applied),
        "ahead": max(s.ahead for s in turbogr_compile.statistics()),
    }  # fmt: skip


def simulated(
    rank: int, world: int, warmup: int, steps: int = 20, optimizer: str = "adagrad", first: int = 0
) -> dict[str, Any]:
    """The algorithm in one process, as docs/semi-async.md states it; `first` says which batches."""
    model = Model().double()
    _, rule, given = OPTIMIZERS[optimizer]
    table = model.items.weight
    rest = [p for p in model.parameters() if p is not table]
    rows, dense = rule([table], **given), torch.optim.SGD(rest, 0.1)
    before, losses = table.detach().clone(), []
    for t in range(steps):
        now = table.detach().clone()
        read = (before if t >= warmup and t > 0 else now).requires_grad_()
        every = [functional_call(model, {"items.weight": read}, batch(r, first + t)) for r in range(world)]
        model.zero_grad()
        torch.stack(every).mean().backward()
        table.grad = read.grad
        before = now.detach()
        rows.step(), dense.step()
        losses.append(every[rank].item())
    return {"losses": losses, "table": table.detach()}


# --- draining ----------------------------------------------------------------------------------------


def drained(rank: int, world: int) -> None:
    """Whoever reads the table finds all updates in it."""
    job = Job("cold", "sgd")
    asked = torch.arange(12)
    look, _ = compiled(lambda ids: job.model.items(ids), "cold")
    for number, given in enumerate(turbogr_compile.ahead(data(rank, 8))):
        job.step(given)
        if number == 3:
            job.model.state_dict()
            assert job.table.applied == job.table.updates == 4
        if number == 4:
            job.rows.state_dict()
            assert job.table.applied == 5
        if number == 5:
            with torch.no_grad():
                fresh, again = look(asked), job.model.items(asked)
            assert job.table.applied == 6 and fresh.equal(again)
    assert job.table.applied == job.table.updates == 8
    assert staleness(job.model)["items"].largest_delay == 1


def bounded(rank: int, world: int) -> dict[str, Any]:
    """Two updates in one step: rows are fetched again. An update that never came: an error."""
    job = Job("cold", "sgd")
    for given in turbogr_compile.ahead(data(rank, 6)):
        job.step(given)
        job.rows.step()
    seen = staleness(job.model)["items"]
    found = {"delays": dict(seen.delays), "again": seen.again}
    job.table.applied -= 2
    said = ""
    try:
        job.step(batch(rank, 6))
    except TooStale as error:
        said = str(error)
    return {**found, "said": said}


def failing(rank: int, world: int) -> str:
    """An update that fails beside the step fails the next one, on the main thread."""
    job = Job("cold", "sgd")

    def update(rows: Tensor, gradient: Tensor, state: Any, step: int, group: Any) -> None:
        if step == 3:
            raise ZeroDivisionError("no rate")

    job.rows.update, steps = update, 0
    try:
        for given in turbogr_compile.ahead(data(rank, 6)):
            job.step(given)
            steps += 1
    except turbogr_compile.TurbogrError as error:
        return f"{steps}: {error}"
    return "nothing"


# --- leaving -----------------------------------------------------------------------------------------


def leaving(rank: int, world: int, how: str) -> dict[str, Any]:
    """All ranks leave a loop early, and go on; then one has a batch more than the others."""
    found: dict[str, Any] = {}
    job = Job(how, "sgd")
    for number, given in enumerate(turbogr_compile.ahead(data(rank, 9))):
        job.step(given)
        if number == 3:
            break
    found["steps"] = job.table.applied
    for given in turbogr_compile.ahead(data(rank, 3)):
        job.step(given)
    found["more"], steps = job.table.applied, 0
    try:
        for given in turbogr_compile.ahead(data(rank, 4 + rank)):
            job.step(given)
            steps += 1
    except turbogr_compile.TurbogrError as error:
        apart = isinstance(error, RanksApart) or isinstance(error.__cause__, RanksApart)
        found |= {"apart": apart, "said": str(error)}
    return {**found, "last": steps}


def compiling_alone(rank: int, world: int) -> dict[str, list[float]]:
    """Ranks meet other sizes at other batches, and compile anew when others do not."""
    losses: dict[str, list[float]] = {}
    lengths = [4, 5, 5, 6, 7] if rank else [4, 4, 4, 6, 7]
    batches = []
    for number, length in enumerate(lengths):
        random = torch.Generator().manual_seed(10 * number + rank)
        ids = torch.randint(0, 60, (3, 2, length), generator=random)
        batches.append((ids[0], ids[1], ids[2, :, 0] % 7))
    for how in ("sync", "prefetch"):
        job = Job(how, "sgd", dynamic=None)
        losses[how] = [job.step(given) for given in (turbogr_compile.ahead(batches) if how != "sync" else batches)]
    return losses


class Pooled(nn.Module):
    """Packs to nothing where all ids are padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.items, self.inner = nn.Embedding(61, 10), nn.Linear(10, 10)

    def forward(self, ids: Tensor) -> Tensor:
        valid = (ids != 0).unsqueeze(-1)
        h = torch.tanh(self.inner(self.items(ids))) * valid
        return (h.sum(1) / valid.sum(1).clamp(min=1)).square().sum()


def refusing_alone(rank: int, world: int) -> dict[str, Any]:
    """A batch that one rank cannot pack runs the graph as it was there, and meets the others' exchanges."""
    found: dict[str, Any] = {}
    logging.getLogger("turbogr_compile").setLevel(logging.ERROR)
    for how in ("eager", "prefetch"):
        model = sharded_model(Pooled(), "rows")
        run = model if how == "eager" else compiled(model, how)[0]
        rows = sharding.RowSGD(model, lr=0.1)
        batches = []
        for number in range(6):
            random = torch.Generator().manual_seed(10 * number + rank)
            ids = torch.randint(1, 61, (4, 6), generator=random) * (torch.arange(6) < 3)
            batches.append(ids * (not (rank == 1 and number in (2, 3))))
        losses = []
        for ids in turbogr_compile.ahead(batches):
            loss = run(ids)
            loss.backward()
            rows.step()
            losses.append(loss.item())
        found[how] = losses
    found["fell"] = max(sum(s.fallbacks.values()) for s in turbogr_compile.statistics())
    return found


def refused(rank: int, world: int) -> list[str]:
    said = []
    for given in ("staleness=2", "staleness=1, ahead=false", "warmup=-1"):
        try:
            turbogr_compile.Pipeline.parse(f"expand-lookups{{{given}}}")
        except PipelineError as error:
            said.append(str(error))
    return said
