"""What ranks do in tests of single properties of sharded tables. Functions raise, or return what a test looks at."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from sharded_models import OPTIMIZERS, PLACEMENTS, ROWS, Model, batch, compiled, sharded_model, whole
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import turbogr_compile
from turbogr_compile import Instrument
from turbogr_compile.errors import OptionError, TurbogrError
from turbogr_compile.runtime import draws, sharding
from turbogr_compile.runtime.sharding import Hierarchical, RowAdagrad, RowSGD, RowWise, RowWiseAdagrad

ops = torch.ops.turbogr


def pair(placement: str, dtype: torch.dtype = torch.float64, padding_idx: int | None = None) -> tuple[Any, Any]:
    """A table of one process, and the same over ranks."""
    torch.manual_seed(5)
    alone = nn.Sequential(nn.Embedding(ROWS, 6, padding_idx=padding_idx, dtype=dtype))
    model = copy.deepcopy(alone)
    sharding.shard(model, sharding.plan(model, None, {"0": PLACEMENTS[placement]}))
    return alone, model


def step_of(alone: Any, model: Any, every: list[Tensor], slopes: list[Tensor], run: Any = None) -> float:
    """One SGD step of both; how far the tables are apart afterwards. Losses are sums over a rank's own ids."""
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = RowSGD(model, lr=0.5)
    ((run or model)(every[rank]) * slopes[rank]).sum().backward()
    optimizer.step()
    alone.zero_grad()
    total = sum((alone(ids) * slope).sum() for ids, slope in zip(every, slopes, strict=True))
    (total / world).backward()
    with torch.no_grad():
        alone[0].weight -= 0.5 * alone[0].weight.grad
    return (whole(model[0]) - alone[0].weight.detach()).abs().max().item()


def lookups(rank: int, world: int, compiles: bool) -> dict[str, float]:
    """Ids that are hard to exchange, in every placement; expanded too where the sizes are."""
    found = {}
    cases = {
        "empty on one": [torch.zeros(0, 3).long(), *[torch.tensor([[1, 2, 60]])] * (world - 1)],
        "empty on all": [torch.zeros(2, 0).long()] * world,
        "one owner": [torch.tensor([[3, 3, 4]])] * world,
        "one id": [torch.tensor(r) for r in range(world)],
        "int32": [torch.tensor([[60, 0, 17]], dtype=torch.int32)] * world,
        "every row": [torch.arange(ROWS).repeat(2) for _ in range(world)],
    }
    for placement in ("rows", "hash", "columns", "table"):
        for case, every in cases.items():
            random = torch.Generator().manual_seed(1)
            slopes = [torch.randn(*ids.shape, 6, generator=random).double() for ids in every]
            # One expanded graph per number of dims; the exchange is that of rows or of pieces.
            expands = case in ("empty on one", "empty on all") and placement == "columns" and compiles
            for how in ("eager", "expanded") if expands else ("eager",):
                alone, model = pair(placement)
                found[f"{placement}, {case}, {how}"] = step_of(alone, model, every, slopes, compiled(model, how))
    return found


def padding(rank: int, world: int) -> None:
    for placement in ("rows", "hash", "columns", "table"):
        alone, model = pair(placement, padding_idx=40)
        before = whole(model[0])
        assert before[40].abs().max() == 0
        every = [torch.tensor([40, r, 40, 41]) for r in range(world)]
        assert step_of(alone, model, every, [torch.ones(4, 6).double()] * world) < 1e-12
        after = whole(model[0])
        assert after[40].equal(before[40]) and not after[41].equal(before[41])


def half_wire(rank: int, world: int) -> tuple[float, float]:
    """Rows as they come, and the step, against the exact ones."""
    alone, model = pair("half", torch.float32)
    ids = torch.arange(rank, ROWS, 2)
    rows = (model(ids) - alone(ids)).abs().max().item()
    random = torch.Generator().manual_seed(rank)
    slopes = [torch.randn(len(range(r, ROWS, 2)), 6, generator=random) for r in range(world)]
    for s in slopes:
        dist.broadcast(s, 0)
    return rows, step_of(alone, model, [torch.arange(r, ROWS, 2) for r in range(world)], slopes)


def gradients(rank: int, world: int) -> None:
    """Backward counts, twice when run twice; autograd.grad does not; zero_grad forgets; no table is a parameter."""
    _, model = pair("rows")
    assert not list(model.parameters()) and sharding.dense_parameters(model) == []
    assert list(model.state_dict()) == ["0.weight"]
    optimizer, before = RowSGD(model, lr=1.0), whole(model[0])

    def moved(*, times: int = 1, only: bool = False, forget: bool = False) -> Tensor:
        loss = model(torch.tensor([7])).sum()
        for _ in range(times):
            if only:
                torch.autograd.grad(loss, model[0].receipts, retain_graph=True)
            else:
                loss.backward(retain_graph=True)
        if forget:
            optimizer.zero_grad()
        old = whole(model[0])
        optimizer.step()
        return (old - whole(model[0]))[7]

    assert moved().allclose(torch.ones(6).double())
    assert moved(times=2).allclose(2 * torch.ones(6).double())
    assert moved(only=True).abs().max() == 0
    assert moved(forget=True).abs().max() == 0
    assert not model[0].table.journal
    others = torch.arange(ROWS) != 7
    assert whole(model[0])[others].equal(before[others])
    same = model(torch.tensor([9])) + model(torch.tensor([9]))  # equal lookups with equal gradients are two
    same.sum().backward()
    assert model[0].table.take(model[0].receipts.grad, model[0].shard).values.sum().item() in (0, 12)


def equal_lookups_compiled(rank: int, world: int, how: str) -> float:
    """A compiler may merge them; their gradients are two."""
    _, model = pair("rows")
    run = compiled(lambda ids: model[0](ids).sum() + model[0](ids).sum(), how)
    optimizer, before = RowSGD(model, lr=1.0), whole(model[0])
    run(torch.tensor([9, 3, 9])).backward()
    optimizer.step()
    moved = before - whole(model[0])
    return (moved[9] - 4).abs().max().item() + (moved[3] - 2).abs().max().item()


def mistakes(rank: int, world: int) -> dict[str, str]:
    """What is said about what cannot be."""
    said = {}

    def refused(what: str, fn: Any) -> None:
        with pytest.raises((TurbogrError, OptionError, IndexError, ValueError)) as caught:
            fn()
        said[what] = str(caught.value)

    def sharded(module: nn.Module, placement: Any = None, **rest: Any) -> Any:
        return sharding.shard(module, sharding.plan(module, None, {"0": placement or RowWise()}, **rest))

    tied = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    tied[1].weight = tied[0].weight
    refused("tied", lambda: sharded(tied))
    refused("max_norm", lambda: sharded(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0))))
    refused("frequency", lambda: sharded(nn.Sequential(nn.Embedding(8, 4, scale_grad_by_freq=True))))
    refused("bag", lambda: sharded(nn.Sequential(nn.EmbeddingBag(8, 4))))
    refused("name", lambda: sharding.plan(Model(), None, {"item": RowWise()}))
    refused("mesh", lambda: sharding.plan(Model(), None, {"items": Hierarchical()}))
    refused("wire", lambda: RowWise(wire="fp8"))
    refused("rank", lambda: sharded(nn.Sequential(nn.Embedding(8, 4)), sharding.TableWise(rank=9)))
    refused("memory", lambda: sharding.plan(Model(), small=0, memory=100))
    refused("nothing sharded", lambda: RowSGD(Model()))
    good = sharded(nn.Sequential(nn.Embedding(8, 4)))
    refused("weight", lambda: good[0].weight)
    refused("copy", lambda: copy.deepcopy(good))
    if rank == 0:  # before any exchange: the others take no part
        refused("id", lambda: good(torch.tensor([8])))
        refused("negative", lambda: good(torch.tensor([-1])))
    columns = sharded(nn.Sequential(nn.Embedding(8, 4)), sharding.ColumnWise())
    refused("row sums", lambda: RowWiseAdagrad(columns))
    model = nn.Sequential(nn.Embedding(8, 4))
    mine = sharding.plan(model, None, {"0": RowWise(order="hash" if rank else "block")})
    refused("plans", lambda: sharding.shard(model, mine))
    return said


def planned(rank: int, world: int) -> str:
    with torch.device("meta"):
        model = nn.ModuleDict({"large": nn.Embedding(40_000, 64), "small": nn.Embedding(10, 4)})
    return sharding.plan(model).explain()


# --- memory ------------------------------------------------------------------------------------------


def largest_allocation(
    rank: int, world: int, rows: int, width: int, how: str, optimizer: str = "adagrad"
) -> dict[str, Any]:
    """Bytes of the largest tensor that a step makes, and of a shard. The table is never whole: it begins on meta."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(rows, width))
    sharding.shard(model, sharding.plan(model, None, {"0": RowWise()}))
    rule, run = OPTIMIZERS[optimizer][0](model, lr=0.1), compiled(model, how)

    def step(seed: int) -> None:
        random = torch.Generator().manual_seed(seed * world + rank)
        run(torch.randint(0, rows, (4, 16 + seed), generator=random)).square().sum().backward()
        rule.step()

    step(0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step(1)
    made = max(e.self_cpu_memory_usage for e in seen.events())  # of any op, also of those inside of ours
    return {"made": made, "shard": model[0].shard.nbytes, "mean": model[0].shard.mean().item()}


def drawn(rank: int, world: int, order: str) -> Tensor:
    """A table that begins on meta, as it is on so many ranks."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(9001, 4, padding_idx=3))
    sharding.shard(model, sharding.plan(model, None, {"0": RowWise(order)}))
    return whole(model[0])


def drawn_alone() -> Tensor:
    """The same table in one process."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(9001, 4, padding_idx=3))
    sharding.row_gradients(model)
    return model[0].weight.detach()


# --- checkpoints -------------------------------------------------------------------------------------


def save_all(rank: int, world: int, folder: str, placements: list[str]) -> dict[str, Tensor]:
    return {p: save(rank, world, f"{folder}/{p}", p) for p in placements}


def resume_all(rank: int, world: int, folder: str, placements: list[str]) -> dict[str, Tensor]:
    return {p: resume(rank, world, f"{folder}/{p}", p) for p in placements}


def save(rank: int, world: int, folder: str, placement: str) -> Tensor:
    model = sharded_model(Model(), placement)
    optimizer = RowAdagrad(model, lr=0.1)
    for number in range(3):
        model(*batch(rank, number)).backward()
        optimizer.step()
    dcp.save({"model": model.state_dict(), "rows": optimizer.state_dict()}, checkpoint_id=folder)
    for number in range(3, 5):
        ids, wanted, user = batch(0, number)  # the same on all ranks: how many there are does not show
        model(ids, wanted, user).backward()
        optimizer.step()
    return whole(model.items)


def resume(rank: int, world: int, folder: str, placement: str) -> Tensor:
    """On another number of ranks, from a model of other values, the same two steps more."""
    model = Model()
    with torch.no_grad():
        model.items.weight.zero_()
    model = sharded_model(model, placement)
    optimizer = RowAdagrad(model, lr=0.7)
    state = {"model": model.state_dict(), "rows": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["rows"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    for number in range(3, 5):
        ids, wanted, user = batch(0, number)
        model(ids, wanted, user).backward()
        optimizer.step()
    return whole(model.items)


def round_trip(rank: int, world: int) -> None:
    """state_dict into a model of the same plan, and a whole table into any plan."""
    plain = Model()
    plain.items.weight.data.normal_()
    for placement in ("rows", "hash", "columns", "table"):
        model, other = sharded_model(copy.deepcopy(plain), placement), sharded_model(Model(), placement)
        other.load_state_dict(model.state_dict())
        assert whole(other.items).equal(plain.items.weight)
        third = sharded_model(Model(), placement)
        third.load_state_dict(plain.state_dict())
        assert whole(third.items).equal(plain.items.weight)
        entries = model.state_dict()
        entries.pop("items.weight", None)
        if model.items.shard.shape[0]:
            with pytest.raises(RuntimeError, match=r"items\.weight"):
                other.load_state_dict(entries)
    spread, hashed = (sharded_model(copy.deepcopy(plain), p) for p in ("rows", "hash"))
    with pytest.raises(RuntimeError, match="another order of rows"):
        spread.load_state_dict(hashed.state_dict())


# --- the pass ----------------------------------------------------------------------------------------


class Seen(Instrument):
    """Graphs and remarks as the passes leave them."""

    def __init__(self) -> None:
        self.graphs: dict[str, list[str]] = {}
        self.remarks: list[str] = []

    def finish(self, run: Any) -> None:
        self.graphs[run.role.value] = [str(n.target) for n in run.graph.nodes if n.op == "call_function"]
        self.remarks += [r.id for r in run.remarks]


def traced(fn: Any, ahead: bool = False) -> tuple[Any, Seen]:
    torch._dynamo.reset()
    seen = Seen()
    passes = ["expand-lookups" + ("" if ahead else "{ahead=false}")]
    options = {"codegen": "aten", "on_error": "raise", "passes": passes, "instruments": [seen]}
    return torch.compile(fn, backend="turbogr", dynamic=True, fullgraph=True, options=options), seen


def expanded(rank: int, world: int) -> dict[str, list[str]]:
    """Both lookups in one exchange, forward and backward."""
    model = sharded_model(Model(), "rows")
    run, seen = traced(model)
    run(*batch(rank, 0)).backward()
    return {**seen.graphs, "remarks": seen.remarks}


def late_ids(rank: int, world: int) -> dict[str, Any]:
    """Ids that follow from parameters: the op stays, and is right."""
    _, model = pair("rows", torch.float32)
    scorer = nn.Parameter(torch.linspace(-1, 1, 5))
    run, seen = traced(lambda x: model[0]((x * scorer).argmax(-1)).sum() + model[0](x.long()[:, 0].abs()).sum())
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)) * 3
    wanted = model[0]((x * scorer).argmax(-1)).sum() + model[0](x.long()[:, 0].abs()).sum()
    return {"apart": (run(x) - wanted).abs().item(), "targets": seen.graphs["captured"], "remarks": seen.remarks}


def ahead_of_steps(rank: int, world: int) -> dict[str, Any]:
    """Routing of the next batch during the step: the same losses to the last bit."""
    losses: dict[bool, list[float]] = {}
    for ahead in (False, True):
        model = sharded_model(Model(), "rows")
        optimizer = RowAdagrad(model, lr=0.1)
        run, _ = traced(model, ahead)
        losses[ahead] = []
        data = [batch(rank, number) for number in range(8)]
        for ids, wanted, user in turbogr_compile.ahead(data) if ahead else data:
            loss = run(ids, wanted, user)
            loss.backward()
            optimizer.step()
            losses[ahead].append(loss.item())
        stats = max(turbogr_compile.statistics(), key=lambda s: s.ahead)  # those of earlier graphs may be alive
    return {"losses": losses, "ahead": stats.ahead, "calls": stats.calls}


class Sampled(nn.Module):
    """Draws its negatives in the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.items, self.out = nn.Embedding(61, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        drawn = torch.randint(1, 61, (*ids.shape, 5))
        h = self.out(self.items(ids))
        own = (h * self.items(wanted)).sum(-1, keepdim=True)
        others = torch.einsum("bnd,bnkd->bnk", h, self.items(drawn)).masked_fill(drawn == wanted[..., None], -1e9)
        return -F.log_softmax(torch.cat([own, others], -1), -1)[..., 0].mean()


def sampled(rank: int, world: int) -> dict[str, Any]:
    """Losses with lookups as they are, and taken apart; ids are drawn from the same seeds."""
    fused = "fuse-sampling{min_numbers=0}"
    shared = "fuse-sampling{min_numbers=0, share=2, half=true}"
    return {
        "opaque": sampled_steps(rank, ["offload-sampling"], ["expand-lookups"]),
        "apart": sampled_steps(rank, ["expand-lookups{draws=true}", fused]),
        "apart, opted": sampled_steps(rank, ["expand-lookups{draws=true}", shared], dtype=torch.float32),
        "whole, opted": sampled_steps(rank, ["offload-sampling", shared], sharded=False, dtype=torch.float32),
    }


def sampled_steps(
    rank: int, passes: list[str], without: Sequence[str] = (), sharded: bool = True, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    torch._dynamo.reset()
    model: nn.Module = Sampled().to(dtype)
    if sharded:
        model = sharding.shard(model, sharding.plan(model, tables={"items": sharding.RowWise()}))
    seen = Seen()
    options = {
        "codegen": "aten",
        "on_error": "raise",
        "passes": passes,
        "without": list(without),
        "instruments": [seen],
    }
    step = torch.compile(model, backend="turbogr", fullgraph=True, options=options)
    rows, losses = sharding.RowSGD(model, lr=0.1) if sharded else None, []
    torch.manual_seed(5)
    draws.load_state_dict({"seed": 5, "calls": {}})
    for number in range(4):
        ids, wanted = torch.randint(1, 61, (2, 3, 4), generator=torch.Generator().manual_seed(10 * number + rank))
        loss = step(ids, wanted)
        loss.backward()
        if rows is not None:
            rows.step()
        losses.append(loss.item())
    return {"losses": losses, "remarks": seen.remarks, "targets": seen.graphs["forward"]}


class Padded(nn.Module):
    """Histories end at different places; item 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.items, self.out = nn.Embedding(61, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        valid = ids != 0
        h = torch.tanh(self.out(self.items(ids)))
        return ((h * h).sum(-1) * valid).sum() / valid.sum()


def padded(rank: int, world: int) -> dict[str, Any]:
    """Losses of a padded model by eager, and packed."""
    found: dict[str, Any] = {}
    for name in ("eager", "turbogr"):
        torch._dynamo.reset()
        model = Padded().double()
        model = sharding.shard(model, sharding.plan(model, tables={"items": sharding.RowWise()}))
        seen = Seen()
        options = {"codegen": "aten", "on_error": "raise", "instruments": [seen]}
        step = model if name == "eager" else torch.compile(model, backend=name, fullgraph=True, options=options)
        rows, losses = sharding.RowAdagrad(model, lr=0.1), []
        for number in range(5):
            g = torch.Generator().manual_seed(10 * number + rank)
            ids, lengths = torch.randint(1, 61, (4, 9), generator=g), torch.randint(1, 9, (4, 1), generator=g)
            loss = step(ids.masked_fill(torch.arange(9) >= lengths, 0))
            loss.backward()
            rows.step()
            losses.append(loss.item())
        found[name] = {"losses": losses, "remarks": seen.remarks}
    return found
