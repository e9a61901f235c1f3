"""fuse-sampling: which spellings of negative sampling it finds, what it says of others, and that numbers stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import turbogr_compile
from turbogr_compile.errors import PipelineError
from turbogr_compile.graph.phases import Role
from turbogr_compile.graph.shapes import real_inputs
from turbogr_compile.graph.text import graph_text
from turbogr_compile.passes.fuse_sampling import FuseSampling
from turbogr_compile.passes.sampling import META
from turbogr_compile.pipeline.instrument import Instrument
from turbogr_compile.testing import run_passes, trace_graph

ops = torch.ops.turbogr
DOT, TOTAL = ops.lookup_dot.default, ops.sampled_loss_total.default
SOFTMAX, PRODUCT = ops.sampled_softmax.default, torch.ops.aten.einsum.default
V, K, D = 11, 4, 8
Q, E, P, N = f"f64[3, 5, {D}]", f"f64[{V}, {D}]", "i64[3, 5]", f"i64[3, 5, {K}]"
BATCH = [Q, E, P, N]
W = "f64[3, 5]"
look_up = F.embedding


def zeros(x):
    return torch.zeros(x.shape[0] * x.shape[1], dtype=torch.long)


def scores(q, e, p, i):
    """Of positives (b, n, 1) and negatives (b, n, k)."""
    return (q * look_up(p, e)).sum(-1, keepdim=True), torch.einsum("bnd,bnkd->bnk", q, look_up(i, e))


def side_by_side(q, e, p, i):
    return torch.cat(scores(q, e, p, i), -1)


def unit(x, eps=1e-6):
    return x / torch.clamp(torch.linalg.norm(x, ord=2, dim=-1, keepdim=True), min=eps)


def dots(q, rows):
    return torch.einsum("bnd,bnkd->bnk", q, rows)


# --- scores: any product of queries with rows of their own is a lookup_dot ---------------------------

SCORES = {
    "einsum": lambda q, e, p, i: dots(q, look_up(i, e)),
    "einsum, other order": lambda q, e, p, i: torch.einsum("bnkd,nbd->knb", look_up(i, e), q.transpose(0, 1)),
    "matmul with a column": lambda q, e, p, i: (look_up(i, e) @ q.unsqueeze(-1)).squeeze(-1),
    "matmul with a row": lambda q, e, p, i: (q.unsqueeze(2) @ look_up(i, e).transpose(-1, -2)).squeeze(2),
    "bmm of flat rows": lambda q, e, p, i: torch.bmm(look_up(i, e).flatten(0, 1), q.flatten(0, 1).unsqueeze(2)),
    "product and sum": lambda q, e, p, i: (q.unsqueeze(2) * look_up(i, e)).sum(-1),
    "query repeated": lambda q, e, p, i: (q.unsqueeze(2).expand(-1, -1, K, -1) * look_up(i, e)).sum(-1),
    "indexed table": lambda q, e, p, i: dots(q, e[i]),
    "negative indices": lambda q, e, p, i: dots(q, e[i - V]),
    "index_select": lambda q, e, p, i: dots(q, e.index_select(0, i.flatten()).view(*i.shape, D)),
    "a number that is whole": lambda q, e, p, i: dots(q, look_up(i, e) * torch.full((), 2.7, dtype=torch.int64)),
    "a number that was rounded": lambda q, e, p, i: dots(q, look_up(i, e) * torch.full((), 0.1).double()),
    "narrow ids": lambda q, e, p, i: dots(q, look_up(i.int(), e)),
    "padding_idx": lambda q, e, p, i: dots(q, look_up(i, e, padding_idx=3)),
    "padding_idx of unit rows": lambda q, e, p, i: dots(q, F.normalize(look_up(i, e, padding_idx=3), dim=-1)),
    "F.normalize": lambda q, e, p, i: dots(F.normalize(q, dim=-1), F.normalize(look_up(i, e), dim=-1)),
    "clamped norm": lambda q, e, p, i: dots(q, unit(look_up(i, e))),
    "clamp that bites": lambda q, e, p, i: dots(q, unit(look_up(i, e), 3.0)),
    "norm without a bound": lambda q, e, p, i: dots(q, (x := look_up(i, e)) / x.norm(dim=-1, keepdim=True)),
    "maximum": lambda q, e, p, i: dots(
        q, (x := look_up(i, e)) / torch.maximum(x.norm(dim=-1, keepdim=True), torch.tensor(2.0, dtype=x.dtype))
    ),
    "root of squares": lambda q, e, p, i: dots(
        q, (x := look_up(i, e)) / x.pow(2).sum(-1, keepdim=True).sqrt().clamp(min=1e-6)
    ),
    "inverse root": lambda q, e, p, i: dots(
        q, (x := look_up(i, e)) * (x * x).sum(-1, keepdim=True).clamp(min=4.0).rsqrt()
    ),
    "cosine similarity": lambda q, e, p, i: F.cosine_similarity(q.unsqueeze(2), look_up(i, e), dim=-1),
    "scaled rows": lambda q, e, p, i: dots(q, look_up(i, e) * D**0.5),
    "unit table": lambda q, e, p, i: dots(q, look_up(i, F.normalize(e, dim=-1))),
    "two dims of negatives": lambda q, e, p, i: torch.einsum("bnd,bnkld->bnkl", q, look_up(i.unflatten(-1, (2, 2)), e)),
    "cat of ids": lambda q, e, p, i: dots(q, look_up(torch.cat([p.unsqueeze(-1), i], -1), e)),
    "cat of rows": lambda q, e, p, i: dots(q, torch.cat([look_up(p, e).unsqueeze(2), look_up(i, e)], 2)),
    "some of the negatives": lambda q, e, p, i: dots(q, look_up(i, e)[:, :, 1:]),
    "rows of the batch, picked": lambda q, e, p, i: dots(q, q.flatten(0, 1)[i]),
    "weighed rows": lambda q, e, p, i: dots(q, look_up(i, e) * (i != 0).unsqueeze(-1)),
    "two queries": lambda q, e, p, i: dots(q, rows := look_up(i, e)) - dots(q.tanh(), rows),
}  # fmt: skip

# --- losses that are one of the op's ------------------------------------------------------------------


def hits(i, p, x, value):
    return torch.where(p.unsqueeze(-1) == i, value, x)


def weighted(q, e, p, i, w):
    """Packed or padded, as the reference of HSTU has it."""
    own, others = scores(F.normalize(q, dim=-1), e, p, i)
    logits = torch.cat([own / 0.05, hits(i, p, others / 0.05, -5e4)], -1)
    return (-F.log_softmax(logits, -1)[..., 0] * w).sum() / w.sum()


def masked(q, e, p, i):
    losses = F.cross_entropy(side_by_side(q, e, p, i).flatten(0, 1), zeros(p), reduction="none")
    return (losses * (p != 0).flatten()).sum() / (p != 0).sum()


def filled(q, e, p, i):
    own, others = scores(q, e, p, i)
    others = others.masked_fill(i == p[..., None], -torch.inf)
    return F.cross_entropy(torch.cat([own, others], -1).flatten(0, 1), zeros(p))


def assigned(q, e, p, i):
    own, others = scores(q, e, p, i)
    others[i == p[..., None]] = torch.finfo(others.dtype).min
    return F.cross_entropy(torch.cat([own, others], -1).flatten(0, 1), zeros(p))


def unit_both(q, e, p, i):
    own = (q * unit(look_up(p, e))).sum(-1, keepdim=True)
    return -F.log_softmax(torch.cat([own, dots(q, unit(look_up(i, e)))], -1) / 0.07, -1)[..., 0].mean()


def learned(q, e, p, i, t):
    own, others = scores(q, e, p, i)
    return F.cross_entropy(torch.cat([own * t.exp(), others * t.exp()], -1).flatten(0, 1), zeros(p))


def bce(q, e, p, i):
    own, others = scores(q, e, p, i)
    return (F.softplus(-own).squeeze(-1) + F.softplus(others).sum(-1)).mean()


def bce_by_sigmoids(q, e, p, i, w):
    own, others = scores(q, e, p, i)
    return (-(F.logsigmoid(own).squeeze(-1) + F.logsigmoid(-others).sum(-1)) * w).sum() / w.sum()


def bce_by_labels(q, e, p, i):
    own, others = scores(q, e, p, i)
    labels = torch.cat([torch.ones_like(own), torch.zeros_like(others)], -1)
    return F.binary_cross_entropy_with_logits(torch.cat([own, others], -1), labels)


def bce_of_parts(q, e, p, i):
    own, others = scores(q, e, p, i)
    first = F.binary_cross_entropy_with_logits(own, torch.ones_like(own), reduction="none").sum(-1)
    return (
        first + F.binary_cross_entropy_with_logits(others, torch.zeros_like(others), reduction="none").sum(-1)
    ).sum()


def together(q, e, p, i):
    logits = dots(q, look_up(torch.cat([p.unsqueeze(-1), i], -1), e)) / 0.1
    return F.cross_entropy(logits.flatten(0, 1), zeros(p))


def log_sum(q, e, p, i):
    own, others = scores(q, e, p, i)
    return (torch.cat([own, others], -1).logsumexp(-1) - own.squeeze(-1)).sum()


def log_sum_apart(q, e, p, i):
    own, others = (x.squeeze(-1) for x in scores(q, e, p, i))
    return (torch.logaddexp(own, others.logsumexp(-1)) - own).mean()


def first_column(q, e, p, i):
    logits = side_by_side(q, e, p, i)
    return (logits.logsumexp(-1) - logits[..., 0]).sum()


def positive_last(q, e, p, i):
    own, others = scores(q, e, p, i)
    return F.cross_entropy(torch.cat([others, own], -1).flatten(0, 1), torch.full_like(zeros(p), K))


TOTALS = {
    "weighted log-softmax, hits masked": (weighted, [*BATCH, W]),
    "cross_entropy": (lambda q, e, p, i: F.cross_entropy(side_by_side(q, e, p, i).flatten(0, 1), zeros(p)), BATCH),
    "temperature behind cat": (
        lambda q, e, p, i: F.cross_entropy(side_by_side(q, e, p, i).flatten(0, 1) / 0.07, zeros(p), reduction="sum"),
        BATCH,
    ),
    "nll_loss": (
        lambda q, e, p, i: F.nll_loss(F.log_softmax(side_by_side(q, e, p, i), -1).flatten(0, 1), zeros(p)), BATCH,
    ),
    "masked mean": (masked, BATCH),
    "hits at minus infinity": (filled, BATCH),
    "hits assigned": (assigned, BATCH),
    "unit rows": (unit_both, BATCH),
    "learned temperature": (learned, [*BATCH, "f64[]"]),
    "log_sum_exp": (log_sum, BATCH),
    "logaddexp": (log_sum_apart, BATCH),
    "first column": (first_column, BATCH),
    "positive last": (positive_last, BATCH),
    "looked up together": (together, BATCH),
    "bce": (bce, BATCH),
    "bce by log-sigmoids": (bce_by_sigmoids, [*BATCH, W]),
    "bce by labels": (bce_by_labels, BATCH),
    "bce of parts": (bce_of_parts, BATCH),
}  # fmt: skip

# --- losses that stay as they are written, on fused scores --------------------------------------------


def gbce(q, e, p, i):
    """Generalised BCE: the positive's logit is bent by beta."""
    own, others = scores(q, e, p, i)
    beta = 0.75
    prob = own.sigmoid().clamp(1e-10, 1 - 1e-10)
    own = torch.log(prob**beta / (1 - prob**beta).clamp_min(1e-10))
    logits, labels = torch.cat([own, others], -1), torch.cat([torch.ones_like(own), torch.zeros_like(others)], -1)
    return F.binary_cross_entropy_with_logits(logits, labels)


def mean_of_parts(q, e, p, i):
    own, others = scores(q, e, p, i)
    with_logits = F.binary_cross_entropy_with_logits
    return with_logits(own, torch.ones_like(own)) + with_logits(others, torch.zeros_like(others))


def from_outside(q, e, p, i):
    logits = torch.cat([(q * p).sum(-1, keepdim=True), dots(q, look_up(i, e))], -1)
    return -F.log_softmax(logits, -1)[..., 0].mean()


def margin(q, e, p, i):
    own, others = scores(q, e, p, i)
    return F.relu(1 - own + others).mean()


def bpr(q, e, p, i):
    own, others = scores(q, e, p, i)
    return -F.logsigmoid(own - others).mean()


def seen_masked(q, e, p, i):
    own, others = scores(q, e, p, i)
    others = others.masked_fill(i == 0, -1e9)
    return F.cross_entropy(torch.cat([own, others], -1).flatten(0, 1), zeros(p))


def two_temperatures(q, e, p, i):
    own, others = scores(q, e, p, i)
    return F.cross_entropy(torch.cat([own, others / 2], -1).flatten(0, 1), zeros(p))


def two_tables(q, e, p, i, f):
    logits = torch.cat([(q * look_up(p, f)).sum(-1, keepdim=True), dots(q, look_up(i, e))], -1)
    return F.cross_entropy(logits.flatten(0, 1), zeros(p))


def two_queries(q, e, p, i):
    logits = torch.cat([(q.tanh() * look_up(p, e)).sum(-1, keepdim=True), dots(q, look_up(i, e))], -1)
    return F.cross_entropy(logits.flatten(0, 1), zeros(p))


def padding(q, e, p, i):
    own = (q * look_up(p, e, padding_idx=0)).sum(-1, keepdim=True)
    return F.cross_entropy(torch.cat([own, dots(q, look_up(i, e, padding_idx=0))], -1).flatten(0, 1), zeros(p))


def watched(q, e, p, i):
    own, others = scores(q, e, p, i)
    return F.cross_entropy(torch.cat([own, others], -1).flatten(0, 1), zeros(p)) + others.square().mean()


def other_target(q, e, p, i):
    return F.cross_entropy(side_by_side(q, e, p, i).flatten(0, 1), p.flatten() % K)


def positive_masked(q, e, p, i):
    """In the numerator alone."""
    own, others = scores(q, e, p, i)
    return (torch.cat([own, others], -1).logsumexp(-1) - own.squeeze(-1).masked_fill(p > 5, 0.0)).sum()


def temperature_twice(q, e, p, i, t):
    own, others = scores(q, e, p, i)
    return F.cross_entropy(torch.cat([own * t * t, others * t], -1).flatten(0, 1), zeros(p))


def query_turned(q, e, p, i):
    """The numbers of one query, in other vectors."""
    own, others = (q * look_up(p, e)).sum(-1, keepdim=True), torch.einsum("bdn,bnkd->bnk", q, look_up(i, e))
    return F.cross_entropy(torch.cat([own, others], -1).flatten(0, 1), zeros(p))


def two_labels(q, e, p, i):
    both = side_by_side(q, e, p, i)
    labels = torch.cat([torch.ones_like(both[..., :2]), torch.zeros_like(both[..., 2:])], -1)
    return F.binary_cross_entropy_with_logits(both, labels)


KEPT = {  # name: function, inputs, remark that says why, '' where the loss is none that the op knows
    "gbce": (gbce, BATCH, ""),
    "means of parts": (mean_of_parts, BATCH, ""),
    "margin": (margin, BATCH, ""),
    "bpr": (bpr, BATCH, ""),
    "other target": (other_target, BATCH, ""),
    "each loss": (lambda *a: -F.log_softmax(side_by_side(*a), -1)[..., 0], BATCH, "sampling-of-rows"),
    "positive from outside": (from_outside, [Q, E, Q, N], "sampling-positive"),
    "different temperatures": (two_temperatures, BATCH, "sampling-positive"),
    "different tables": (two_tables, [*BATCH, E], "sampling-positive"),
    "different queries": (two_queries, BATCH, "sampling-positive"),
    "positive masked": (positive_masked, BATCH, ""),
    "a temperature twice": (temperature_twice, [*BATCH, "f64[]"], "sampling-positive"),
    "a query turned": (
        query_turned,
        [f"f64[3, {D}, {D}]", E, f"i64[3, {D}]", f"i64[3, {D}, {K}]"],
        "sampling-positive",
    ),
    "two positives by labels": (two_labels, BATCH, ""),
    "other mask": (seen_masked, BATCH, "sampling-mask"),
    "padding_idx": (padding, BATCH, "sampling-padding"),
    "scores read elsewhere": (watched, BATCH, "sampling-read-elsewhere"),
}

# --- shared rows: a matrix product --------------------------------------------------------------------

SHARED = {
    "product and sum": (lambda q, e, i: (q.unsqueeze(2) * look_up(i, e)).sum(-1), [Q, E, f"i64[{K}]"]),
    "ids repeated": (lambda q, e, i: dots(q, look_up(i.expand(3, 5, K), e)), [f"f64[3, 5, {D}]", E, f"i64[{K}]"]),
    "rows repeated": (
        lambda q, e, i: torch.bmm(look_up(i, e).expand(3, 5, K, D).reshape(15, K, D), q.reshape(15, D, 1)),
        [f"f64[3, 5, {D}]", E, f"i64[{K}]"],
    ),
    "shared by a sequence": (
        lambda q, e, i: (q.unsqueeze(2) * F.normalize(look_up(i, e, padding_idx=0), dim=-1).unsqueeze(1)).sum(-1),
        [Q, E, f"i64[3, {K}]"],
    ),
    "in the batch": (lambda q, p: (q.unsqueeze(1) * p.unsqueeze(0)).sum(-1), [f"f64[3, {D}]", f"f64[3, {D}]"]),
}


# --- near misses ---------------------------------------------------------------------------------------


def memory(q, e, i):
    """Attention over looked-up rows: keys are values too."""
    rows = look_up(i, e)
    return (dots(q, rows).softmax(-1).unsqueeze(-1) * rows).sum(2)


def neighbours(q, e, i):
    """Rows of neighbours are returned beside their scores."""
    rows = look_up(i, e)
    return dots(q, rows), rows


MISSES = {
    "attention over rows": (memory, [Q, E, N], "rows-used-elsewhere"),
    "returned": (neighbours, [Q, E, N], "rows-used-elsewhere"),
    "projected rows": (
        lambda q, e, i, w: dots(q, F.linear(look_up(i, e), w)), [Q, E, N, f"f64[{D}, {D}]"], "rows-changed",
    ),
    "eps added": (lambda q, e, i: dots(q, (x := look_up(i, e)) / (x.norm(dim=-1, keepdim=True) + 1e-6)), [Q, E, N],
                  "rows-changed"),
    "eps under the root": (
        lambda q, e, i: dots(q, (x := look_up(i, e)) * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()), [Q, E, N],
        "rows-changed",
    ),
    "scaled, then normalised": (lambda q, e, i: dots(q, F.normalize(look_up(i, e) * 2.0, dim=-1)), [Q, E, N],
                                "rows-changed"),
    "one norm": (lambda q, e, i: dots(q, F.normalize(look_up(i, e), p=1.0, dim=-1)), [Q, E, N], "rows-changed"),
    "sparse gradient": (lambda q, e, i: dots(q, look_up(i, e, sparse=True)), [Q, E, N], "table-gradient"),
    "gradient by frequency": (
        lambda q, e, i: dots(q, look_up(i, e, scale_grad_by_freq=True)), [Q, E, N], "table-gradient",
    ),
    "max_norm": (lambda q, e, i: dots(q, look_up(i, e.clone(), max_norm=1.0)), [Q, E, N], "table-gradient"),
    "16 bits": (lambda q, e, i: dots(q.half(), look_up(i, e.half())), [Q, E, N], "sampling-half"),
    "narrowed": (lambda q, e, i: dots(q.float(), look_up(i, e).float()), [Q, E, N], "rows-cast"),
    "two tables side by side": (
        lambda q, e, i, f: dots(q, torch.cat([look_up(i, e), look_up(i, f)], 2)), [Q, E, N, E], "rows-differ",
    ),
}  # fmt: skip

ALONE = {
    "one number for a whole row": lambda q, e, i: (look_up(i, e) * q[..., :1, None]).sum(-1),
    "rows of one number": lambda q, e, i: torch.einsum("bnd,bnkd->bnk", q, look_up(i, e[:, :1])),
    "one number for a whole row, by letters": lambda q, e, i: dots(q[..., :1], look_up(i, e)),
    "self-attention": lambda q, e, i: q @ look_up(i[..., 0], e).transpose(1, 2),
    "pooled": lambda q, e, i: (look_up(i, e) * q.unsqueeze(2)).sum(2),
    "one row for each query": lambda q, e, i: (q * look_up(i[..., 0], e)).sum(-1),
    "whole table": lambda q, e, i: F.linear(q, e) + i.sum(),
    "shared, as a product": lambda q, e, i: q @ look_up(i[0, 0], e).T,
}


# --- the machinery ---------------------------------------------------------------------------------------


def fused(fn, inputs, **options):
    module = trace_graph(fn, " ".join(inputs))
    mine = FuseSampling(**{"min_numbers": 0, **options})
    contexts = run_passes(module, ["remove-noops", "fold-views", "eliminate-common", mine, "eliminate-dead-code"])
    module.recompile()
    (context,) = (c for c in contexts if c.pass_ == mine)
    return module, context


def symbolic(inputs):
    """Sizes of batches that the compiler does not know."""
    return [i.replace("[3, 5", "[b=3, n=5") for i in inputs]


def found(module, *targets):
    return [n.target for n in module.graph.nodes if n.target in (targets or (DOT, TOTAL, SOFTMAX))]


def assert_same(module, fn, inputs):
    """Values and gradients, of every result."""
    given = [
        t.requires_grad_() if t.is_floating_point() else t % V
        for t in real_inputs(" ".join(inputs), {"b": 3, "n": 5}, seed=0)
    ]
    leaves = [t for t in given if t.requires_grad]
    results = []
    for call in (module, fn):
        torch.manual_seed(0)
        out = call(*given)
        weights = torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)
        slopes = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True, materialize_grads=True)
        results.append((out, *slopes))
    torch.testing.assert_close(*results, equal_nan=True, rtol=1e-9, atol=1e-9)


def ids_of(context):
    return [r.id for r in context.remarks]


@pytest.mark.parametrize("name", SCORES)
def test_scores_without_rows(name):
    module, context = fused(SCORES[name], BATCH)
    assert set(found(module)) == {DOT}, graph_text(module.graph)
    assert set(ids_of(context)) == {"sampling-scores"}
    assert not any(v == "embedding" for v in _names(module))
    assert_same(module, SCORES[name], BATCH)


LATER = {
    **{n: (SCORES[n], BATCH, DOT) for n in ("einsum, other order", "bmm of flat rows", "padding_idx", "F.normalize")},
    **{n: (*TOTALS[n], TOTAL) for n in ("weighted log-softmax, hits masked", "looked up together", "bce by labels")},
}


@pytest.mark.parametrize("name", LATER)
def test_sizes_known_later(name):
    fn, inputs, op = LATER[name]
    module, _ = fused(fn, symbolic(inputs))
    assert found(module) == [op]
    assert_same(module, fn, symbolic(inputs))


def _names(module):
    return [n.target._schema.name.partition("::")[2] for n in module.graph.nodes if hasattr(n.target, "_schema")]


@pytest.mark.parametrize("name", TOTALS)
def test_whole_losses_become_one_op(name):
    fn, inputs = TOTALS[name]
    module, context = fused(fn, inputs)
    assert found(module) == [TOTAL], graph_text(module.graph)
    assert ids_of(context) == ["sampling-fused"]
    assert not {"embedding", "log_softmax", "cross_entropy_loss", "logsumexp", "eq"} & set(_names(module))
    assert_same(module, fn, inputs)


@pytest.mark.parametrize("name", KEPT)
def test_other_losses_stay_on_fused_scores(name):
    fn, inputs, why = KEPT[name]
    module, context = fused(fn, inputs)
    assert found(module) == [DOT], graph_text(module.graph)
    assert ids_of(context) == ([why] if why else []) + ["sampling-scores"]
    assert_same(module, fn, inputs)


@pytest.mark.parametrize("name", SHARED)
def test_shared_rows_become_a_matrix_product(name):
    fn, inputs = SHARED[name]
    module, context = fused(fn, inputs)
    assert found(module, PRODUCT, DOT) == [PRODUCT] and "mul" not in _names(module)
    assert ids_of(context) == ["sampling-scores"] and "matrix product" in context.remarks[0].text
    assert_same(module, fn, inputs)


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_say_why(name):
    fn, inputs, id = MISSES[name]
    module, context = fused(fn, inputs)
    assert not found(module) and not context.rewrites
    assert ids_of(context) == [id] and context.remarks[0].line is not None


@pytest.mark.parametrize("name", ALONE)
def test_what_is_no_sampling_is_left_alone(name):
    module, context = fused(ALONE[name], [Q, E, N])
    assert not found(module) and not context.rewrites and not context.remarks


# --- ids drawn in the graph: the five idioms of public models, three on packed rows and two on padded ones ---------


def hstu_sampler(x, e, p, w):
    """Packed rows; ids picked from a list, unit rows, hits at -5e4."""
    every = torch.arange(1, V)
    ids = every[torch.randint(low=0, high=V - 1, size=(x.shape[0], K)).view(-1)].reshape(x.shape[0], K)
    own = torch.bmm(unit(look_up(p, e, padding_idx=0)).unsqueeze(1), x.unsqueeze(2)).squeeze(2) / 0.05
    others = torch.bmm(unit(look_up(ids, e, padding_idx=0)), x.unsqueeze(2)).squeeze(2) / 0.05
    others = torch.where(p.unsqueeze(1) == ids, -5e4, others)
    return (-F.log_softmax(torch.cat([own, others], 1), 1)[:, 0] * w).sum() / w.sum()


def packed_cross_entropy(x, e, p, w):
    ids = torch.randint(1, V, (x.shape[0], K), device=x.device)
    logits = torch.cat([torch.einsum("td,td->t", x, look_up(p, e))[:, None],
                        torch.einsum("td,tkd->tk", x, look_up(ids, e))], 1)  # fmt: skip
    return (F.cross_entropy(logits, torch.zeros_like(p), reduction="none") * w).sum() / w.sum()


def packed_sigmoids(x, e, p, w):
    ids = torch.randint_like(p.unsqueeze(1).expand(-1, K), V)
    others = (x.unsqueeze(1) * look_up(ids, e)).sum(-1)
    return -((F.logsigmoid((x * look_up(p, e)).sum(-1)) + F.logsigmoid(-others).sum(-1)) * w).mean()


def padded_softmax(q, e, p, w):
    ids = torch.randint(1, V, (*p.shape, K))
    own = (q * look_up(p, e, padding_idx=0)).sum(-1, keepdim=True)
    others = dots(q, look_up(ids, e, padding_idx=0)).masked_fill(ids == p.unsqueeze(-1), torch.finfo(q.dtype).min)
    losses = -F.log_softmax(torch.cat([own, others], -1), -1)[..., 0]
    return (losses * (p != 0)).sum() / (p != 0).sum() + 0 * w.sum()


def padded_binary(q, e, p, w):
    ids = torch.randint(0, V, (p.shape[0], p.shape[1], K))
    own, others = scores(q, e, p, ids)
    return ((F.softplus(-own).squeeze(-1) + F.softplus(others).sum(-1)) * w).sum() / w.sum()


PACKED = [f"f64[15, {D}]", E, "i64[15]", "f64[15]"]
DRAWN = {
    "hstu": (hstu_sampler, PACKED, DOT, "from a list"),
    "packed, cross_entropy": (packed_cross_entropy, PACKED, TOTAL, "drawn uniformly"),
    "packed, sigmoids": (packed_sigmoids, PACKED, TOTAL, "drawn uniformly"),
    "padded, softmax": (padded_softmax, [Q, E, P, W], TOTAL, "drawn uniformly"),
    "padded, binary": (padded_binary, [Q, E, P, W], TOTAL, "drawn uniformly"),
}


@pytest.mark.parametrize("name", DRAWN)
def test_ids_drawn_in_the_graph(name):
    fn, inputs, op, text = DRAWN[name]
    module, context = fused(fn, inputs)
    assert found(module) == [op], graph_text(module.graph)
    assert f"{K} negatives each for" in (said := context.remarks[-1].text) and text in said
    assert ("hits masked" in said) == ("hstu" in name or "softmax" in name)
    assert_same(module, fn, inputs)


WAYS = {
    "uniform": (lambda e, w: torch.randint(1, V, (15, K)), "uniform", "position"),
    "popularity": (lambda e, w: torch.multinomial(w, 15 * K, replacement=True).view(15, K), "popularity", "position"),
    "rounded": (lambda e, w: (torch.rand(15, K) * V).long(), "uniform", "position"),
    "permutation": (lambda e, w: torch.randperm(V)[:K], "permutation", "shared"),
    "shared": (lambda e, w: torch.randint(0, V, (K,)), "uniform", "shared"),
}


@pytest.mark.parametrize("name", WAYS)
def test_drawings_are_told_to_later_passes(name):
    draw, drawn, per = WAYS[name]

    def fn(q, e, w):
        rows = look_up(draw(e, w), e)
        return torch.einsum("td,tkd->tk", q, rows) if rows.dim() == 3 else q @ rows.T

    module, context = fused(fn, [f"f64[15, {D}]", E, f"f64[{V}]"])
    (meta,) = (n.meta[META] for n in module.graph.nodes if META in n.meta)
    assert (meta["drawn"], meta["per"], meta["count"], meta["hits"]) == (drawn, per, K, False)
    assert meta["draws"] in {n.name for n in module.graph.nodes}
    assert ids_of(context) == ["sampling-scores" if per == "position" else "sampling-shared"]


# --- options --------------------------------------------------------------------------------------------------

GROUPED = ["weighted log-softmax, hits masked", "cross_entropy", "hits at minus infinity", "unit rows", "log_sum_exp",
           "learned temperature", "positive last", "masked mean"]  # fmt: skip


@pytest.mark.parametrize("name", GROUPED)
def test_softmax_of_stored_rows(name):
    fn, inputs = TOTALS[name]
    module, context = fused(fn, inputs, form="rows")
    assert found(module) == [SOFTMAX] and ids_of(context) == ["sampling-fused"]
    assert_same(module, fn, inputs)


def test_stored_rows_need_no_table_for_positives_and_no_sum():
    for name in ("positive from outside", "each loss", "padding_idx", "different tables"):
        fn, inputs, _ = KEPT[name]
        module, _ = fused(fn, inputs, form="rows")
        assert found(module) == [SOFTMAX], name
        assert_same(module, fn, inputs)


def test_stored_rows_say_what_the_kernel_does_not_do():
    for name in ("bce", "looked up together"):
        fn, inputs = TOTALS[name]
        module, context = fused(fn, inputs, form="rows")
        assert not found(module) and ids_of(context) == ["sampling-form"]


def test_small_ones_stay():
    _, context = fused(SCORES["einsum"], BATCH, min_numbers=1000)
    assert ids_of(context) == ["sampling-small"] and not context.rewrites


def test_unknown_form():
    with pytest.raises(PipelineError, match="'form' takes lookup or rows, got 'table'"):
        FuseSampling(form="table")


def test_costs_are_formulas_and_numbers():
    _, context = fused(SCORES["clamped norm"], symbolic(BATCH))
    text = context.remarks[0].text
    assert "512*" in text and "= 7.68 kB → 32*" in text and "FLOP" in text  # rows, and once more normalised
    assert context.savings["bytes"].free_symbols


class _Keep(Instrument):
    """The text of captured graphs, when all passes have run."""

    def __init__(self, graphs):
        self.graphs = graphs

    def finish(self, run):
        if run.role is Role.CAPTURED:
            self.graphs.append(graph_text(run.graph))


# --- whole models, packed and compiled -------------------------------------------------------------------------


class Recommender(nn.Module):
    """A padded model as people write them, with its loss."""

    def __init__(self, draws, detached=False):
        super().__init__()
        torch.manual_seed(0)
        self.items, self.mix = nn.Embedding(50, 16, padding_idx=0), nn.Linear(16, 16)
        self.draws, self.detached = draws, detached

    def forward(self, ids, negatives):
        x = self.items(ids[:, :-1])
        x = x + torch.relu(self.mix(x))
        targets = ids[:, 1:]
        if self.draws:
            negatives = torch.randint(1, 50, (*targets.shape, 8))
        rows = self.items(negatives)
        rows = rows.detach() if self.detached else rows
        own = (x * self.items(targets)).sum(-1, keepdim=True)
        others = torch.einsum("bnd,bnkd->bnk", x, rows).masked_fill(negatives == targets.unsqueeze(-1), -1e9)
        losses = -F.log_softmax(torch.cat([own, others], -1) / 0.1, -1)[..., 0]
        valid = (targets != 0).to(losses.dtype)
        return (losses * valid).sum() / valid.sum()


MODELS = {  # every two of the three choices meet once
    "f32, given, trained": (torch.float32, False, False),
    "f32, drawn, detached": (torch.float32, True, True),
    "f64, given, detached": (torch.float64, False, True),
    "f64, drawn, trained": (torch.float64, True, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_models(name):
    dtype, draws, detached = MODELS[name]
    model = Recommender(draws, detached).to(dtype)
    ids = torch.zeros(6, 12, dtype=torch.long)
    for row, length in enumerate([3, 12, 5, 2, 7, 4]):
        ids[row, :length] = torch.randint(1, 50, (length,))
    negatives = torch.randint(0, 50, (6, 11, 8))
    graphs = []
    pipeline = turbogr_compile.Pipeline.of(
        "remove-noops, fold-views, pack-rows, eliminate-common, fuse-sampling{min_numbers=0}, eliminate-dead-code"
    )
    compiled = turbogr_compile.compile(
        model, pipeline=pipeline, on_error="raise", verify="strict", instruments=[_Keep(graphs)]
    )
    results = []
    for call in (compiled, model):
        model.zero_grad()
        torch.manual_seed(1)
        loss = call(ids, negatives)
        loss.backward()
        results.append((loss.detach(), *(p.grad.clone() for p in model.parameters())))
    torch.testing.assert_close(*results)
    op = "sampled_loss_total" if draws and not detached else "lookup_dot"
    assert f"turbogr.{op}(" in graphs[0] and "u0, 8]" in graphs[0] and "u0, 8, 16]" not in graphs[0]
