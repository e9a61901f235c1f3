"""What ranks do in the tests of latency, overlap and agreement."""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from turbogr_compile.runtime.latency import delayed_group
from turbogr_compile.runtime.ranks.agreement import RanksDisagree

c10 = torch.ops._c10d_functional
warnings.simplefilter("ignore")


def waited(started: Tensor) -> Tensor:
    return c10.wait_tensor(started)


def latencies(rank: int, world: int, seconds: float, bandwidth: float) -> dict[str, tuple[float, float, bool]]:
    """Of each collective: least seconds to issue it and until it is there, and whether the result is right."""
    group = delayed_group(seconds, bandwidth)
    name, each = group.group_name, [torch.arange(4000.0) * (r + 1) for r in range(world)]
    x, total = each[rank], sum(each)
    part = slice(rank * 2000, (rank + 1) * 2000)
    calls = {
        "all_reduce": (lambda: c10.all_reduce(x, "sum", name), total),
        "all_gather": (lambda: c10.all_gather_into_tensor(x, world, name), torch.cat(each)),
        "reduce_scatter": (lambda: c10.reduce_scatter_tensor(x, "sum", world, name), total[part]),
        "all_to_all": (
            lambda: c10.all_to_all_single(x, [2000] * 2, [2000] * 2, name),
            torch.cat([e[part] for e in each]),
        ),
        "broadcast": (lambda: c10.broadcast(x, 1, name), each[1]),
        "several": (lambda: c10.all_reduce_coalesced([x, x], "sum", name)[1], total),
        "barrier": (lambda: dist.barrier(group=group, async_op=True), None),
    }
    found = {}
    for what, (call, wanted) in calls.items():
        times = []
        for _ in range(6):
            dist.barrier()
            began = time.perf_counter()
            started = call()
            issued = time.perf_counter() - began
            result = waited(started) if wanted is not None else started.wait()
            times.append((issued, time.perf_counter() - began))
        found[what] = (*(min(t) for t in zip(*times, strict=True)), wanted is None or torch.equal(result, wanted))
    return found


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Parameter(torch.randn(6, 4))
        self.dense = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = functional.all_to_all_single_autograd(self.rows, None, None, dist.group.WORLD)
        total = functional.all_reduce(self.dense.weight.detach().sum(0), "sum", dist.group.WORLD)
        count = functional.all_reduce(x.detach().sum(0), "sum", dist.group.WORLD)
        h = self.dense(torch.relu(self.dense(x)))
        return (rows.mean(0) * h.mean(0) * (total + count)).sum()


def train(rank: int, world: int, folder: str) -> dict[str, object]:
    """Losses and gradients with the default pipeline beside eager; what the dumps say."""
    eager, compiled = Step(), Step()
    with torch.no_grad():
        for step in (eager, compiled):
            step.rows.add_(rank)
    call = torch.compile(
        compiled, backend="turbogr", options={"on_error": "raise", "dump": Path(folder), "verify": "strict"}
    )
    worst = 0.0
    for number in range(3):
        x = torch.randn(5 + number, 4, generator=torch.Generator().manual_seed(number))
        for step in (eager, call):
            loss = step(x)
            loss.backward()
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
            worst = max(worst, float((a.grad - b.grad).abs().max()))
    return {"worst": worst, "loss": float(loss)}


def disagree(rank: int, world: int, cases: list[str]) -> dict[str, str]:
    """What a rank is told when the others run another graph."""
    return {case: _told(rank, case) for case in cases}


def _told(rank: int, case: str) -> str:
    group = dist.group.WORLD

    def first(x: Tensor) -> Tensor:
        return functional.all_reduce(functional.all_reduce(x, "sum", group) * 2, "max", group)

    def second(x: Tensor) -> Tensor:
        y = functional.all_reduce(x, "sum", group) * 2
        return {
            "op": lambda: functional.all_gather_tensor(y, 0, group),
            "settings": lambda: functional.all_reduce(y, "sum", group),
            "dtype": lambda: functional.all_reduce(y.double(), "max", group), "fewer": lambda: y,
            "sizes": lambda: functional.all_reduce(y[:2], "max", group),
        }[case]()  # fmt: skip

    call = torch.compile(second if rank else first, backend="turbogr", dynamic=False)
    with torch.no_grad():
        try:
            call(torch.ones(4))
        except RanksDisagree as error:
            return str(error)
    return "no error"


def recompile_alone(rank: int, world: int) -> float:
    """A rank that compiles anew for sizes of its own, with the same collectives, goes on."""
    group = dist.group.WORLD
    call = torch.compile(
        lambda x: functional.all_reduce(x.sum(0), "sum", group),
        backend="turbogr",
        options={"on_error": "raise"},
        dynamic=False,
    )
    total = 0.0
    with torch.no_grad():
        for rows in (3, 4, 5) if rank else (3, 3, 3):
            total += float(call(torch.ones(rows, 2)).sum())
    return total


def inductor_order(rank: int, world: int) -> list[str]:
    """Generated code: starts, products and waits in the order in which they run."""
    import torch._inductor.utils as utils

    group = dist.group.WORLD

    def step(x: Tensor, a: Tensor, w: Tensor) -> Tensor:
        h = a
        for _ in range(3):
            h = torch.tanh(h @ w)
        return functional.all_to_all_single(x, None, None, group).sum() + h.sum()

    call = torch.compile(step, backend="turbogr", options={"codegen": "inductor", "on_error": "raise"})
    inputs = torch.randn(8, 4), torch.randn(16, 16), torch.randn(16, 16) / 4
    with torch.no_grad():
        result, (code, *_) = utils.run_and_get_code(call, *inputs)
        torch.testing.assert_close(result, step(*inputs))
    words = {"all_to_all_single.default(": "start", "extern_kernels.mm(": "product", "wait_tensor.default(": "wait"}
    body = code[code.index("def call(") :]
    return [w for line in body.splitlines() for word, w in words.items() if word in line]
