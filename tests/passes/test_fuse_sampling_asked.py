"""fuse-sampling{share=..., half=true}: what changes results only where it is asked for, against the eager twin."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from turbogr_compile.errors import PipelineError
from turbogr_compile.losses import in_halves, sampled_losses
from turbogr_compile.passes.fuse_sampling import FuseSampling
from turbogr_compile.testing import run_passes, trace_graph

T, V, K, D = 13, 29, 5, 8
OPS = torch.ops.turbogr


def data(dtype=torch.float64, positions=T, size=1.0, table=V):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(positions, D, generator=generator, dtype=dtype).requires_grad_()
    rows = (torch.randn(table, D, generator=generator, dtype=dtype) * size).requires_grad_()
    weights = torch.rand(positions, generator=generator, dtype=dtype)
    own, ids = (torch.randint(0, table, s, generator=generator) for s in ((positions,), (positions, K)))
    ids[0, 0], ids[2, 1] = own[0], own[1]  # a hit of its own, and one that only sharing makes
    return query, rows, own, ids, weights


def spec(dtype="f64", positions="13", table=V):
    return (
        f"{dtype}[{positions}, {D}] {dtype}[{table}, {D}] i64[{positions}] i64[{positions}, {K}] {dtype}[{positions}]"
    )


def scores(q, e, p, i, unit=None):
    norm = (lambda x: x) if unit is None else (lambda x: F.normalize(x, dim=-1, eps=unit))
    return (q * norm(F.embedding(p, e))).sum(-1), torch.einsum("td,tkd->tk", q, norm(F.embedding(i, e)))


def softmax(q, e, p, i, w):
    own, others = scores(q, e, p, i)
    logits = torch.cat([own[:, None], others.masked_fill(i == p[:, None], -1e9)], 1) / 0.5
    return (-F.log_softmax(logits, 1)[:, 0] * w).sum() / w.sum()


def unmasked(q, e, p, i, w):
    own, others = scores(q, e, p, i)
    return (F.cross_entropy(torch.cat([own[:, None], others], 1), torch.zeros_like(p), reduction="none") * w).mean()


def unit_rows(q, e, p, i, w):
    own, others = scores(q, e, p, i, 1e-6)
    logits = torch.cat([own[:, None], torch.where(i == p[:, None], -5e4, others)], 1) / 0.2
    return (-F.log_softmax(logits, 1)[:, 0] * w).sum()


def binary(q, e, p, i, w):
    own, others = scores(q, e, p, i)
    return ((F.softplus(-own) + F.softplus(others).sum(1)) * w).sum()


def together(q, e, p, i, w):
    logits = torch.einsum("td,tkd->tk", q, F.embedding(torch.cat([p[:, None], i], 1), e))
    return (F.cross_entropy(logits, torch.zeros_like(p), reduction="none") * w).sum()


def over_logits(q, e, p, i, w):
    own, others = scores(q, e, p, i)
    labels = torch.cat([torch.ones_like(own)[:, None], torch.zeros_like(others)], 1)
    return F.binary_cross_entropy_with_logits(torch.cat([own[:, None], others], 1), labels) + 0 * w.sum()


def bpr(q, e, p, i, w):
    own, others = scores(q, e, p, i)
    return -(F.logsigmoid(own[:, None] - others).mean(1) * w).sum()


LOSSES = {  # the loss as written, options of its twin, and how losses are added up
    "softmax, hits masked": (softmax, {"temperature": 0.5}, lambda x, w: (x * w).sum() / w.sum()),
    "softmax, hits not masked": (unmasked, {"mask_hits": False}, lambda x, w: (x * w).mean()),
    "unit rows": (unit_rows, {"temperature": 0.2, "normalize_eps": 1e-6}, lambda x, w: (x * w).sum()),
    "looked up together": (together, {"mask_hits": False}, lambda x, w: (x * w).sum()),
    "bce": (binary, {"mask_hits": False, "kind": "bce"}, lambda x, w: (x * w).sum()),
}
STORED = ("softmax, hits masked", "softmax, hits not masked", "unit rows")


def fused(fn, inputs, **options):
    module = trace_graph(fn, inputs)
    mine = FuseSampling(**options)
    contexts = run_passes(module, ["remove-noops", "fold-views", "eliminate-common", mine, "eliminate-dead-code"])
    module.recompile()
    (context,) = (c for c in contexts if c.pass_ == mine)
    return module, context


def with_gradients(call, q, e, *rest):
    out = call(q, e, *rest)
    return (out.detach(), *torch.autograd.grad(out, (q, e)))


def twin(name, **options):
    _, own, add = LOSSES[name]
    return lambda q, e, p, i, w: add(sampled_losses(q, e, p, i, **own, **options), w)


def ids_of(context):
    return [r.id for r in context.remarks]


# --- sharing ---------------------------------------------------------------------------------------------------


def test_the_twin_without_wishes_is_the_loss_as_written():
    given = data()
    for name, (fn, _, _) in LOSSES.items():
        torch.testing.assert_close(with_gradients(twin(name), *given), with_gradients(fn, *given), msg=name)


def test_the_twin_says_what_a_group_is():
    """Position by position: all negatives of its group but its own positive."""
    q, e, p, i, _ = data()
    found = sampled_losses(q, e, p, i, share=4)
    for t in range(T):
        others = i[t // 4 * 4 : t // 4 * 4 + 4].flatten()
        logits = torch.cat([q[t] @ e[p[t]][:, None], q[t] @ e[others[others != p[t]]].T])
        torch.testing.assert_close(found[t], logits.logsumexp(0) - logits[0])


@pytest.mark.parametrize("name", LOSSES)
def test_shared_negatives(name):
    module, context = fused(LOSSES[name][0], spec(positions="t=13"), share=4)
    assert ids_of(context) == ["sampling-fused", "logits-shared"]
    for positions in (13, 12, 3):
        given = data(positions=positions)
        torch.testing.assert_close(with_gradients(module, *given), with_gradients(twin(name, share=4), *given))
        assert not torch.allclose(module(*given), LOSSES[name][0](*given))


@pytest.mark.parametrize("name", STORED)
def test_shared_negatives_of_stored_rows(name):
    module, context = fused(LOSSES[name][0], spec(positions="t=13"), share=4, form="rows")
    assert ids_of(context) == ["sampling-fused", "logits-shared"]
    assert OPS.sampled_softmax.default in {n.target for n in module.graph.nodes}
    for positions in (13, 12, 3):
        given = data(positions=positions)
        torch.testing.assert_close(with_gradients(module, *given), with_gradients(twin(name, share=4), *given))


def test_the_remark_has_the_formula():
    _, context = fused(softmax, spec(positions="t=13"), share=4)
    fuse, share = (r.text for r in context.remarks)
    assert "4*5 = 20 for 5*" in share and "lookups" in share and "another loss" in share
    assert "→ 160*" in fuse and "= 2.08 kB" in fuse and "960*" in fuse  # 4 slopes of 8 bytes for each of 13 · 5


REFUSED = {
    "mean over logits": (over_logits, {}, ["logits-not-shared", "sampling-fused"]),
    "another loss": (bpr, {}, ["logits-not-shared", "sampling-scores"]),
    "losses of positions": (lambda *a: softmax(*a) + 0 * scores(*a[:4])[1].sum(),
                            {}, ["sampling-read-elsewhere", "logits-not-shared", "sampling-scores"]),
    "another loss, stored rows": (bpr, {"form": "rows"}, ["logits-not-shared"]),
    "bce, stored rows": (binary, {"form": "rows"}, ["sampling-form", "logits-not-shared"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_where_sharing_does_not_apply_the_loss_stays_what_it_is(name):
    fn, options, said = REFUSED[name]
    module, context = fused(fn, spec(), share=4, **options)
    assert sorted(ids_of(context)) == sorted(said)
    given = data()
    torch.testing.assert_close(with_gradients(module, *given), with_gradients(fn, *given))
    (remark,) = (r for r in context.remarks if r.id == "logits-not-shared")
    assert remark.hint and remark.line is not None


def test_positives_from_outside_share_only_where_ids_are_compared():
    def fn(q, e, p, i, w):
        logits = torch.cat([(q * p).sum(1, keepdim=True), torch.einsum("td,tkd->tk", q, F.embedding(i, e))], 1)
        return (-F.log_softmax(logits, 1)[:, 0] * w).sum()

    text = spec().replace("i64[13] ", f"f64[13, {D}] ")
    _, context = fused(fn, text, share=4, form="rows")
    assert ids_of(context) == ["logits-not-shared", "sampling-fused"]


# --- halves ----------------------------------------------------------------------------------------------------

COPIES = {"rows of each position": 97, "copy of the table": 29}  # by rows of the table; 13 · 5 are looked up


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("name", LOSSES)
def test_halves(name, copy):
    rows = COPIES[copy]
    module, context = fused(LOSSES[name][0], spec("f32", "t=13", rows), half=True)
    assert ids_of(context) == ["sampling-fused", "negatives-half"]
    op = OPS.half_rows.default if rows == 29 else OPS.quantize_rows.default
    assert op in {n.target for n in module.graph.nodes}
    given = data(torch.float32, size=0.3, table=rows)
    found, expected = with_gradients(module, *given), with_gradients(twin(name, half=True), *given)
    # Through a norm, the table's gradient is that at its rows, the twin's at the rounded ones.
    slack = 2**-9 if name == "unit rows" else 1e-5
    assert all((x - y).norm() <= slack * y.norm() for x, y in zip(found, expected, strict=True))
    assert not torch.equal(found[0], LOSSES[name][0](*given))


def test_halves_and_shared_negatives_together():
    module, context = fused(softmax, spec("f32", table=97), half=True, share=4)
    assert ids_of(context) == ["sampling-fused", "logits-shared", "negatives-half"]
    given = data(torch.float32, size=0.3, table=97)
    found, expected = (
        with_gradients(module, *given),
        with_gradients(twin("softmax, hits masked", half=True, share=4), *given),
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_halves_of_scores_alone():
    module, context = fused(bpr, spec("f32", table=97), half=True)
    assert ids_of(context) == ["sampling-scores", "negatives-half"]
    given = data(torch.float32, table=97)

    def rounded(q, e, p, i, w):
        own = (q * F.embedding(p, e)).sum(-1)
        others = torch.einsum("td,tkd->tk", q, in_halves(F.embedding(i, e)))
        return -(F.logsigmoid(own[:, None] - others).mean(1) * w).sum()

    torch.testing.assert_close(with_gradients(module, *given), with_gradients(rounded, *given))


def dots(q, e, i):
    return torch.einsum("td,tkd->tk", q, F.embedding(i, e))


def bound(q, e, i, per_row_maximum):
    """The text of docs/sampling.md as a formula, and what float32 itself may add."""
    rows = F.embedding(i, e).double()
    q = q.double()
    products = torch.einsum("td,tkd->tk", q.abs(), rows.abs())
    small = per_row_maximum * q.abs().sum(1, keepdim=True)
    return 2**-11 * products + 2**-39 * small + (D + 2) * 2**-23 * products + 1e-44


@pytest.fixture(scope="module", params=COPIES)
def narrowed(request):
    rows = COPIES[request.param]
    text = f"f32[13, {D}] f32[{rows}, {D}] i64[13, {K}]"
    return rows, fused(dots, text, half=True)[0]


@settings(max_examples=40, deadline=None)
@given(low=st.floats(-6, 4.8), high=st.floats(-6, 4.8), seed=st.integers(0, 2**20))
def test_scores_stay_within_the_bound(narrowed, low, high, seed):
    """Magnitudes from 1e-6 to 6e4, mixed within rows and within segments."""
    rows, module = narrowed
    generator = torch.Generator().manual_seed(seed)
    low, high = min(low, high), max(low, high)
    sizes = 10.0 ** (low + (high - low) * torch.rand(rows, D, generator=generator))
    e = (sizes * torch.randn(rows, D, generator=generator).sign()).float()
    q = torch.randn(13, D, generator=generator)
    i = torch.randint(0, rows, (13, K), generator=generator)
    found, exact = module(q, e, i).double(), dots(q.double(), e.double(), i)
    assert found.isfinite().all()
    assert ((found - exact).abs() <= bound(q, e, i, e.abs().max().double())).all()


def test_the_bound_is_not_loose():
    """Worst case: all numbers of a row lie between two halves, and errors add up."""
    module, _ = fused(dots, f"f32[13, {D}] f32[97, {D}] i64[13, {K}]", half=True)
    e, q = torch.full((97, D), 1 + 2**-11), torch.ones(13, D)
    i = torch.zeros(13, K, dtype=torch.long)
    error = (module(q, e, i) - dots(q, e, i)).abs().max()
    assert error > 0.99 * 2**-11 * D / (1 + 2**-11)


def test_only_float32_has_halves():
    module, context = fused(softmax, spec(), half=True)
    assert ids_of(context) == ["negatives-not-half", "sampling-fused"]
    given = data()
    torch.testing.assert_close(with_gradients(module, *given), with_gradients(softmax, *given))


# --- what did not get it says so ---------------------------------------------------------------------------------


def projected(q, e, p, i, w):
    return torch.einsum("td,tkd->tk", q, F.embedding(i, e).tanh()).sum() + w.sum()


def of_the_batch(q, e, p, i, w):
    return (q @ F.embedding(torch.randint(0, V, (K,)), e).T).logsumexp(1).sum() + w.sum()


LEFT = {
    "rows that are changed": (projected, ["logits-not-shared", "negatives-not-half", "rows-changed"]),
    "shared by all": (of_the_batch, ["logits-not-shared", "negatives-not-half", "sampling-shared"]),
    "no sampling": (lambda q, e, p, i, w: (q * F.embedding(p, e)).sum(), ["logits-not-shared", "negatives-not-half"]),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_as_written_says_so(name):
    fn, said = LEFT[name]
    _, context = fused(fn, spec("f32"), share=4, half=True)
    assert sorted(ids_of(context)) == said


def test_widths_that_the_kernel_does_not_take():
    for options in ({"multiple": 16}, {"widest": 4}):
        _, context = fused(softmax, spec(), form="rows", min_numbers=0, **options)
        assert ids_of(context) == ["sampling-form"] and f"rows have {D} numbers" in context.remarks[0].text


# --- bad input -------------------------------------------------------------------------------------------------


def test_options_that_make_no_sense():
    with pytest.raises(PipelineError, match="'share' takes 1 or more positions, got 0"):
        FuseSampling(share=0)
    with pytest.raises(PipelineError, match="half=true with form=lookup only"):
        FuseSampling(form="rows", half=True)
    assert FuseSampling(share=8, half=True).spec == "fuse-sampling{share=8, half=true}"


def test_the_twin_says_what_is_wrong():
    q, e, p, i, _ = data()
    for wrong, text in (
        ({"share": 0}, "share takes 1 or more"), ({"kind": "hinge"}, "kind takes softmax or bce"),
        ({"half": True}, "half stands in for a table of float32"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            sampled_losses(q, e, p, i, **wrong)
    with pytest.raises(ValueError, match=r"takes query \(T, D\).*got \(13, 8\), \(29, 8\), \(13,\), \(13,\)"):
        sampled_losses(q, e, p, p)
    assert math.isfinite(sampled_losses(q, e, p, i, share=100).sum().item())
