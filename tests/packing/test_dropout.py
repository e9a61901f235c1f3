"""Dropout on packed rows: other random numbers than eager's, of the same distribution; or eager's own, when asked.

Statistical bounds are at least four standard errors wide and seeds are fixed: a test that passes once always passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import turbogr_compile
from turbogr_compile import GraphRun, Instrument, Pipeline, Role
from turbogr_compile.testing import Flops

ITEMS, DIM, HEADS, B, N = 30, 8, 2, 4, 10
P = 0.3
SEEDS = 300
ROADS = {"eager": {"target": "eager"}, "aten": {"codegen": "aten"}}
both_roads = pytest.mark.parametrize("road", ROADS)
AS_EAGER = Pipeline.default("cpu").spec.replace("pack-rows", "pack-rows{dropout=padded}")


class Model(nn.Module):
    """`rows` and `pairs`: probabilities of dropping elements of rows, and weights of attention."""

    def __init__(self, spelling: str, rows: float, pairs: float) -> None:
        super().__init__()
        self.spelling, self.pairs = spelling, pairs
        self.items = nn.Embedding(ITEMS + 1, DIM, padding_idx=0)
        self.norm, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.dropout, self.dropout2 = nn.Dropout(rows), nn.Dropout(rows)

    def weigh(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        p = self.pairs if self.training else 0.0
        if self.spelling == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, visible, dropout_p=p)
        scores = q @ k.transpose(-1, -2) / (DIM // HEADS) ** 0.5
        if self.spelling == "softmax":
            weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        else:
            weights = F.silu(scores) / N * visible
        return F.dropout(weights, p) @ v

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        valid = ids != 0
        x = self.dropout(self.items(ids))
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        visible = torch.ones(N, N, dtype=torch.bool).tril() & valid[:, None, None, :]
        mixed = self.weigh(q, k, v, visible).transpose(1, 2).flatten(2)
        x = x + self.dropout2(self.out(mixed))
        return F.cross_entropy((x @ self.items.weight.T).flatten(0, 1), targets.flatten(), ignore_index=0)


def lengths() -> Tensor:
    return torch.tensor([3, 5, 1, 4])


def batch() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    valid = torch.arange(N) < lengths()[:, None]
    items = torch.randint(1, ITEMS + 1, (B, N + 1), generator=g)
    return torch.where(valid, items[:, :-1], 0), torch.where(valid, items[:, 1:], 0)


def model_of(spelling: str = "sdpa", rows: float = 0.0, pairs: float = 0.0) -> Model:
    torch.manual_seed(3)
    return Model(spelling, rows, pairs)


class Packed(Instrument):
    def __init__(self) -> None:
        self.attentions = self.gathers = 0

    def finish(self, run: GraphRun) -> None:
        if run.role is Role.CAPTURED:
            names = [str(n.target) for n in run.graph.nodes]
            self.attentions += sum("turbogr.jagged_attention" in n for n in names)
            self.gathers += sum("turbogr.gather_rows" in n for n in names)


def compiled(fn: Callable[..., Tensor], road: str, **options: Any) -> tuple[Callable[..., Tensor], Packed]:
    torch._dynamo.reset()
    seen = Packed()
    return turbogr_compile.compile(fn, on_error="raise", instruments=(seen,), **ROADS[road], **options), seen


def losses(loss_of: Callable[..., Tensor], seeds: int = SEEDS) -> Tensor:
    found = []
    with torch.no_grad():
        for seed in range(seeds):
            torch.manual_seed(seed)
            found.append(loss_of(*batch()))
    return torch.stack(found).double()


def assert_same_distribution(a: Tensor, b: Tensor) -> None:
    """Means, spreads and quantiles of two samples, each within four standard errors."""
    error = (a.var() / len(a) + b.var() / len(b)).sqrt()
    assert (a.mean() - b.mean()).abs() <= 4 * error, (a.mean(), b.mean(), error)
    # Var(log s²) ≈ (kurtosis - 1) / n
    heavy = [(((x - x.mean()) / x.std()) ** 4).mean() - 1 for x in (a, b)]
    allowed = 4 * (heavy[0] / len(a) + heavy[1] / len(b)).sqrt()
    assert (a.var() / b.var()).log().abs() <= allowed, (a.var(), b.var(), allowed)
    # Kolmogorov and Smirnov: distance of the two distribution functions.
    points = torch.cat([a, b]).sort().values
    below = [(torch.searchsorted(x.sort().values, points, right=True) / len(x)) for x in (a, b)]
    assert (below[0] - below[1]).abs().max() <= 2.2 * ((len(a) + len(b)) / (len(a) * len(b))) ** 0.5


# --- the same distribution -------------------------------------------------------------------------------


@both_roads
def test_each_element_is_kept_as_often_as_it_should(road: str) -> None:
    """The gradient of a sum shows the mask."""
    valid = torch.arange(N) < lengths()[:, None]

    def total(x: Tensor, valid: Tensor) -> Tensor:
        return (F.dropout(x, P) * valid.unsqueeze(-1)).sum()

    run, seen = compiled(total, road)
    x = torch.rand(B, N, DIM, generator=torch.Generator().manual_seed(1)).add(0.5).requires_grad_()
    masks = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        loss = run(x, valid)
        (mask,) = torch.autograd.grad(loss, [x])
        torch.testing.assert_close(loss, (x * mask).sum().detach(), msg="forward and backward drop other elements")
        masks.append(mask)
    assert seen.gathers
    found = torch.stack(masks)
    assert not found[:, ~valid].any()
    kept = found[:, valid] != 0
    torch.testing.assert_close(found[:, valid][kept], torch.full_like(found[:, valid][kept], 1 / (1 - P)))
    kept = kept.flatten(1).double()
    spread = (P * (1 - P)) ** 0.5
    assert (kept.mean() - (1 - P)).abs() <= 4 * spread / kept.numel() ** 0.5
    assert (kept.mean(0) - (1 - P)).abs().max() <= 5 * spread / SEEDS**0.5
    # Elements are dropped independently of each other, and of other calls.
    apart = (kept - (1 - P)) / spread
    together = (apart.T @ apart / SEEDS).fill_diagonal_(0)
    assert together.abs().max() <= 5.5 / SEEDS**0.5
    assert (apart[1:] * apart[:-1]).mean().abs() <= 4 / kept.numel() ** 0.5


@pytest.mark.parametrize(
    "road, spelling, rows, pairs",
    [
        ("eager", "sdpa", P, 0.0),
        ("eager", "sdpa", 0.0, P),
        ("eager", "softmax", 0.0, P),
        ("eager", "silu", 0.0, P),
        pytest.param("aten", "sdpa", 0.2, 0.2, marks=pytest.mark.slow),
        ("aten", "silu", 0.2, 0.2),
    ],
)
def test_loss_has_the_distribution_of_eager(road: str, spelling: str, rows: float, pairs: float) -> None:
    model = model_of(spelling, rows, pairs)
    run, seen = compiled(model.loss, road)
    actual = losses(run)
    assert seen.attentions == 1
    assert len(actual.unique()) > SEEDS // 2, "the same numbers again and again"
    assert_same_distribution(losses(model.loss), actual)


@both_roads
@pytest.mark.parametrize("spelling", ["sdpa", "softmax", "silu"])
def test_backward_drops_the_same_pairs(road: str, spelling: str) -> None:
    """Attention is linear in its values: the loss is their product with its gradient, if both saw one mask."""
    model = model_of(spelling, 0.0, P)
    g = torch.Generator().manual_seed(2)
    q, k, v, weights = (torch.randn(B, HEADS, N, DIM // HEADS, generator=g, dtype=torch.float64) for _ in range(4))
    valid = torch.arange(N) < lengths()[:, None]

    def mixed(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, valid: Tensor) -> Tensor:
        visible = torch.ones(N, N, dtype=torch.bool).tril() & valid[:, None, None, :]
        return (model.weigh(q, k, v, visible) * weights * valid[:, None, :, None]).sum()

    run, seen = compiled(mixed, road)
    found = set()
    for seed in range(5):
        torch.manual_seed(seed)
        values = v.clone().requires_grad_()
        loss = run(q, k, values, weights, valid)
        loss.backward()
        assert values.grad is not None
        torch.testing.assert_close(loss.detach(), (v * values.grad).sum())
        found.add(loss.item())
    assert seen.attentions == 1 and len(found) == 5


@both_roads
def test_gradients_have_the_mean_of_eager(road: str) -> None:
    model = model_of("sdpa", P, P)
    reference = copy.deepcopy(model)
    run, _ = compiled(model.loss, road)
    samples = []
    for loss_of, owner in ((reference.loss, reference), (run, model)):
        found = []
        for seed in range(SEEDS // 2):
            torch.manual_seed(seed)
            found.append(torch.autograd.grad(loss_of(*batch()), [owner.qkv.weight])[0].flatten().double())
        samples.append(torch.stack(found))
    a, b = samples
    error = (a.var(0) / len(a) + b.var(0) / len(b)).sqrt()
    assert ((a.mean(0) - b.mean(0)).abs() <= 5 * error + 1e-9).all()


# --- streams ---------------------------------------------------------------------------------------------


@both_roads
def test_seeds_repeat_and_differ(road: str) -> None:
    model = model_of("sdpa", P, P)
    run, _ = compiled(model.loss, road)
    first, again = losses(run, 8), losses(run, 8)
    assert torch.equal(first, again)
    assert len(first.unique()) == 8
    torch.manual_seed(0)
    with torch.no_grad():
        assert len({run(*batch()).item() for _ in range(8)}) == 8, "calls draw one after the other"


@both_roads
@pytest.mark.parametrize("spelling", ["sdpa", "softmax", "silu"])
def test_nothing_is_dropped_in_evaluation(road: str, spelling: str) -> None:
    model = model_of(spelling, P, P).eval()
    run, seen = compiled(model.loss, road)
    torch.testing.assert_close(run(*batch()), model.loss(*batch()))
    assert seen.attentions == 1
    state = torch.get_rng_state()
    run(*batch())
    assert torch.equal(state, torch.get_rng_state()), "random numbers were drawn"


@pytest.mark.parametrize("spelling", ["sdpa", "softmax", "silu"])
def test_what_comes_before_thinned_weights_is_packed(spelling: str) -> None:
    """A dropout that an attention draws itself asks for nothing, though drawing is an effect."""
    executed = []
    for p in (0.0, P):
        model = model_of(spelling, p, p)
        run, seen = compiled(model.loss, "eager")
        run(*batch()).backward()
        with Flops() as flops:
            run(*batch()).backward()
        executed.append(flops.total)
        assert seen.attentions == 1
    assert executed[0] == executed[1]


def attended(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bqk,bkd->bqd", weights, v + v) / 2


def summed(weights: Tensor, v: Tensor) -> Tensor:
    return weights.sum(-1, keepdim=True) * v[:, :1]


@pytest.mark.parametrize("reader", [attended, summed])
def test_readers_of_thinned_weights_see_one_draw(reader: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Attentions that share their weights drop the same pairs; they are not packed where something else reads those."""
    model = model_of("softmax")

    def step(ids: Tensor) -> Tensor:
        valid = ids != 0
        q, k, v = model.qkv(model.items(ids)).chunk(3, -1)
        v = v if reader is attended else torch.ones_like(v)
        weights = F.dropout((q @ k.transpose(1, 2)).masked_fill(~valid[:, None, :], -torch.inf).softmax(-1), P)
        return ((weights @ v - reader(weights, v)) * valid[..., None]).abs().sum()

    run, seen = compiled(step, "eager")
    for seed in range(5):
        torch.manual_seed(seed)
        torch.testing.assert_close(run(batch()[0]), torch.tensor(0.0), rtol=0, atol=1e-5)
    assert seen.attentions == (2 if reader is attended else 0)


@both_roads
def test_everything_may_be_dropped(road: str) -> None:
    """p = 1 leaves zeros, not nans."""
    model = model_of("softmax", 0.0, 1.0)
    run, _ = compiled(model.loss, road)
    torch.testing.assert_close(run(*batch()), model.loss(*batch()))


# --- eager's own numbers ---------------------------------------------------------------------------------


@both_roads
@pytest.mark.parametrize("spelling", ["sdpa", "softmax", "silu"])
def test_padded_dropout_draws_what_eager_draws(road: str, spelling: str) -> None:
    model = model_of(spelling, P, 0.0)
    reference = copy.deepcopy(model)
    run, seen = compiled(model.loss, road, pipeline=AS_EAGER)
    for seed in range(5):
        results = []
        for loss_of, owner in ((reference.loss, reference), (run, model)):
            torch.manual_seed(seed)
            owner.zero_grad(set_to_none=True)
            loss = loss_of(*batch())
            loss.backward()
            results.append([loss.detach(), *[p.grad for p in owner.parameters()], torch.rand(1)])
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    assert seen.attentions == 1


def test_pairs_keep_their_own_stream() -> None:
    """Masks of attention are drawn by the packed kernel in either mode: same distribution, other numbers."""
    model = model_of("sdpa", 0.2, 0.2)
    run, seen = compiled(model.loss, "eager", pipeline=AS_EAGER)
    assert_same_distribution(losses(model.loss), losses(run))
    assert seen.attentions == 1
