"""Rows picked by what they hold, computed apart and put back: mixtures of experts in a loop. Each row is its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile

from .test_row_ops import BATCHES, FEATURES, Watch

EXPERTS = 3
FIRST, SECOND = (torch.randn(EXPERTS, FEATURES, FEATURES, dtype=torch.float64).requires_grad_() for _ in range(2))
ROUTER = torch.randn(EXPERTS, FEATURES, dtype=torch.float64)


def expert(number, x):
    return F.silu(F.linear(x, FIRST[number])) @ SECOND[number]


def choice(x):
    return F.linear(x, ROUTER).argmax(-1)


def best(x):
    return F.linear(x, ROUTER).softmax(-1).topk(2)


def flat(change):
    return lambda x: change(x.flatten(0, 1)).view_as(x)


def by_mask(x):
    out, chosen = torch.zeros_like(x), choice(x)
    for e in range(EXPERTS):
        mask = chosen == e
        out[mask] = expert(e, x[mask])
    return out


def weighted_by_mask(x):
    out = x.clone()
    weight, chosen = F.linear(x, ROUTER).softmax(-1).max(-1)
    for e in range(EXPERTS):
        mask = chosen == e
        out[mask] = out[mask] + expert(e, x[mask]) * weight[mask].unsqueeze(-1)
    return out


def by_numbers(x):
    out, chosen = torch.zeros_like(x), choice(x)
    for e in range(EXPERTS):
        rows = (chosen == e).nonzero().squeeze(-1)
        out = out.index_copy(0, rows, expert(e, x[rows]))
    return out


def by_selected_numbers(x):
    out, chosen = torch.empty_like(x), choice(x)
    for e in range(EXPERTS):
        rows = torch.nonzero(chosen == e, as_tuple=True)[0]
        out[rows] = expert(e, x.index_select(0, rows))
    return out


def added(x):
    out = torch.zeros_like(x)
    weights, experts = best(x)
    for e in range(EXPERTS):
        rows, slot = torch.where(experts == e)
        out.index_add_(0, rows, expert(e, x[rows]) * weights[rows, slot, None])
    return out


def put_with_accumulation(x):
    out = torch.zeros_like(x)
    weights, experts = best(x)
    for e in range(EXPERTS):
        rows, slot = torch.where(experts == e)
        out = out.index_put((rows,), expert(e, x[rows]) * weights[rows, slot].unsqueeze(-1), accumulate=True)
    return out


def rows_last(x):
    """The mask is (slots, rows), as in the first Mixtral of transformers."""
    out = torch.zeros_like(x)
    weights, experts = best(x)
    mask = F.one_hot(experts, EXPERTS).permute(2, 1, 0)
    for e in range(EXPERTS):
        slot, rows = torch.where(mask[e])
        state = x[None, rows].reshape(-1, FEATURES)
        out.index_add_(0, rows, expert(e, state) * weights[rows, slot, None])
    return out


PICKS = {
    "by a mask": by_mask,
    "by a mask, with weights": weighted_by_mask,
    "by a mask over flat rows": flat(by_mask),
    "by numbers": flat(by_numbers),
    "by numbers, selected": flat(by_selected_numbers),
    "added": flat(added),
    "put with accumulation": flat(put_with_accumulation),
    "rows last": flat(rows_last),
}


def compare(change, table, **options):
    """Loss and gradients of a padded model, in eager and compiled, and was the table looked up packed?"""
    watch, leaves = Watch(), (table, FIRST, SECOND)

    def step(ids):
        y = change(F.embedding(ids, table))
        return (y.tanh() * (ids != 0)[..., None]).sum()

    options = {"target": "eager", "on_error": "raise", "worth": "always", "verify": "fast", **options}
    compiled = turbogr_compile.compile(step, instruments=[watch], **options)
    for ids in BATCHES:
        found = []
        for run in (step, compiled):
            for leaf in leaves:
                leaf.grad = None
            loss = run(ids)
            loss.backward()
            found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        for mine, its in zip(*found, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)
    return watch.looks_up_packed


@pytest.mark.parametrize("change", PICKS.values(), ids=PICKS)
def test_rows_that_are_picked_and_put_back_are_packed(change, table):
    assert compare(change, table)


def test_in_generated_code(table):
    assert compare(flat(added), table, target="cpu")


def between(change, e=1):
    """One expert, with something between picking and putting back."""

    def body(x):
        rows = torch.where(choice(x) == e)[0]
        return x.index_add(0, rows, change(x, rows))

    return flat(body)


LOOK_ALIKES = {
    "a mean of those that are picked": between(lambda x, rows: x[rows] - x[rows].mean(0)),
    "a mean of those, put everywhere": between(lambda x, rows: x[rows].mean(0, keepdim=True).expand(len(rows), -1)),
    "a softmax over them": between(lambda x, rows: x[rows].softmax(0)),
    "a running sum over them": between(lambda x, rows: x[rows].cumsum(0)),
    "in the opposite order": between(lambda x, rows: x[rows].flip(0)),
    "their neighbours": between(lambda x, rows: torch.cat([x[rows][1:], x[rows][:1]])),
    "the row before": between(lambda x, rows: x[(rows - 1).clamp(min=0)]),
    "what number they have": between(lambda x, rows: x[rows] * rows.unsqueeze(-1)),
    "how many there are, alone": between(lambda x, rows: x[rows] / rows.shape[0]),
    "their own row twice": between(lambda x, rows: (x @ x.T)[rows, rows].unsqueeze(-1) * x[rows]),
    "how many there are": between(lambda x, rows: x[rows] / (1 + rows.shape[0])),
    "all pairs of them": between(lambda x, rows: (x[rows] @ x[rows].T).tanh() @ x[rows]),
    "all rows beside them": between(lambda x, rows: x[rows] + x.mean(0)),
    "their numbers among all": between(lambda x, rows: x[rows] + x.cumsum(0)[rows]),
}


@pytest.mark.parametrize("change", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alikes_are_right(change, table):
    assert not compare(change, table)


def test_dropout_of_picked_rows_is_packed(table):
    watch = Watch()

    def step(ids):
        x = F.embedding(ids, table).flatten(0, 1)
        rows = torch.where(choice(x) == 1)[0]
        y = x.index_add(0, rows, F.dropout(expert(1, x[rows]), 0.5))
        return (y * (ids != 0).flatten()[:, None]).sum()

    turbogr_compile.compile(step, target="eager", worth="always", instruments=[watch])(BATCHES[0]).backward()
    assert watch.looks_up_packed
