"""The models: packed with their sampling fused, the same numbers as eager, and the FLOPs that formulas say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import turbogr_compile as turbogr
from turbogr_compile.training import build
from turbogr_compile.training.config import MODELS, Config
from turbogr_compile.training.flops import forward_flops, step_flops

ITEMS = 40


def small(model: str, **more) -> Config:
    sizes = {"dim": 8, "heads": 2, "layers": 2, "max_len": 12, "batch": 3, "negatives": 5, "buckets": 16}
    return Config.read({"model": model, **sizes, **more})


def batch(lengths: list[int], width: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    there = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.randint(1, ITEMS + 1, there.shape, generator=g)
    times = torch.randint(0, 100_000, there.shape, generator=g).cumsum(1)
    return torch.where(there, ids, 0), torch.where(there, times, 0)


def gradients(call, model, *args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = call(*args)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return loss.detach(), dict(zip([n for n, _ in model.named_parameters()], found, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_packed_and_fused(name):
    torch.manual_seed(0)
    model = build.recommender(small(name, negatives=600), ITEMS)
    report = turbogr.explain(model.loss, *batch([12, 3, 5]), codegen="aten")
    said = {(r["pass"], r["id"]) for record in report.records for r in record["remarks"] if r["kind"] == "applied"}
    assert {("pack-rows", "packed"), ("fuse-sampling", "sampling-fused")} <= said
    missed = [r for record in report.records for r in record["remarks"] if r["kind"] == "missed"]
    assert all("randint" in r["text"] for r in missed), missed  # draws are for all rows, so that they are eager's


@pytest.fixture(scope="module", params=MODELS)
def pair(request):
    """A model in fp64, its loss as written and compiled."""
    torch.manual_seed(0)
    model = build.recommender(small(request.param), ITEMS).double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    passes = ["fuse-sampling{min_numbers=0}"]
    return model, turbogr.compile(model.loss_against, codegen="aten", passes=passes)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=3, max_size=3).filter(lambda x: max(x) > 1), seed=st.integers(0, 99)
)
def test_same_loss_and_gradients_as_eager(pair, lengths, seed):
    model, compiled = pair
    ids, times = batch(lengths, seed=seed)
    drawn = torch.randint(1, ITEMS + 1, (3, 11, 5), generator=torch.Generator().manual_seed(seed))
    loss, wanted = gradients(model.loss_against, model, drawn, ids, times)
    found, got = gradients(compiled, model, drawn, ids, times)
    torch.testing.assert_close(found, loss)
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", MODELS)
def test_same_draws_as_eager(name):
    torch.manual_seed(0)
    model = build.recommender(small(name), ITEMS)
    ids, times = batch([12, 2, 7])
    compiled = turbogr.compile(model.loss, codegen="aten")
    torch.manual_seed(5)
    wanted = model.loss(ids, times)
    torch.manual_seed(5)
    torch.testing.assert_close(compiled(ids, times), wanted)


@pytest.mark.parametrize("name", MODELS)
def test_pads_do_not_matter(name):
    torch.manual_seed(0)
    model = build.recommender(small(name), ITEMS).double()
    ids, times = batch([12, 2, 7])
    before = model(ids, times)[ids != 0]
    after = model(ids, torch.where(ids == 0, 77, times))[ids != 0]
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_torch_counts(name):
    """On one history without padding torch counts all pairs, where the formula takes any number of them."""
    config, length = small(name), 11
    model = build.recommender(config, ITEMS)
    ids, times = batch([length], width=length)
    drawn = torch.randint(1, ITEMS + 1, (1, length - 1, config.negatives))
    with FlopCounterMode(display=False) as counter:
        hidden = model(ids[:, :-1], times[:, :-1])
        torch.einsum("bnd,bnkd->bnk", hidden, model.items(drawn))
    assert counter.get_total_flops() == forward_flops(config, length - 1, (length - 1) ** 2)


def test_flops_of_a_step():
    config = small("hstu")
    one = 3 * forward_flops(config, 3, 6)
    assert step_flops(config, [4]) == one
    assert step_flops(config, [4, 1, 0, 4]) == 2 * one


@pytest.mark.parametrize("name", MODELS)
def test_large_has_a_fifth_of_a_billion_dense_parameters(name):
    with torch.device("meta"):
        count = build.parameters_of(build.recommender(Config.read({"model": name, "size": "large"}), 20_000))
    assert 0.18e9 < count["dense"] < 0.22e9
