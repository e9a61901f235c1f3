"""What ranks of the tests of validation do: one compares its graph with the captured one, the other need not."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from edges import Padded, Seen
from torch import Tensor, nn

import turbogr_compile
from turbogr_compile import Pass, Phase
from turbogr_compile.runtime import sharding


class Summed(nn.Module):
    """A padded model with sums over ranks before, between and after what is packed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.items, self.out = nn.Embedding(61, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        valid = ids != 0
        rows = functional.all_reduce(self.items.weight, "sum", dist.group.WORLD)
        h = torch.tanh(self.out(rows[ids]))
        total = functional.all_reduce(((h * h).sum(-1) * valid).sum(), "sum", dist.group.WORLD)
        return total / functional.all_reduce(valid.sum(), "sum", dist.group.WORLD)


@dataclass(frozen=True)
class Halved(Pass):
    """Wrong: half of every tanh."""

    name = "halved"
    phase = Phase.PRE_GRAD
    before = ("expand-lookups",)
    after = ("pack-rows",)

    def run(self, graph: Any, ctx: Any) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default):
            with ctx.rewrite("halve", node):
                with graph.inserting_after(node):
                    half = graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.5))
                    half.meta = dict(node.meta)
                node.replace_all_uses_with(half, delete_user_cb=lambda user, own=half: user is not own)


def batch(rank: int, number: int) -> Tensor:
    g = torch.Generator().manual_seed(10 * number + rank)
    ids, lengths = torch.randint(1, 61, (4, 9), generator=g), torch.randint(1, 9, (4, 1), generator=g)
    return ids.masked_fill(torch.arange(9) >= lengths, 0)


def model_of(kind: str) -> nn.Module:
    if kind == "summed":
        return Summed().double()
    model = Padded().double()
    return sharding.shard(model, sharding.plan(model, tables={"items": sharding.RowWise()}))


def steps(rank: int, world: int, kind: str, verify: list[str]) -> dict[str, Any]:
    """Losses beside eager's, where ranks verify each as they like."""
    found: dict[str, Any] = {}
    older = turbogr_compile.statistics()
    for how in ("eager", "turbogr"):
        torch._dynamo.reset()
        model, seen = model_of(kind), Seen()
        options = {"codegen": "aten", "on_error": "raise", "instruments": [seen], "verify": verify[rank]}
        step = model if how == "eager" else torch.compile(model, backend=how, fullgraph=True, options=options)
        rows = sharding.RowAdagrad(model, lr=0.1) if kind == "sharded" else None
        found[how] = []
        for number in range(3):
            loss = step(batch(rank, number))
            loss.backward()
            if rows is not None:
                rows.step()
            found[how].append(loss.item())
        found["remarks"] = seen.remarks
    found["compared"] = sum(s.compared for s in turbogr_compile.statistics() if s not in older)
    return found


def wrong_on_one(rank: int, world: int, kind: str) -> dict[str, str]:
    """What a rank says whose graph is wrong, and what the other one."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"codegen": "aten", "verify": "validate", "passes": [Halved()] if rank else []}
    step = torch.compile(model_of(kind), backend="turbogr", fullgraph=True, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            step(batch(rank, 0))
        except turbogr_compile.TurbogrError as error:
            return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "none", "text": ""}
