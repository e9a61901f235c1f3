"""Mixtures of experts: rows sorted by expert, multiplied, put back. Each row is its own, and is packed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile

from .test_row_ops import BATCHES, Watch

EXPERTS, WIDTH, BEST = 4, 16, 2  # grouped products want rows of 16 bytes
torch.manual_seed(0)
UP, DOWN = ((torch.randn(EXPERTS, WIDTH, WIDTH) / 4).bfloat16().requires_grad_() for _ in range(2))
ROUTER = torch.randn(EXPERTS, WIDTH).bfloat16()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.fixture
def table():
    return torch.randn(9, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()


def routed(x):
    weights, experts = F.linear(x, ROUTER).float().softmax(-1).topk(BEST)
    return weights.bfloat16().flatten(), experts.flatten()


def ends_of(experts):
    return torch.histc(experts.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)


def inverse(order):
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel())
    return back


def product(x, weights, ends):
    return F.grouped_mm(x, weights, offs=ends)


def mixture(x, ends_of=ends_of, inverse=inverse, between=F.silu):
    """(rows, width) through the best experts of each row."""
    weights, experts = routed(x)
    sorted_experts, order = experts.sort()
    ends = ends_of(sorted_experts)
    y = between(product(x[order // BEST], UP, ends))
    y = product(y, DOWN, ends) * weights[order].unsqueeze(-1)
    return y[inverse(order)].view(-1, BEST, WIDTH).sum(1)


def counted(experts):
    return torch.bincount(experts, minlength=EXPERTS).cumsum(0).int()


def compare(change, table):
    """Loss and gradients of a padded model, in eager and compiled, and was the table looked up packed?"""
    watch = Watch()

    def step(ids):
        x = F.embedding(ids, table)
        y = change(x.flatten(0, 1)).view_as(x)
        return (y.float().tanh() * (ids != 0)[..., None]).sum()

    compiled = turbogr_compile.compile(step, target="eager", on_error="raise", worth="always", instruments=[watch])
    for ids in BATCHES:
        found = []
        for run in (step, compiled):
            for p in (table, UP, DOWN):
                p.grad = None
            run(ids).backward()
            found.append([run(ids).detach(), *(p.grad.float() for p in (table, UP, DOWN))])
        for mine, its in zip(*found, strict=True):
            torch.testing.assert_close(mine, its, rtol=2e-2, atol=2e-2)
    return watch.looks_up_packed


MIXTURES = {
    "histc": mixture,
    "bincount": lambda x: mixture(x, ends_of=counted),
    "argsort": lambda x: mixture(x, inverse=torch.argsort),
}


@pytest.mark.parametrize("change", MIXTURES.values(), ids=MIXTURES)
def test_rows_of_a_mixture_are_packed(change, table):
    assert compare(change, table)


def neighbours(z):
    """Rows in sorted order meet: which rows are neighbours depends on all of them."""
    return F.silu(z + z.roll(1, 0))


def by_place(z):
    """So does where a row comes to lie."""
    return F.silu(z * torch.arange(z.shape[0]).bfloat16().unsqueeze(-1))


def shares(x):
    """A product by runs that are not those of the groups."""
    return mixture(x, ends_of=lambda experts: torch.full((EXPERTS,), experts.numel() // EXPERTS).cumsum(0).int())


def taken_for_one(x):
    """Groups that a narrow type takes for one are counted together."""
    return mixture(x, ends_of=lambda experts: ends_of(experts.bool()))


def not_undone(x):
    """Put somewhere else than rows came from."""
    return mixture(x, inverse=lambda order: order)


def never_sorted(x):
    """What undoes a sorting puts rows that were not sorted into another order."""
    _, experts = routed(x)
    own = torch.linspace(-1, 1, experts.numel()).bfloat16() * 2
    return mixture(x) + own[inverse(experts.sort()[1])].view(-1, BEST).sum(1, keepdim=True)


LOOK_ALIKES = {
    "neighbours": lambda x: mixture(x, between=neighbours),
    "by place": lambda x: mixture(x, between=by_place),
    "other runs": shares,
    "groups taken for one": taken_for_one,
    "not undone": not_undone,
    "never sorted": never_sorted,
}


@pytest.mark.parametrize("change", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alikes_stay_padded(change, table):
    assert not compare(change, table)
