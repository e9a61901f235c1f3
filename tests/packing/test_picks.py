"""Rows picked by tensors that user code made, and metrics beside the loss: neither keeps a model padded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import turbogr_compile
from turbogr_compile.testing import Flops

WIDTH, DIM, ITEMS = 48, 16, 60
LENGTHS = ([5, 3, 9, 48, 2, 7, 1, 4], [6, 30, 9, 20, 2, 17, 48, 4], [1] * 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.positions = nn.Embedding(ITEMS, DIM, padding_idx=0), nn.Embedding(2 * WIDTH, DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.feed = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, ids):
        columns = ids.shape[1]
        x = self.items(ids) + self.positions(torch.arange(columns))
        q, k, v = self.qkv(x).chunk(3, -1)
        visible = torch.ones(columns, columns, dtype=torch.bool).tril() & (ids != 0)[:, None]
        x = x + (q @ k.transpose(1, 2)).masked_fill(~visible, -1e9).softmax(-1) @ v
        return x + self.feed(x)

    def scores(self, x):
        return x @ self.items.weight.T


@pytest.fixture(autouse=True)
def always(monkeypatch):
    torch._dynamo.reset()
    torch.manual_seed(0)
    monkeypatch.setenv("TURBOGR_WORTH", "always")


@pytest.fixture
def model():
    return Model().double()


def histories(lengths, width=WIDTH):
    ids, targets = torch.zeros(2, len(lengths), width, dtype=torch.long)
    for i, length in enumerate(lengths):
        history = torch.randint(1, ITEMS, (length + 1,))
        ids[i, :length], targets[i, :length] = history[:-1], history[1:]
    return ids, targets


def told(model, step, batch):
    """Results and gradients, or the error."""
    model.zero_grad()
    try:
        loss, *others = step(model, *batch)
    except (RuntimeError, IndexError) as error:
        return type(error)
    loss.backward()
    return [loss.detach(), *others, *[p.grad for p in model.parameters()]]


def assert_packed(model, step, batches, share=0.4):
    of_others = turbogr_compile.statistics()
    compiled = turbogr_compile.compile(step, target="eager", on_error="raise")
    for batch in batches:
        expected = told(model, step, batch)
        found = told(model, compiled, batch)
        if isinstance(expected, type):
            assert found is expected
        else:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    own = [s for s in turbogr_compile.statistics() if not any(s is other for other in of_others)]
    assert own and not any(s.fallbacks for s in own)
    flops = []
    for run in (compiled, step):
        with Flops() as counter:
            run(model, *batches[0])[0].backward()
        flops.append(counter.total)
    assert flops[0] < share * flops[1], flops


# --- picks ---------------------------------------------------------------------------------------------


def next_item(model, rows, targets):
    return (F.cross_entropy(model.scores(rows).flatten(0, -2), targets.flatten()),)


def by_sequence_and_column(model, ids, sequence, column, targets):
    return next_item(model, model(ids)[sequence, column], targets)


def by_column(model, ids, column, targets):
    return next_item(model, model(ids)[torch.arange(ids.shape[0]), column], targets)


def by_number(model, ids, number, targets):
    return next_item(model, model(ids).flatten(0, 1)[number], targets)


def by_index_select(model, ids, number, targets):
    return next_item(model, model(ids).flatten(0, 1).index_select(0, number), targets)


def by_embedding(model, ids, number, targets):
    return next_item(model, F.embedding(number, model(ids).flatten(0, 1)), targets)


def by_gather(model, ids, index, targets):
    return next_item(model, model(ids).gather(1, index), targets)


def by_take_along(model, ids, index, targets):
    return next_item(model, model(ids).take_along_dim(index, 1), targets)


def by_columns(model, ids, columns, targets):
    return next_item(model, model(ids)[:, columns], targets)


def by_selected_columns(model, ids, columns, targets):
    return next_item(model, model(ids).index_select(1, columns), targets)


def by_masked_select(model, ids, mask, targets):
    return next_item(model, model(ids).masked_select(mask[..., None]).view(-1, DIM), targets)


def picks(lengths, width=WIDTH):
    """Inputs of each of the steps above: the last row of each sequence; one row is named twice."""
    ids, _ = histories(lengths, width)
    lengths = torch.tensor(lengths)
    count, last = len(lengths), lengths - 1
    targets, sequence = torch.randint(1, ITEMS, (count,)), torch.arange(count)
    number, mask = sequence * width + last, F.one_hot(last, width).bool()
    order = torch.randperm(count)
    order[0] = order[-1]
    return {
        by_sequence_and_column: (ids, sequence[order], last[order], targets),
        by_column: (ids, last, targets),
        by_number: (ids, number[order], targets),
        by_index_select: (ids, number[order], targets),
        by_embedding: (ids, number[order], targets),
        by_gather: (ids, last[:, None, None].expand(-1, 1, DIM), targets),
        by_take_along: (ids, last[:, None, None], targets),
        by_columns: (ids, torch.tensor([0, 2, 0]), torch.randint(1, ITEMS, (count, 3))),
        by_selected_columns: (ids, torch.tensor([1, 0]), torch.randint(1, ITEMS, (count, 2))),
        by_masked_select: (ids, mask, targets),
    }


@pytest.mark.parametrize("step", picks([1, 2]), ids=lambda f: f.__name__)
def test_rows_picked_by_inputs(model, step):
    assert_packed(model, step, [picks(lengths)[step] for lengths in LENGTHS])


@pytest.mark.parametrize("step", picks([1, 2]), ids=lambda f: f.__name__)
def test_of_batches_of_other_sizes(model, step):
    shapes = [(LENGTHS[0], WIDTH), ([4, 9, 2], 40), ([1, 30, 8, 2, 5], 33), ([7, 3], WIDTH), ([2, 5, 3, 1], 2 * WIDTH)]
    assert_packed(model, step, [picks(lengths, width)[step] for lengths, width in shapes])


@pytest.mark.parametrize("step", picks([1, 2]), ids=lambda f: f.__name__)
def test_of_one_sequence(model, step):
    assert_packed(model, step, [picks([length])[step] for length in (5, 9, WIDTH, 1)])


@pytest.mark.parametrize("wrong", [-1, WIDTH, -WIDTH - 1])
@pytest.mark.parametrize("step", [by_sequence_and_column, by_number, by_gather, by_embedding], ids=lambda f: f.__name__)
def test_numbers_from_the_end_and_beyond_it(model, step, wrong):
    """-1 is the last column where torch says so, and an error elsewhere."""
    first, *more = picks(LENGTHS[0])[step]
    index = more[-2].clone()
    index[(3,) + (0,) * (index.dim() - 1)] = wrong if step is not by_number else wrong * len(LENGTHS[0])
    if step is by_gather:
        index[3] = wrong
    batches = [picks(LENGTHS[0])[step], (first, *more[:-2], index, more[-1])]
    compiled = turbogr_compile.compile(step, target="eager", on_error="raise")
    for batch in batches:
        expected, found = told(model, step, batch), told(model, compiled, batch)
        if isinstance(expected, type):
            assert found is expected
        else:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_an_index_that_is_no_expansion(model):
    """Features that come from different rows: nothing can be left out by rows."""
    ids, index, targets = picks(LENGTHS[0])[by_gather]
    compiled = turbogr_compile.compile(by_gather, target="eager", on_error="raise")
    others = index.clone()
    others[2, 0, 3:] = 0
    for batch in [(ids, index, targets), (ids, others, targets), (ids, index.clone(), targets)]:
        torch.testing.assert_close(told(model, compiled, batch), told(model, by_gather, batch), rtol=1e-9, atol=1e-9)


# --- metrics -------------------------------------------------------------------------------------------


def scored(model, ids, targets):
    scores = model.scores(model(ids))
    return scores, F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=0), targets != 0


def hits_and(model, ids, targets):
    scores, loss, valid = scored(model, ids, targets)
    return loss, ((scores.argmax(-1) == targets) & valid).sum()


def hits_logical_and(model, ids, targets):
    scores, loss, valid = scored(model, ids, targets)
    return loss, torch.logical_and(valid, scores.argmax(-1) == targets).double().sum() / valid.sum()


def hits_selected(model, ids, targets):
    scores, loss, valid = scored(model, ids, targets)
    return loss, (scores.argmax(-1) == targets).masked_select(valid).double().mean()


def hits_among_ten(model, ids, targets):
    scores, loss, valid = scored(model, ids, targets)
    return loss, ((scores.topk(10, -1).indices == targets[..., None]).any(-1) & valid).sum()


def reciprocal_rank(model, ids, targets):
    scores, loss, valid = scored(model, ids, targets)
    better = (scores > scores.gather(-1, targets[..., None])).sum(-1)
    return loss, (valid / (better.double() + 1)).sum() / valid.sum()


def pairs_in_order(model, ids, targets):
    x, valid = model(ids), targets != 0
    good, bad = (x * model.items(targets)).sum(-1), (x * model.items((targets + 7) % ITEMS)).sum(-1)
    return (F.softplus(bad - good) * valid).sum() / valid.sum(), ((good > bad) & valid).sum() / valid.sum()


def selected_losses(model, ids, targets):
    losses = F.cross_entropy(model.scores(model(ids)).flatten(0, 1), targets.flatten(), reduction="none")
    return (losses.masked_select(targets.flatten() != 0).mean(),)


METRICS = (hits_and, hits_logical_and, hits_selected, hits_among_ten, reciprocal_rank, pairs_in_order, selected_losses)


@pytest.mark.parametrize("step", METRICS, ids=lambda f: f.__name__)
def test_metrics_do_not_keep_rows(model, step):
    assert_packed(model, step, [histories(lengths) for lengths in LENGTHS])


def test_a_metric_that_counts_pads(model):
    """`or` with a mask is true on pads: they count, and stay."""

    def step(model, ids, targets):
        scores, loss, valid = scored(model, ids, targets)
        return loss, ((scores.argmax(-1) == targets) | valid).sum()

    batches = [histories(lengths) for lengths in LENGTHS]
    compiled = turbogr_compile.compile(step, target="eager", on_error="raise")
    for batch in batches:
        torch.testing.assert_close(told(model, compiled, batch), told(model, step, batch), rtol=1e-9, atol=1e-9)
