"""One of two processes that test_ge_collectives starts."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch.distributed.distributed_c10d import _get_group_tag

from tests.lowering.operators import run
from tests.lowering.simulator import Simulated
from turbogr_compile.lowering.ge.graph import Node
from turbogr_compile.lowering.ge.kernels import KERNELS

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
WORLD, AGAIN = dist.group.WORLD, dist.new_group([0, 1])
UNEVEN = [1, 3] if RANK == 0 else [3, 1]  # what a rank sends to each is what it gets from each


def all_reduce(x):
    return functional.all_reduce(x * 2, "sum", WORLD) + 1


def all_reduce_max(x):
    return functional.all_reduce(x, "max", AGAIN) + 1


def all_gather(x):
    return functional.all_gather_tensor(x, 0, WORLD) * 2


def reduce_scatter(x):
    return functional.reduce_scatter_tensor(x, "sum", 0, AGAIN) * 2


def broadcast(x):
    return functional.broadcast(x * 1.0, 1, WORLD) + 1


def all_to_all(x):
    return functional.all_to_all_single(x, None, None, WORLD) + 1


def all_to_all_uneven(x):
    return functional.all_to_all_single(x, UNEVEN, UNEVEN, WORLD) + 1


def in_place_all_reduce(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1


def in_place_all_gather(x):
    out = x.new_empty(SIZE * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(out, x)
    return out * 2


def in_place_all_to_all(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out + 1


MADE = {
    all_reduce: "HcomAllReduce", all_reduce_max: "HcomAllReduce", all_gather: "HcomAllGather",
    reduce_scatter: "HcomReduceScatter", broadcast: "HcomBroadcast", all_to_all: "HcomAllToAllV",
    all_to_all_uneven: "HcomAllToAllV", in_place_all_reduce: "HcomAllReduce", in_place_all_gather: "HcomAllGather",
    in_place_all_to_all: "HcomAllToAllV",
}  # fmt: skip


def compare() -> None:
    x = torch.arange(8.0).reshape(4, 2) + 10 * RANK
    for function, op in MADE.items():
        for dynamic in (False, True) if function in (all_reduce, all_gather, all_to_all) else (False,):
            compiled = Simulated(function, dynamic=dynamic)
            with torch.no_grad():
                torch.testing.assert_close(compiled(x.clone()), function(x.clone()))
            assert op in compiled.types, (function.__name__, compiled.types)


def raw_operators() -> None:
    """What torchair makes of calls that need torch_npu, or of a newer CANN."""
    group = {"group": f"tag={_get_group_tag(WORLD)};rank_list=0,1"}
    x = torch.arange(8.0).reshape(4, 2) + 10 * RANK
    both = [torch.arange(8.0).reshape(4, 2) + 10 * rank for rank in range(2)]
    halves = torch.cat([b[2 * RANK : 2 * RANK + 2] for b in both])
    torch.testing.assert_close(run("HcomAllToAll", [x], [halves], group)[0], halves)
    part, counts = x[: 1 + RANK], torch.tensor([2, 4])
    parts = torch.cat([both[0][:1], both[1][:2]])
    count = torch.tensor(part.numel())
    torch.testing.assert_close(run("HcomAllGatherV", [part, count, counts, None], [parts], group)[0], parts)
    rows = (both[0] + both[1])[:3].split([1, 2])[RANK]
    inputs = [x[:3], torch.tensor(rows.numel()), counts, None]
    torch.testing.assert_close(run("HcomReduceScatterV", inputs, [rows], {"reduction": "sum", **group})[0], rows)
    node = Node("n", "Hcom", (), (), (), {**group, "dest_rank": 1, "src_rank": 0, "sr_tag": 3, "shape": [4, 2],
                "dtype": torch.float32}, {}, ())  # fmt: skip
    if RANK == 0:
        KERNELS["HcomSend"](node, x)
    else:
        torch.testing.assert_close(KERNELS["HcomReceive"](node), both[0])


def train() -> None:
    """Half of a table on each rank: rows are fetched and gradients sent back by all-to-all."""
    torch.manual_seed(0)
    table = torch.randn(12, 4)
    ids = torch.tensor([[1, 7, 4, 10], [0, 6, 5, 11]])
    mine = table[6 * RANK : 6 * RANK + 6].clone().requires_grad_()
    asked = ids.reshape(2, 2, 2)[:, :, 1 if RANK else 0] - 6 * RANK  # rows of my half, by the rank that asks

    def step(asked, mine):
        rows = F.embedding(asked.reshape(-1), mine)
        return functional.all_to_all_single_autograd(rows, None, None, WORLD).square().sum()

    compiled = Simulated(step)
    optimizer = torch.optim.SGD([mine], lr=0.1)
    whole = table.clone().requires_grad_()
    for _ in range(3):
        loss = compiled(asked, mine)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        alone = F.embedding(ids, whole).square().sum()
        (gradient,) = torch.autograd.grad(alone, whole)
        torch.testing.assert_close(total, alone.detach())
        torch.testing.assert_close(mine.grad, gradient[6 * RANK : 6 * RANK + 6])
        optimizer.step()
        optimizer.zero_grad()
        whole = (whole - 0.1 * gradient).detach().requires_grad_()
    assert [sum(n.type == "HcomAllToAllV" for n in g.nodes) for g in compiled.graphs] == [1, 1], "forward and backward"


compare()
raw_operators()
train()
dist.barrier()
dist.destroy_process_group()
print("all collectives agree")
