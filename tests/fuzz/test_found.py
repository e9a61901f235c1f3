"""Small programs of classes that hostile ones were found in: each gives what eager gives, on batches made to break it.

`packed` is how many of the calls must be served by the packed graph, so that nobody mends a class by refusing it.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
import torch

from .data import Sizes
from .fast import Fast
from .judge import judge
from .program import Line, Program


def program(body: str, *batches: str, seed: int = 7, **sizes: Any) -> Program:
    """From assignments, the last of which is the loss."""
    lines = [Line(ast.unparse(s.targets[0]), ast.unparse(s.value)) for s in ast.parse(body).body]  # type: ignore[attr-defined]
    return Program(tuple(lines), lines[-1].name, (), Sizes(**sizes), batches or ("right", "left", "holes"), seed)


NAN_PADS = {
    # Not finite on pads: where zero is what they are multiplied with, eager gives nan, and so must turbogr.
    "through an op that stays padded": (
        "x = (raw @ Q).index_copy(1, perm[:1], (raw @ Q)[:, :1])\n"
        "loss = F.cross_entropy((x @ W).flatten(0, 1), torch.where(ids != 0, tgt, -100).flatten())",
        1,
    ),
    "through a value that is wanted whole": (
        "x = F.embedding(ids, E) + feats\n"
        "loss = F.cross_entropy((x @ W)[ids != 0], tgt[ids != 0]) + 0 * x.detach().mean().nan_to_num()",
        1,
    ),
    "through rows that are moved": ("loss = ((E[ids] * wts[:, perm][..., None]) * (ids != 0)[..., None]).sum()", 1),
    "in what a padded reader of packed rows multiplies with": (
        "x = F.embedding(ids, E) * maskf.unsqueeze(-1)\n"
        "s = torch.where((ids != 0)[:, None, :], (x @ x.mT) * wts[:, None, :], 1e9)\n"
        "loss = s.max(1).values.mean()",
        1,
    ),
    "of an input with gradients, behind an op that mixes sequences": (
        "x = (feats @ Q).flip(0)\n"
        "p = F.silu(x @ x.mT + torch.where(ids != 0, 0.0, -1e6)[:, None, :])\n"
        "loss = ((p @ x) * (ids != 0)[..., None]).sum()",
        1,
    ),
    "added to scores whose weights are made zero": (
        "x = F.embedding(ids, E)\np = (x @ x.mT + wts[:, None, :]) * (ids != 0)[:, None, :]\n"
        "loss = ((p @ x) * (ids != 0)[..., None]).sum()",
        1,
    ),
    # Replaced before anything is computed from them: nothing spreads, and the batch is packed.
    "replaced by zeros": ("loss = ((raw.masked_fill(~mask[..., None], 0.0) @ Q).relu() * mask[..., None]).sum()", 2),
    "replaced by where": ("loss = (torch.where(mask[..., None], raw, 0.0) @ Q).relu().square().sum()", 2),
    # Replaced too late: the gradient of Q is zero times nan.
    "replaced behind a product": ("loss = torch.where(mask[..., None], raw @ Q, 0.0).square().sum()", 1),
    "replaced here and read there": (
        "loss = (torch.where(mask[..., None], raw, 0.0) @ Q).square().sum() + ((raw @ O) * mask[..., None]).sum()",
        1,
    ),
}


@pytest.mark.parametrize("name", NAN_PADS)
def test_pads_that_are_not_finite(name: str) -> None:
    body, packed = NAN_PADS[name]
    verdict = judge(program(body, "right", "nan-pads"))
    assert (verdict.status, verdict.packed_calls) == ("same", packed), verdict.notes


KEPT_PASSES = {
    "a hidden score over a size that is a number": (
        "N = ids.shape[1]\n"
        "x = F.embedding(ids, E) * (ids > 0)[..., None]\n"
        "p = F.silu(torch.where(tri[:N, :N] & (ids != 0)[:, None, :], (x @ Q) @ x.mT, -1e9)) / N\n"
        "loss = torch.take_along_dim(x + p @ x, last[:, None, None], 1)[:, 0].square().sum()",
        {"open": True},
    ),
    # Passes that clean up must not ask sizes, nor count again what a mask keeps.
    "two picks by one mask": (
        "x = F.embedding(ids, E) + P\nm = ~(ids == 0)\nloss = F.cross_entropy((x @ W)[m], tgt[m])",
        {"B": 1},
    ),
    "a slice up to a size": ("x = F.embedding(ids, E)[:, :ids.shape[1] - 1] @ Q\nloss = x.sum()", {"open": True}),
    "a step as large as a size": (
        "x = F.embedding(ids, E)\nloss = F.cross_entropy(x[:, 1::N][:, 0] @ W, label) + x[ids != 0].sum()",
        {"open": True},
    ),
    "columns taken off at both ends": (
        "x = F.embedding(ids, E)\nloss = F.pad(x, (0, 0, -2, -(N - 3))).square().sum() + x[ids != 0].sum()",
        {"open": True},
    ),
    "a size that is a quotient": (
        "x = F.embedding(ids, E) * (ids != 0)[..., None]\np = x.flatten(0, 1)[2::N][:, None]\nloss = (p * x).sum()",
        {"open": True},
    ),
    "queries said twice each, in a batch of one": (
        "v = ids != 0\nx = F.embedding(ids, E) * v[..., None]\nk = F.pad(x, (0, 0, 1, 0))[:, :-1]\n"
        "p = (x.repeat_interleave(2, 1) @ k.mT).sigmoid() * F.pad(v, (1, 0))[:, :-1][:, None]\n"
        "loss = (p @ k * v.repeat_interleave(2, 1)[..., None]).square().sum()",
        {"B": 1},
    ),
    "columns made of one": (
        "x = F.embedding(ids, E)\ny = torch.tanh(x[:, :1] @ Q).repeat_interleave(N, 1)\n"
        "loss = (y * x * (ids != 0)[..., None]).square().sum()",
        {},
    ),
    "columns made of one, which only a sum over rows reads": (
        "x = F.embedding(ids, E)\ny, b = x.repeat_interleave(2, 1), lens[:, None].repeat_interleave(2, 1)\n"
        "p = (y @ Q).mT * b[:, None]\nloss = torch.cat([p @ y, x], 1).sum()",
        {"N": 1, "K": 1},
    ),
    "rows said twice each, which one mask of their sequence hides": (
        "x = F.embedding(ids, E).repeat_interleave(2, 1)\nx = torch.where((ids != 0)[:, 1:2, None], x, 0.0).sum(1)\n"
        "loss = F.cross_entropy(x[:, None].expand(B, N, D).flatten(0, 1) @ W, tgt.flatten())",
        {},
    ),
    "parts of rows said three times each": (
        "x = (F.embedding(ids, E) @ Q).unflatten(-1, (2, -1)).flatten(1, 2).repeat_interleave(3, 1)\n"
        "loss = (torch.where((ids != 0)[:, 1:2, None], x, 0.0) * x.sum(1, keepdim=True)).sum()",
        {},
    ),
    "rows said twice each, told apart again": (
        "x = (F.embedding(ids, E) @ Q).repeat_interleave(2, 1).unflatten(1, (N, 2))\n"
        "loss = (x * (ids != 0)[:, :, None, None]).square().sum()",
        {},
    ),
    "a slice that begins at a negated size": (
        "N = ids.shape[1]\nx = torch.cat([raw[:, -1:], raw[:, -N:-1]], 1)\n"
        "loss = ((x @ Q).mean(-1) * (ids != 0)).sum()",
        {"open": True},
    ),
    "a type without a sign": (
        "x = F.embedding(ids, E) * mask.double().div(2, rounding_mode='floor')[..., None]\n"
        "x = torch.cat((x + F.relu(x @ Q)).split([N - 1, 1], 1)[::-1], 1)\n"
        "loss = ((x * (1 - (~mask).byte())[..., None]) ** 2).mean()",
        {},
    ),
    "a softmax over rows that a triangle hides for some features": (
        "x = F.embedding(ids, E)\na = tri & (ids != 0)[:, None]\n"
        "p = (-torch.cdist(x, x @ Q)).masked_fill(~a, -1e300).softmax(-1).masked_fill(~a, 0.0)\n"
        "loss = (p @ torch.tanh(x @ O))[:, -1].square().sum()",
        {},
    ),
    "rows that a mask keeps, and where they are": (
        "m = ids != 0\nx = F.layer_norm(F.embedding(ids, E), (D,))\nl = F.cross_entropy((x @ W)[m], tgt[m])\n"
        "r = torch.zeros(B, D).index_add(0, m.nonzero()[:, 0], x[m])\nloss = l + r.square().sum()",
        {},
    ),
    "rows that are picked, and the weights of others beside them": (
        "x = F.embedding(ids, E)\nx = (lambda c: x.index_put((c,), (x[c] @ Q).tanh()))(x @ w > 0)\n"
        "c = F.embedding(label, E2)\ns = (x @ c.unsqueeze(-1)).squeeze(-1)\n"
        "o = (torch.where(mask, s, float('-inf')).softmax(-1).unsqueeze(1) @ x).expand(B, N, D)\n"
        "loss = F.cross_entropy((o @ W)[:, :-1].flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=0)",
        {},
    ),
    "a product that broadcasts its bias": (
        "x = (F.embedding(ids, E) @ Q) * (ids != 0)[..., None]\n"
        "loss = torch.baddbmm(torch.zeros(1, 1, 1), x, x.mT).tanh().sum()",
        {"open": True},
    ),
}


@pytest.mark.parametrize("name", KEPT_PASSES)
def test_no_pass_is_dropped(name: str) -> None:
    body, sizes = KEPT_PASSES[name]
    batches = ("right", "holes", *(("wide", "narrow") if "open" in sizes else ()))
    assert judge(program(body, *batches, **sizes)).status == "same"


@pytest.mark.parametrize("weights", ["p.softmax(1)", "F.silu(q @ q.mT) * (m / m)[..., None]"])
def test_what_is_not_finite_is_selected_away(weights: str) -> None:
    """Weights, or factors of queries, that are NaN for queries which are left out: eager takes zeros instead."""
    body = (
        "m = (maski == 1)[:, None]\nx = torch.tanh(F.embedding(ids, E) + P)\n"
        "q = (x @ Q).reshape(B, N, H, D // H).transpose(1, 2)\n"
        f"p = (q @ q.mT).masked_fill(~m[..., None], -torch.inf)\np = ({weights}).masked_fill(~m[..., None], 0.0)\n"
        "loss = (p @ q).transpose(1, 2).reshape(B, N, D).gather(1, idx[..., None].expand(B, K, D)).sum()"
    )
    verdict = judge(program(body, "right", "left", "late", "masked-out", "holes", "stray"))
    assert verdict.status in ("same", "assumed") and verdict.packed_calls >= 2, verdict.notes


@pytest.mark.parametrize("batch", ["right", "one-each", "left"])
def test_columns_that_only_a_result_has(batch: str) -> None:
    """A one-hot matrix whose classes are columns: rows of it that are also picked otherwise are one number each."""
    body = (
        "x = F.embedding(ids, E)\np = (x @ x.mT).masked_fill((maski != 1)[:, None], -1e9).softmax(-1)\n"
        "o = (p @ x)[..., None].sum(-1)\nloss = (F.one_hot(last, N).double()[:, None] @ o).square().sum()"
    )
    verdict = judge(program(body, batch))
    assert verdict.status == "same" and verdict.packed_calls == 1, verdict.notes


CANCELLED = {
    # What a softmax cancels has a gradient of zero, not none: the judge tells the two apart.
    "a number added to all scores": "s = x @ x.mT + sink[0]",
    "a number of each query": "s = x @ x.mT + (x @ w)[..., None]",
    "scores times zero": "s = (x @ Q) @ x.mT * 0.0",
    # … and none where no gradient comes back.
    "zeros in the shape of something": "s = x @ x.mT + torch.zeros_like(x @ Q)[..., :1]",
    "several things": "s = x @ x.mT + torch.zeros_like(x @ Q)[..., :1] + sink[0] + (x @ w)[..., None]",
}


@pytest.mark.parametrize("name", CANCELLED)
def test_what_cancels_has_a_gradient(name: str) -> None:
    rest = "loss = (s.masked_fill((ids == 0)[:, None], -1e9).softmax(-1) @ x * (ids != 0)[..., None]).sum()"
    verdict = judge(program(f"x = F.embedding(ids, E)\n{CANCELLED[name]}\n{rest}"))
    assert (verdict.status, verdict.packed_calls) == ("same", 3), verdict.notes


OUT_OF_RANGE = {
    # On a row that nobody reads; eager raises all the same.
    "a class": "loss = (F.cross_entropy(l.flatten(0, 1), tgt.flatten(), reduction='none') * v.flatten()).sum()",
    "a class beside ignored ones": "loss = (F.cross_entropy(l.mT, lab, reduction='none') * v).sum()",
    "a class of log-probabilities": "loss = (F.nll_loss(l.log_softmax(-1).mT, tgt, reduction='none') * v).sum()",
    "a class that is picked": "loss = (l.log_softmax(-1).gather(-1, tgt[..., None])[..., 0] * v).sum()",
    "a row of a table": "loss = ((l @ W.T * F.embedding(tgt, E2)).sum(-1) * v).sum()",
}


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_eager_raises(name: str) -> None:
    made = program(f"v = ids != 0\nl = F.embedding(ids, E) @ W\n{OUT_OF_RANGE[name]}", "right", "left", "bad-target")
    verdict = judge(made)
    assert (verdict.status, verdict.packed_calls) == ("same", 2) and verdict.agreed["both raise"], verdict.notes


@pytest.mark.parametrize("pieces", [2, 3, 4, 5, 6])
def test_a_piece_all_of_whose_rows_are_read(pieces: int) -> None:
    """Whoever reads all rows of one piece of a split reads pads of what was split."""
    read = f"x.chunk({pieces}, 1)[-1][:, 0].sum() + x[ids != 0].pow(2).sum()"
    body = f"x = torch.tanh(F.embedding(ids, E))\nloss = {read}"
    assert judge(program(body)).status == "same"


COUNTED = {
    "hits of a sequence": "((x @ w > 0) & v).sum(1)",
    "hits of all": "((x @ w > 0) & v).sum()",
    "small numbers": "((x @ w).long() * v).int().sum(1)",
    "hits of features too": "((x > 0) & v[..., None]).sum((1, 2))",
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_counted_beside_the_loss(name: str) -> None:
    body = f"v = ids != 0\nx = torch.tanh(F.embedding(ids, E))\nmetric = {COUNTED[name]}\nloss = x[v].sum()"
    verdict = judge(replace(program(body), outputs=("metric",)))
    assert (verdict.status, verdict.packed_calls) == ("same", 3), verdict.notes


UNUSUAL = {
    # What programs rarely write: each was wrong, without a word, or raised.
    "a mean of numbers whose sum a half type lacks": "((x.half() + 30000) * v[..., None]).mean(1).double()",
    "a mean of all, which a half type has": "((x.half() + 30000) * v[..., None]).mean().double()",
    "a mean over rows and features": "((x.half() + 30000) * v[..., None].half()).mean((1, 2)).double()",
    "a norm of squares that a half type lacks": (
        "F.instance_norm((x * 500).half().permute(2, 0, 1)[None]).double()[0].permute(1, 2, 0) * gain * v[..., None]"
    ),
    "a product that only alpha makes small enough": (
        "torch.baddbmm(x.half(), (x * 300).half(), (Q * 300).half().expand(B, D, D), alpha=1e-2) * v[..., None] * 1.0"
    ),
    "a product that a half type holds beside what it is added to": (
        "torch.baddbmm(x.half() * 0 - 60000, x.half() * 0 + 200, (Q.half() * 0 + 87).expand(B, D, D))"
        " * v[..., None] / 100"
    ),
    "numbers put beside others, whose sum a half type lacks": (
        "torch.index_put(-(h := (x * 0 + 40000).half()), (torch.tensor([0, 0]),), h[:2], accumulate=True).double()"
        " * v[..., None] / 1e4"
    ),
    "weights that a half type holds, and their products it does not": (
        "torch.einsum('bn,bnd->bd', (v / 3e4).half(), (x * 1e-2).half()).double() * 1e4"
    ),
    "every other feature beside rows": (
        "F.conv2d(torch.stack([x, x @ Q], -1).transpose(1, 2), Q[:, :, None, None], stride=(1, 2))"
        " * torch.ones(2) * v[:, None, :, None]"
    ),
    "features padded beside rows": (
        "F.conv2d(x.mT[..., None], Q[:, :, None, None], off, padding=(0, 1)) * v[:, None, :, None]"
    ),
    "signs of zeros behind a norm": (
        "torch.copysign(off, F.layer_norm(x * v[..., None] * -1, (D,))) + x * v[..., None]"
    ),
    "signs of zeros behind a norm without a mean": (
        "torch.copysign(off, F.rms_norm(x * v[..., None] * -1, (D,))) + x * v[..., None]"
    ),
    "signs of zeros between two of them": (
        "torch.copysign(off, torch.lerp(y := x * v[..., None] * -1, y * 2, 0.5)) + x * v[..., None]"
    ),
    "an einsum whose table has T": "torch.einsum('bnd,Td->bn', x, E) * v",
    "an einsum whose features are T": "torch.einsum('bnT,Te->bne', x, Q) * v[..., None]",
    "an einsum that pools T": "torch.einsum('bnT,bn->bT', x @ Q, v.double())",
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_rarely_written(name: str) -> None:
    body = f"v = ids != 0\nx = F.embedding(ids, E)\nloss = ({UNUSUAL[name]}).sum()"
    verdict = judge(program(body, "right", "left", "holes", "full"))
    assert verdict.status in ("same", "rounding") and verdict.packed_calls == 4, verdict.notes


ATTENDED = {
    # What an attention is computed from, spelled as few do: each was wrong, without a word, or lost a pass. How many of
    # four batches are packed.
    "a sum without gradients": ("e = (x @ x.mT).exp() * v[:, None]\np = e / e.sum(-1, keepdim=True).detach()", 4),
    "positions that a byte cannot be compared with": (
        "c = torch.arange(N, dtype=torch.uint8)\np = (x @ x.mT).masked_fill(~v[:, None] | ~(c > -1), -1e9).softmax(-1)",
        0,
    ),
    "products of one feature with all": (
        "s = torch.einsum('bqd,bkd->bqk', x[..., :1], x)\np = s.masked_fill(~v[:, None], -1e9).softmax(-1)",
        4,
    ),
    "products of all features with one": (
        "s = torch.einsum('bqd,bkd->bqk', x, x[..., :1])\np = s.masked_fill(~v[:, None], -1e9).softmax(-1)",
        4,
    ),
    "a head whose weights are zero": (
        "x = x.unflatten(-1, (H, D // H)).transpose(1, 2)\n"
        "p = (x @ x.mT).masked_fill(~v[:, None, None], -1e9).softmax(-1) * (torch.arange(H) >= 1)[:, None, None]\n"
        "v = v[:, None]",
        4,
    ),
    "queries that one head leaves out": (
        "x = x.unflatten(-1, (H, D // H)).transpose(1, 2)\nv = v[:, None]\n"
        "s = (x @ x.mT).masked_fill((torch.arange(H) >= 1)[:, None, None] & ~v[..., None], -1e9)\n"
        "p = F.silu(s) * v[:, :, None]",
        4,
    ),
    "two whole numbers that are one as floats": (
        f"i = ids + {2**53}\nh = (i == {2**53}) | (i == {2**53 + 1})\n"
        "p = (x @ x.mT).masked_fill(h[:, None], -1e9).softmax(-1)",
        4,
    ),
    "whole numbers that are rounded where they are compared": (
        f"i = ids + {2**53}\np = (x @ x.mT).masked_fill((i == {2**53}.0)[:, None], -1e9).softmax(-1)",
        4,
    ),
}


BROADCAST = {
    # One of the operands of an attention is the same for all sequences, or for all heads.
    "queries": "F.scaled_dot_product_attention(x[:1, None], x[:, None], x[:, None], v[:, None, None])[:, 0]",
    "queries, of a lower rank": "F.scaled_dot_product_attention(x[:1], x[:, None], x[:, None], v[:, None, None])[:, 0]",
    "keys and values": "F.scaled_dot_product_attention(x[:, None], x[0], x[0], v[:1, None, None])[:, 0]",
    "queries of heads": "F.scaled_dot_product_attention(x[:, None], h, h, v[:, None, None]).sum(1)",
}


@pytest.mark.parametrize("name", BROADCAST)
def test_attention_that_is_broadcast(name: str) -> None:
    body = f"v = ids != 0\nx = F.embedding(ids, E)\nh = torch.stack([x, x @ Q], 1)\no = {BROADCAST[name]}"
    verdict = judge(
        program(f"{body}\nloss = ((o + x) * v[..., None]).square().sum()", "right", "left", "holes", "full")
    )
    assert (verdict.status, verdict.packed_calls) == ("same", 4), verdict.notes


@pytest.mark.parametrize("name", ATTENDED)
def test_attention_that_is_rarely_written(name: str) -> None:
    body, packed = ATTENDED[name]
    rest = "loss = (p @ x * v[..., None]).square().sum()"
    verdict = judge(program(f"v = ids != 0\nx = F.embedding(ids, E)\n{body}\n{rest}", "right", "left", "holes", "full"))
    assert (verdict.status, verdict.packed_calls) == ("same", packed), verdict.notes


PLANTED = {
    # Each was written for a fault in a rule that no other program noticed.
    "features that become rows of a finer space": (
        "m = (neg[..., :2].flatten(1) > 2) & v.repeat_interleave(2, 1)\nx = F.linear(x, O, off)\n"
        "y = (x.view(B, 2 * N, D // 2).tanh() + 1) * m[..., None]\n"
        "loss = y.square().sum() + ((x @ Q) * v[..., None]).square().sum()",
        {},
    ),
    "features that become rows, the inner ones first": (
        "m = (neg[..., :2].flatten(1) > 2) & v.repeat_interleave(2, 1)\nx = F.linear(x, torch.cat([O, Q[:2]]))\n"
        "y = (x.view(B, N, 3, 2).transpose(2, 3).flatten(1, 2).tanh() + 1) * m[..., None]\n"
        "loss = y.square().sum() + ((x[..., :D] @ Q) * v[..., None]).square().sum()",
        {},
    ),
    "windows over columns whose channels are rows": (
        "y = F.conv1d((x @ w)[:, None], E2[:M, None, :3], padding=1)\n"
        "loss = ((y + 1) * (cids != 0)[..., None]).square().sum() + x[:, 0].sum()",
        {"M": 6},
    ),
    "dummies among losses with weights": (
        "loss = (F.cross_entropy((x @ W).mT, tgt, reduction='none') * wts).sum() + ((x @ Q) * v[..., None]).sum()",
        {"capacity": 8},
    ),
    "dummies among counted rows": (
        "loss = ((x @ w > 0).long() * v.long()).sum() * x[:, 0].sum() + ((x @ w) * v).sum()",
        {"capacity": 8},
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_planted_faults_made_wrong(name: str) -> None:
    body, more = PLANTED[name]
    options = {"capacity": more["capacity"]} if "capacity" in more else {}
    sizes = {k: v for k, v in more.items() if k not in options}
    verdict = judge(
        program(f"v = ids != 0\nx = F.embedding(ids, E)\n{body}", "right", "left", "holes", **sizes), **options
    )
    assert (verdict.status, verdict.packed_calls) == ("same", 3), verdict.notes


def test_factors_of_other_rows_are_finite() -> None:
    """A factor of scores is read at the next row, where its input may be no number, for a key that is hidden."""
    body = (
        "v = ids != 0\nx = F.embedding(ids, E)\ns = (x @ x[:, :-1].mT) * (raw @ w).sigmoid()[:, None, 1:]\n"
        "y = x + F.silu(s).masked_fill(~v[:, None, 1:], 0.0) @ x[:, :-1]\nloss = (y * v[..., None]).square().sum()"
    )
    verdict = judge(program(body, "right", "nan-pads"))
    assert (verdict.status, verdict.packed_calls) == ("same", 1), verdict.notes


@pytest.mark.parametrize("kind", ["bool", "int64", "float64"])
def test_lengths_that_grow_by_one_are_no_triangle(kind: str) -> None:
    """The first batch makes a mask that looks like one of positions; those that follow do not."""
    columns = torch.arange(6)
    masks = [(columns < torch.tensor(lengths)[:, None]).to(getattr(torch, kind)) for lengths in ([1, 2, 3], [5, 1, 6])]
    table = torch.randn(9, 4, requires_grad=True)

    def step(mask: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return (table[columns.expand(3, 6)].tanh() * mask[..., None]).sum()

    compiled = Fast(step, ["mask", "table"], [masks[0], table])
    for mask in masks:
        torch.testing.assert_close(compiled.run(mask, table), step(mask, table))
    assert compiled.stats.calls == 2 and not compiled.stats.fallbacks


REPEATED = {
    "for each row": "(z[:, :, None, None] @ Q.expand(B, N, 1, D, D)).flatten(2)",
    "for each column": "(z.transpose(0, 1) @ Q.expand(N, D, D)).transpose(0, 1)",
    "for each sequence": "torch.bmm(z, Q.repeat(B, 1, 1))",
    "for each row and head": "(z[:, :, None, None] @ torch.stack([Q, O]).expand(B, N, 2, D, D)).flatten(3).sum(2)",
    "from other rows": "(z[:, :, None] @ F.embedding(cids, E2)[:, :1, :, None].expand(B, N, D, D)).squeeze(2)",
}


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("sizes", [{}, {"B": 1}, {"B": 4, "N": 4, "D": 4}])
def test_matrices_repeated_for_rows(name: str, sizes: dict[str, int]) -> None:
    """Every repetition is the same, those for pads included; and the first row may be a pad."""
    body = (
        f"z = torch.tanh(F.embedding(ids, E))\no = {REPEATED[name]}\nloss = (o * (ids != 0)[..., None]).square().sum()"
    )
    verdict = judge(program(body, "left", "holes", "some-empty", "right", **sizes))
    assert verdict.status == "same" and verdict.packed_calls >= 3, verdict.notes


READ = {
    # Found by reading a rule and asking for its counter-example: wrong without a word.
    "a tensor of one number is no number": (
        "loss = (((x @ w * 100).to(torch.int8) < torch.full((1,), 300)) * (x @ w) * v).sum()"
    ),
    "whole numbers in pads of rows that a float lacks": (
        "u = torch.constant_pad_nd((x @ w * 10).long() + 2**53, (1, 0), 2**53 + 1)[:, :-1]\n"
        "loss = (((u ^ ids) & 7) * (x @ w) * v).sum()"
    ),
    "a product that a half type lacks, and has with what it is added to": (
        "y = (x * 0 + 18).half()\nz = torch.baddbmm(y[..., :1] - 10000, y, torch.full((B, D, D), 1000.0).half())\n"
        "loss = (z.double() * (x @ Q) * v[..., None]).sum()"
    ),
    "the same, each row with its matrix": (
        "y = (x * 0 + 18).half().flatten(0, 1)[:, None]\n"
        "z = torch.baddbmm(y[..., :1] - 10000, y, (y.mT * 0 + 1000)).view(B, N, 1)\n"
        "loss = (z.double() * (x @ Q) * v[..., None]).sum()"
    ),
    "a convolution that a half type has with its bias only": (
        "y = F.conv1d((x * 0 + 18).half().mT, torch.full((D, 2, 3), 620.0).half(), torch.full((D,), -20000.0).half(),"
        " padding=1, groups=D // 2).mT\nloss = (y.double() * (x @ Q) * v[..., None]).sum()"
    ),
    "sums that a half type lacks, added to columns": (
        "y = (x * 0 + 20000).half()\nz = torch.scatter_add(y - 50000, 1, torch.zeros_like(y).long()[:, :4], y[:, :4])\n"
        "loss = (z.double() * (x @ Q) * v[..., None]).sum()"
    ),
    "elements that are taken to be unique, and are not": (
        "y = (x[..., 0] * 2).detach().long()\nhit = torch.isin(y, torch.arange(50, 90), assume_unique=True)\n"
        "loss = (x.sum(-1) * hit * v).sum() + ((x @ Q) * v[..., None]).sum()"
    ),
    "a divisor that its upper end makes zero": (
        "y = x.detach()\n"
        "loss = ((y * v[..., None]) / y.clamp(0.5, 0.0)).nan_to_num(1.0, 2.0, 3.0).sum() "
        " + ((x @ Q) * v[..., None]).sum()"
    ),
    "angles of complex zeros, which have signs": (
        "loss = torch.angle(torch.complex(x, -2 * x) * v[..., None]).sum() + ((x @ Q) * v[..., None]).sum()"
    ),
    # A rule failed: right, and slow.
    "truth values reduced over no dims": "loss = (x * torch.any(x > 0, dim=(), keepdim=True) * v[..., None]).sum()",
    "a number without dims among three": (
        "y = x.float()\nloss = (torch.addcmul(y, y, torch.tensor(1.5)) * v[..., None]).sum().double()"
    ),
    "indices of rows behind others": (
        "loss = ((torch.stack([E, E])[torch.arange(2)[:, None, None], ids].tanh() + 1) * v[..., None]).sum()"
    ),
    "heads between parts and their rows": (
        "h = x.unflatten(2, (2, -1)).permute(0, 2, 1, 3)[..., 0]\n"
        "a, b = torch.cat([h.flatten(1), h.flatten(1) * 2], 1).exp().chunk(2, 1)\n"
        "loss = (a.unflatten(1, (2, -1)) * b.unflatten(1, (2, -1)) * v[:, None]).sum()"
    ),
    "a part without rows, of another type": (
        "y = torch.cat([x.new_empty(B, 0, D), x.half().tanh()], 1)\nloss = (y * v[..., None]).sum()"
    ),
    "rows and heads in one dim of a product that is added": (
        "y = torch.stack([x, x * 2], 2).flatten(0, 2).tanh()\n"
        "loss = ((torch.addmm(y[:, :1], y, Q, beta=0.5).unflatten(0, (B, N, 2)) + 1) * v[..., None, None]).sum()"
    ),
    "capital letters after dots": "loss = ((torch.einsum('...D,DA', x, Q) + 1) * v[..., None]).sum()",
}


@pytest.mark.parametrize("name", READ)
def test_what_reading_found(name: str) -> None:
    verdict = judge(program(f"v = ids != 0\nx = F.embedding(ids, E)\n{READ[name]}", "right", "left", "holes", "full"))
    assert verdict.status in ("same", "rounding") and verdict.packed_calls == 4, verdict.notes
    assert not [r for r in verdict.remarks if "rule-failed" in r]


def test_minus_zeros_of_rows_that_are_scattered() -> None:
    """A padded reader of packed rows tells the sign of those among them that are zero."""
    body = (
        "v = ids != 0\nx = F.embedding(ids, E)\nz = x * (ids > 4)[..., None] * -1 * v[..., None]\n"
        "loss = (torch.copysign(torch.ones_like(z), torch.where(v[..., None], z, z * 2)) * x).sum()"
    )
    verdict = judge(program(body, "right", "left", "holes"))
    assert (verdict.status, verdict.packed_calls) == ("same", 3), verdict.notes


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_eight_bits(dtype: torch.dtype) -> None:
    ids, table = torch.tensor([[1, 2, 0, 0]] * 2), torch.randn(4, 3, requires_grad=True)
    codes = torch.arange(24.0).view(2, 4, 3).to(dtype)

    def step(ids: torch.Tensor, table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        return ((torch.nn.functional.embedding(ids, table) * codes.to(table.dtype)) * (ids != 0)[..., None]).sum()

    compiled = Fast(step, ["ids", "table", "codes"], [ids, table, codes])
    torch.testing.assert_close(compiled.run(ids, table, codes), step(ids, table, codes))
    codes[0, 3, 0] = float("nan")
    assert compiled.run(ids, table, codes).isnan() and step(ids, table, codes).isnan()
    assert compiled.stats.calls == 2 and sum(compiled.stats.fallbacks.values()) == 1


def test_open_features_that_are_repeated() -> None:
    features, ids = torch.randn(3, 6, 5, requires_grad=True), torch.tensor([[1, 2, 0, 0, 0, 0]] * 3)

    def step(ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return ((features.tanh().repeat(1, 1, 2) + 1) * (ids != 0)[..., None]).sum()

    compiled = Fast(step, ["ids", "features"], [ids, features], open_dims={"features": (2,)})
    torch.testing.assert_close(compiled.run(ids, features), step(ids, features))
    assert compiled.stats.calls == 1 and not compiled.stats.fallbacks


def test_complex_pads_that_are_not_finite() -> None:
    ids, weight = torch.tensor([[1, 2, 0, 0]] * 2), torch.randn(3, requires_grad=True)

    def step(ids: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ((z * weight).abs() * (ids != 0)[..., None]).sum()

    z = torch.randn(2, 4, 3, dtype=torch.complex64)
    compiled = Fast(step, ["ids", "z", "weight"], [ids, z, weight])
    torch.testing.assert_close(compiled.run(ids, z, weight), step(ids, z, weight))
    assert compiled.run(ids, z.masked_fill((ids == 0)[..., None], float("nan")), weight).isnan()
    assert compiled.stats.calls == 2 and sum(compiled.stats.fallbacks.values()) == 1


CROSSED = {
    # `y` has its rows by part and sequence, `z`, `m` and `mm` by sequence and part: as many, in another order.
    "a product": "(y + 1) * mm",
    "what replaces": "(y + 1).masked_fill(~mm, 0.0)",
    "zeros of both": "(y * kk + z * mm).sin() + 1",
    "zeros behind a norm": "F.layer_norm(y, (D,)) * mm",
    "parts": "torch.cat([y, z], -1) * kk",
    "parts of another order": "torch.stack([y, z], -1) * mm[..., None]",
    "features picked": "y.gather(2, (z > 0).long()) * kk",
    "features written": "y.scatter(2, (z > 0).long(), z) * kk",
    "features added": "y.index_add(2, torch.tensor([0, 1]), z[..., :2]) * kk",
    "added to a product": "torch.addmm(y.flatten(0, 1), z.flatten(0, 1), Q) * kk.flatten(0, 1)",
    "a choice": "torch.where(kk, y, z)",
    "losses": "F.mse_loss(y * kk, z * mm, reduction='none') + 1",
    "an attention": "F.scaled_dot_product_attention(y[:, None], z[:, None], z[:, None], k[:, None, None])[:, 0] * mm",
    "a softmax": "(y @ w).masked_fill(~m, -1e9).softmax(-1)[..., None] * y",
}


@pytest.mark.parametrize("name", CROSSED)
@pytest.mark.parametrize("sizes", [{}, {"B": 6}])
def test_rows_in_another_order(name: str, sizes: dict[str, int]) -> None:
    body = (
        "v = ids != 0\nx = F.embedding(ids, E)\n"
        "g = torch.stack([x, x @ Q], 0) + torch.stack([x * 2, x @ O], 1).transpose(0, 1)\n"
        "y = g.flatten(0, 1)\nz = g.transpose(0, 1).flatten(0, 1)\n"
        "k = torch.stack([v, v], 0).flatten(0, 1)\nkk = k[..., None]\n"
        "m = torch.stack([v, v], 1).flatten(0, 1)\nmm = m[..., None]\n"
        f"loss = ({CROSSED[name]}).square().sum()"
    )
    verdict = judge(program(body, "right", "left", "holes", "full", **sizes))
    assert verdict.status == "same", verdict.notes


def test_rows_repeated_in_two_orders() -> None:
    body = (
        "v = ids != 0\ny = (F.embedding(ids, E) @ Q).repeat(2, 1, 1)\n"
        "loss = ((y + 1) * v.repeat_interleave(2, 0)[..., None]).square().sum()"
    )
    assert judge(program(body)).status == "same"


def test_features_in_another_order() -> None:
    """Rows are packed all the same."""
    body = (
        "v = ids != 0\nx = F.embedding(ids, E)\n"
        "y = (x.unflatten(2, (2, 3)).tanh().flatten(2) + x.unflatten(2, (3, 2)).sin().flatten(2) + 1) * v[..., None]\n"
        "loss = y.square().sum()"
    )
    verdict = judge(program(body, D=6))
    assert (verdict.status, verdict.packed_calls) == ("same", 3), verdict.notes


COUNTED_TABLES = {
    # As many rows as only the batch tells: each lost the pass.
    "how often": "(x * v[..., None]) / torch.bincount(ids.flatten(), minlength=V)[ids][..., None].clamp(min=1)",
    "distinct ids": "(F.embedding((u := ids.unique(return_inverse=True))[0], E) @ Q)[u[1]] * v[..., None]",
    "distinct ids, from the end": (
        "(F.embedding((u := ids.unique(return_inverse=True))[0], E) @ Q)[u[1] - u[0].shape[0]] * v[..., None]"
    ),
}


@pytest.mark.parametrize("name", COUNTED_TABLES)
def test_tables_that_a_batch_makes(name: str) -> None:
    body = f"v = ids != 0\nx = F.embedding(ids, E)\nloss = ({COUNTED_TABLES[name]}).square().sum()"
    verdict = judge(program(body, "right", "left", "holes", "full", "one-each"))
    assert (verdict.status, verdict.packed_calls) == ("same", 5), verdict.notes
