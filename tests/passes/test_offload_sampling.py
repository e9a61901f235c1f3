"""What the pass cuts out, what it leaves and why; tests of running ahead are in tests/turbogr_compile/test_ahead.py."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile
from turbogr_compile import Instrument
from turbogr_compile.passes.common.cut import seeded

aten = torch.ops.aten
TABLE = torch.randn(30, 4, requires_grad=True)
POPULARITY = torch.rand(30)
IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


class Watch(Instrument):
    explains = True

    def __init__(self):
        self.remarks, self.left, self.added = [], [], []

    def after(self, run, step):
        if step.pass_.name == "offload-sampling":
            self.left = [n.target.overloadpacket._qualified_op_name for n in run.graph.nodes if _is_op(n)]
            self.added = [n.name for n in run.graph.find_nodes(op="placeholder") if n.name.startswith("ahead")]

    def finish(self, run):
        self.remarks += run.remarks

    def said(self, id):
        return [r for r in self.remarks if r.id == id]


def _is_op(node):
    return isinstance(node.target, torch._ops.OpOverload)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    gc.collect()
    torch.manual_seed(0)


def compiled(fn, spec="offload-sampling", **options):
    watch = Watch()
    road = {"target": "eager", "pipeline": spec, "verify": "numeric", "on_error": "raise", "instruments": (watch,)}
    return turbogr_compile.compile(fn, fullgraph=True, **(road | options)), watch


def scored(drawn):
    """A trained value of what was drawn."""
    index = drawn if not drawn.is_floating_point() else (drawn * 29).long().clamp(0, 29)
    return F.embedding(index, TABLE).sum()


DRAWS = {
    "randint": lambda ids: torch.randint(0, 30, (2, 5)),
    "randint of a shape": lambda ids: torch.randint(1, 30, (*ids.shape, 4)),
    "randint_like": lambda ids: torch.randint_like(ids, 1, 30),
    "randperm": lambda ids: torch.randperm(30)[:9],
    "multinomial": lambda ids: torch.multinomial(POPULARITY, 8),
    "multinomial with replacement": lambda ids: torch.multinomial(POPULARITY.expand(2, -1), 40, replacement=True),
    "rand": lambda ids: torch.rand(2, 3),
    "rand_like": lambda ids: torch.rand_like(ids.float()),
    "bernoulli": lambda ids: torch.bernoulli(POPULARITY),
    "exponential race": lambda ids: (POPULARITY / torch.empty(30).exponential_()).topk(6).indices,
    "uniform_": lambda ids: torch.empty(6).uniform_(0, 1),
    "normal_": lambda ids: torch.empty(6).normal_().sigmoid(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_cut_out_and_draw_what_their_seed_says(name):
    step, watch = compiled(lambda ids: scored(DRAWS[name](ids)))
    step(IDS).backward()
    assert watch.said("offloaded") and watch.added
    assert not [op for op in watch.left if "rand" in op or "multinomial" in op or "topk" in op]


def test_every_op_that_draws_is_seeded_by_an_overload_of_its_own():
    assert seeded(aten.randint.low) is aten.randint.low_generator
    assert seeded(aten.rand.default) is aten.rand.generator
    assert seeded(aten.randint_like.low_dtype) is aten.randint_like.low_generator_dtype
    assert seeded(aten.multinomial.default) is aten.multinomial.default
    assert seeded(aten.dropout.default) is None and seeded(aten.scaled_dot_product_attention.default) is None


def test_what_follows_from_draws_goes_along():
    def loss(ids):
        drawn = torch.multinomial(POPULARITY, 8)
        unique, back = torch.unique(drawn, return_inverse=True)
        hits = ids[..., None] == drawn
        scores = F.embedding(ids, TABLE) @ F.embedding(unique, TABLE)[back].T
        return scores.masked_fill(hits, -1e9).logsumexp(-1).sum()

    step, watch = compiled(loss)
    step(IDS).backward()
    assert {"aten::embedding", "aten::masked_fill"} <= set(watch.left)
    assert not {"aten::multinomial", "aten::_unique2", "aten::eq", "aten::_assert_scalar"} & set(watch.left)
    (said,) = watch.said("offloaded")
    assert "1 of them draws" in said.text and "torch.multinomial(POPULARITY, 8)" in str(said.line)


def test_views_and_sizes_are_made_in_the_step():
    def loss(ids):
        drawn = torch.randint(0, 30, (*ids.shape, 4))
        return F.embedding(drawn.flatten(), TABLE).sum() * drawn.shape[0]

    step, watch = compiled(loss, dynamic=True)
    assert step(IDS).item() != step(IDS.repeat(2, 1)).item()
    assert watch.added == ["ahead_randint"] and "aten::reshape" in watch.left


def test_what_the_batch_alone_says_is_made_where_it_is_read():
    def loss(ids):
        valid = ids != 3
        return scored(torch.where(valid, torch.randint_like(ids, 1, 30), ids)) * valid.sum()

    step, watch = compiled(loss)
    step(IDS)
    assert watch.added == ["ahead_where"] and "aten::ne" in watch.left, "a mask that both sides read is made twice"


def test_index_work_without_draws():
    def loss(ids):
        unique, back = torch.unique(ids, return_inverse=True)
        return F.embedding(unique, TABLE)[back].sum()

    step, watch = compiled(loss)
    torch.testing.assert_close(step(IDS), F.embedding(IDS, TABLE).sum())
    torch.testing.assert_close(step(IDS * 0 + 1), F.embedding(IDS * 0 + 1, TABLE).sum())
    assert len(watch.added) == 2 and "aten::_unique2" not in watch.left
    step, watch = compiled(loss, "offload-sampling{index_work=false}")
    step(IDS)
    assert not watch.added and watch.said("nothing-drawn")


def test_a_number_read_from_the_batch():
    def loss(ids):
        count = int(ids.max())
        torch._check(count >= 0)
        return scored(torch.randperm(count) % 30)

    step, watch = compiled(loss, verify="strict")
    assert step(IDS).isfinite() and watch.said("offloaded")


def test_results_of_the_step_are_not_its_inputs():
    def loss(ids):
        drawn = torch.randint_like(ids, 1, 30)
        return scored(drawn), drawn, drawn[0]

    step, _ = compiled(loss)
    _, drawn, first = step(IDS)
    assert drawn.shape == IDS.shape and torch.equal(drawn[0], first)
    kept = drawn.clone()
    step(IDS)
    assert torch.equal(drawn, kept)


# --- what stays --------------------------------------------------------------------------------------


def hard_negatives(ids):
    return torch.multinomial(F.embedding(ids, TABLE).sum(-1).softmax(-1), 2)


def test_draws_that_depend_on_a_parameter_are_refused_at_their_line():
    step, watch = compiled(lambda ids: scored(hard_negatives(ids)))
    step(IDS)
    (said,) = watch.said("draw-stays")
    assert "torch.multinomial(" in str(said.line) and "which is trained, through %embedding" in said.text
    assert not watch.added


def test_detaching_does_not_make_a_value_known():
    step, watch = compiled(lambda ids: scored(torch.multinomial(TABLE.detach().abs().sum(1), 3)))
    step(IDS)
    assert watch.said("draw-stays") and not watch.added


def test_one_draw_goes_and_the_other_stays():
    both = lambda ids: scored(hard_negatives(ids)) + scored(torch.randint_like(ids, 1, 30))  # noqa: E731
    step, watch = compiled(both, verify="strict")  # the one that stays draws other numbers than before
    step(IDS)
    assert watch.said("draw-stays") and watch.added == ["ahead_randint_like"]


def test_dropout_stays():
    def loss(ids):
        noisy = F.dropout(ids.float(), 0.5)
        return scored(torch.randint_like(ids, 1, 30)) * noisy.sum() * F.dropout(TABLE, 0.5).sum()

    step, watch = compiled(loss, verify="strict")
    step(IDS).backward()
    assert watch.left.count("aten::dropout") == 2 and watch.added == ["ahead_randint_like"]


def test_what_the_step_writes_is_not_read_ahead():
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(30, 4)
            self.register_buffer("seen", torch.ones(30))

        def forward(self, ids):
            self.seen.index_add_(0, ids.flatten(), torch.ones(ids.numel()))
            return self.table(torch.multinomial(self.seen, 3)).sum()

    step, watch = compiled(Counting())
    step(IDS)
    (said,) = watch.said("draw-stays")
    assert "seen, which the step itself writes to" in said.text


def test_nothing_to_draw_is_said():
    step, watch = compiled(lambda ids: F.embedding(ids, TABLE).sum())
    step(IDS)
    assert watch.said("nothing-drawn")


def test_autocast_around_the_step():
    def loss(ids):
        weights = POPULARITY[:, None] @ POPULARITY[None]
        return scored(torch.multinomial(weights.sum(1), 4))

    values = []
    for _ in range(2):
        torch._dynamo.reset()
        gc.collect()
        torch.manual_seed(0)
        step, watch = compiled(loss, verify="fast")
        with torch.autocast("cpu", torch.bfloat16):
            loop = [IDS, IDS + 1, IDS + 2]
            values.append([step(x).item() for x in (turbogr_compile.ahead(loop) if values else loop)])
    assert values[0] == values[1] and watch.added


def test_with_packing_and_the_default_passes():
    def loss(ids):
        x = F.embedding(ids, TABLE)
        keep = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & (ids != 0)[:, None, :]
        hidden = (x @ x.mT).masked_fill(~keep, -1e9).softmax(-1) @ x
        drawn = torch.randint(1, 30, (*ids.shape, 4))
        scores = (hidden[..., None, :] * F.embedding(drawn, TABLE)).sum(-1)
        return (scores.logsumexp(-1) * (ids != 0)).sum() / (ids != 0).sum()

    ids = torch.tensor([[3, 4, 5, 0], [6, 0, 0, 0], [7, 8, 0, 0]])
    watch = Watch()
    step = turbogr_compile.compile(loss, passes=["offload-sampling"], on_error="raise", instruments=(watch,))
    values = [step(x).item() for x in turbogr_compile.ahead([ids, ids.roll(1, 0), ids])]
    assert len(set(values)) == 3 and watch.added and watch.said("packed")
