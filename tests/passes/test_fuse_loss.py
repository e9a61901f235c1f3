"""fuse-loss: which spellings of a cross-entropy it finds, what it says of others, and that numbers stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile
from turbogr_compile.graph.shapes import real_inputs
from turbogr_compile.passes.fuse_loss import FuseLoss
from turbogr_compile.testing import run_passes, trace_graph

ops = torch.ops.turbogr
TOTAL, LOSSES = ops.linear_cross_entropy_total.default, ops.linear_cross_entropy.default
V = 11
X = "f64[b=3, n=5, 8]"
W, T, B = f"f64[{V}, 8]", "i64[b=3, n=5]", f"f64[{V}]"
ANY_SIZE = FuseLoss(min_logits=0, min_recomputed=0)


def flat(logits):
    return logits.flatten(0, -2)


def ce(logits, target, **rest):
    return F.cross_entropy(flat(logits), target.flatten(), **rest)


def fused(fn, inputs, pass_=ANY_SIZE):
    module = trace_graph(fn, inputs)
    (context,) = run_passes(module, [pass_])
    return module, context


def found(module):
    return [n.target for n in module.graph.nodes if n.op == "call_function" and n.target in (TOTAL, LOSSES)]


def values(inputs, seed=0):
    return [
        t.requires_grad_() if t.is_floating_point() else t % V
        for t in real_inputs(inputs, {"b": 3, "n": 5, "v": V, "d": 8}, seed)
    ]


def assert_same(module, fn, inputs):
    """Values and gradients, of every result."""
    given = values(inputs)
    leaves = [t for t in given if t.requires_grad]
    results = []
    for call in (module, fn):
        out = call(*given)
        slopes = torch.autograd.grad((out * torch.linspace(1, 2, out.numel()).view(out.shape)).sum(), leaves)
        results.append((out, *slopes))
    torch.testing.assert_close(*results, equal_nan=True)


SPELLINGS = {
    "matmul": (lambda x, w, t: ce(x @ w.T, t), [X, W, T]),
    "linear": (lambda x, w, t: ce(F.linear(x, w), t), [X, W, T]),
    "linear with a bias": (lambda x, w, t, b: ce(F.linear(x, w, b), t), [X, W, T, B]),
    "mm": (lambda x, w, t: ce(torch.mm(flat(x), w.t()), t), [X, W, T]),
    "addmm": (lambda x, w, t, b: ce(torch.addmm(b, flat(x), w.t()), t), [X, W, T, B]),
    "einsum": (lambda x, w, t: ce(torch.einsum("bnd,vd->bnv", x, w), t), [X, W, T]),
    "einsum, weight first": (lambda x, w, t: ce(torch.einsum("dv,bnd->bnv", w.T, x), t), [X, W, T]),
    "weight as it comes": (lambda x, w, t: ce(x @ w, t), [X, f"f64[8, {V}]", T]),
    "part of the weight": (lambda x, w, t: ce(x @ w[2:].T, t % 8), [X, W, T]),
    "sizes of weights unknown": (lambda x, w, t: ce(x @ w.T, t % 8), ["f64[b, n, d]", "f64[v, d]", T]),
    "sum": (lambda x, w, t: ce(x @ w.T, t, reduction="sum"), [X, W, T]),
    "ignored and smoothed": (lambda x, w, t: ce(x @ w.T, t, ignore_index=2, label_smoothing=0.1), [X, W, T]),
    "all ignored": (lambda x, w, t: ce(x @ w.T, t * 0, ignore_index=0), [X, W, T]),
    "one row": (lambda x, w, t: F.cross_entropy(x[0, 0] @ w.T, t[0, 0]), [X, W, T]),
    "classes in the middle": (lambda x, w, t: F.cross_entropy((x @ w.T).transpose(1, 2), t), [X, W, T]),
    "classes moved": (lambda x, w, t: F.cross_entropy((x @ w.T * 2.0).permute(0, 2, 1) * 0.5, t), [X, W, T]),
    "temperature": (lambda x, w, t: ce(x @ w.T / 0.07, t), [X, W, T]),
    "factors around a bias": (lambda x, w, t, b: ce((F.linear(x, w, b) * 3 + b) / 2, t), [X, W, T, B]),
    "bias with dims": (lambda x, w, t, b: ce(x @ w.T + b[None, None], t), [X, W, T, B]),
    "bias first": (lambda x, w, t, b: ce(b + x @ w.T, t), [X, W, T, B]),
    "learned temperature": (lambda x, w, t, s: ce(s.exp() * (x @ w.T), t), [X, W, T, "f64[]"]),
    "temperature of rows": (lambda x, w, t, s: ce((x @ w.T) / s.exp(), t), [X, W, T, "f64[b, n, 1]"]),
    "mask of rows": (lambda x, w, t, m: ce((x @ w.T) * m, t), [X, W, T, "bool[b, n, 1]"]),
    "shifted": (lambda x, w, t: ce((x @ w.T)[..., :-1, :].contiguous(), t[:, 1:]), [X, W, T]),
    "last row": (lambda x, w, t: F.cross_entropy((x @ w.T)[:, -1], t[:, -1]), [X, W, T]),
    "picked rows": (
        lambda x, w, t, i: F.cross_entropy(flat(x @ w.T).index_select(0, i), t.flatten()[i]), [X, W, T, "i64[4]"],
    ),
    "indexed rows": (lambda x, w, t, i: ce((x @ w.T)[:, i % 5], t[:, i % 5]), [X, W, T, "i64[4]"]),
    "dims of one": (lambda x, w, t: ce((x @ w.T).unsqueeze(1).squeeze(1).transpose(0, 1), t.T), [X, W, T]),
    "log_softmax and nll_loss": (
        lambda x, w, t: F.nll_loss(F.log_softmax(flat(x @ w.T), -1), t.flatten(), ignore_index=3), [X, W, T],
    ),
    "log_softmax and gather": (
        lambda x, w, t: -F.log_softmax(x @ w.T, -1).gather(-1, t.unsqueeze(-1)).squeeze(-1).mean(), [X, W, T],
    ),
    "mean of minus gathered": (
        lambda x, w, t: (-F.log_softmax(x @ w.T, -1).gather(-1, t[..., None])).mean(), [X, W, T],
    ),
    "sum of gathered": (lambda x, w, t: F.log_softmax(x @ w.T, -1).gather(-1, t[..., None]).sum(), [X, W, T]),
    "masked mean": (
        lambda x, w, t: (ce(x @ w.T, t, reduction="none") * (t != 0).flatten()).sum() / (t != 0).sum(), [X, W, T],
    ),
    "weighted mean": (
        lambda x, w, t, m: (m * ce(x @ w.T, t, reduction="none", ignore_index=1).view(t.shape)).mean(),
        [X, W, T, "f64[b, n]"],
    ),
    "sum over all dims": (
        lambda x, w, t: F.cross_entropy((x @ w.T).mT, t, reduction="none").sum((0, 1)), [X, W, T],
    ),
    "mean of losses": (lambda x, w, t: ce(x @ w.T, t, reduction="none", ignore_index=1).mean(), [X, W, T]),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_become_one_op_with_the_same_numbers(name):
    fn, inputs = SPELLINGS[name]
    module, context = fused(fn, " ".join(inputs))
    assert found(module) == [TOTAL], name
    left = {"matmul", "mm", "addmm", "linear", "einsum", "cross_entropy_loss", "log_softmax"}
    assert not left & {n.target.overloadpacket.__name__ for n in module.graph.nodes if hasattr(n.target, "_schema")}
    assert [r.id for r in context.remarks] == ["loss-fused"]
    assert_same(module, fn, " ".join(inputs))


ROWS = {
    "flat": lambda x, w, t: ce(x @ w.T, t, reduction="none", ignore_index=2, label_smoothing=0.1),
    "padded": lambda x, w, t: F.cross_entropy((x @ w.T).transpose(1, 2), t, reduction="none"),
    "gathered": lambda x, w, t: F.log_softmax(x @ w.T, -1).gather(-1, t[..., None])[..., 0],
    "mean of each sequence": lambda x, w, t: ce(x @ w.T, t, reduction="none").view(t.shape).mean(1),
    "focal": lambda x, w, t: ((loss := ce(x @ w.T, t, reduction="none")) * (1 - (-loss).exp())).sum(),
}


@pytest.mark.parametrize("name", ROWS)
def test_losses_of_rows(name):
    inputs = f"{X} {W} {T}"
    module, _ = fused(ROWS[name], inputs)
    assert found(module) == [LOSSES]
    assert_same(module, ROWS[name], inputs)


def twice(x, w, t):
    logits = x @ w.T
    return ce(logits, t) + logits.argmax(-1).float().mean()


MISSES = {
    "used elsewhere": (twice, [X, W, T], "logits-used-elsewhere", "read by"),
    "returned": (lambda x, w, t: ((y := x @ w.T), ce(y, t)), [X, W, T], "logits-used-elsewhere", "the caller"),
    "log-probabilities used elsewhere": (
        lambda x, w, t: F.nll_loss(y := F.log_softmax(flat(x @ w.T), -1), t.flatten()) + y.exp().sum(), [X, W, T],
        "logits-used-elsewhere", "log_softmax",
    ),
    "weights of classes": (lambda x, w, t, b: ce(x @ w.T, t, weight=b), [X, W, T, B], "loss-weighted", "weights"),
    "soft targets": (
        lambda x, w, p: F.cross_entropy(flat(x @ w.T), flat(p)), [X, W, f"f64[b, n, {V}]"], "loss-soft", "targets are",
    ),
    "no product": (lambda y, t: ce(y.exp(), t), [f"f64[b, n, {V}]", T], "logits-no-product", "aten.exp"),
    "an input": (lambda y, t: ce(y, t), [f"f64[b, n, {V}]", T], "logits-no-product", "outside"),
    "a weight for each sequence": (
        lambda x, w, t: ce(x @ w.mT, t), [X, f"f64[b, {V}, 8]", T], "logits-no-product", "for each sequence",
    ),
    "sampled classes": (
        lambda x, w, t: F.cross_entropy(torch.cat([x.sum(-1, keepdim=True), x @ w.T], -1).flatten(0, 1), t.flatten()),
        [X, W, T], "logits-no-product", "aten.cat",
    ),
    "odd einsum": (
        lambda x, w, t: ce(torch.einsum("bnd,vd->nbv", x, w), t.T), [X, W, T], "logits-no-product", "einsum",
    ),
    "einsum that repeats x": (
        lambda x, w, t: ce(torch.einsum("bnd,vd->bnv", x[..., :1], w), t), [X, W, T], "logits-no-product", "einsum",
    ),
    "einsum that repeats classes": (
        lambda x, w, t: ce(torch.einsum("bnd,vd->bnv", x, w[:, :1]), t), [X, W, T], "logits-no-product", "einsum",
    ),
    "a temperature for which 16 bits of x have no room": (
        lambda x, w, t, s: ce((x * 1000.0 @ (w * 0.001).T) / s, t), ["f16[b, n, 8]", f"f16[{V}, 8]", T, "f16[]"],
        "logits-changed", "no room",
    ),
    "a bias that is too large once it is multiplied": (
        lambda x, w, t, b: ce(F.linear(x, w, b * 1000.0) * 0.001, t),
        ["f16[b, n, 8]", f"f16[{V}, 8]", T, f"f16[{V}]"], "logits-changed", "no room",
    ),
    "product turned around": (
        lambda x, w, t: ce((w @ flat(x).T).T, t), [X, W, T], "logits-no-product", "not the last dim",
    ),
    "bias of pairs": (
        lambda x, w, t, b: ce(x @ w.T + b, t), [X, W, T, f"f64[b, 1, {V}]"], "logits-changed", "each class",
    ),
    "bias under a learned temperature": (
        lambda x, w, t, b, s: ce(F.linear(x, w, b) * s, t), [X, W, T, B, "f64[]"], "logits-changed", "then multiplied",
    ),
    "factor of classes": (lambda x, w, t, b: ce(x @ w.T * b, t), [X, W, T, B], "logits-changed", "more than one"),
    "shuffled rows": (
        lambda x, w, t: F.cross_entropy((x @ w.T).permute(1, 2, 0), t.T), [X, W, T], "logits-changed", "order of rows",
    ),
    "some classes": (lambda x, w, t: ce((x @ w.T)[..., 1:], t % 8), [X, W, T], "logits-changed", "picks classes"),
    "classes taken apart": (
        lambda x, w, t: F.cross_entropy((x @ w.T).reshape(-1, 2), t.flatten()[:1].expand(30)), [X, "f64[4, 8]", T],
        "logits-changed", "apart",
    ),
    "as many rows as the data says": (
        lambda x, w, t: F.cross_entropy((x @ w.T)[t != 0], t[t != 0]), [X, W, T], "logits-changed", "the data says",
    ),
    "narrowed logits": (lambda x, w, t: ce((x @ w.T).float(), t), [X, W, T], "logits-changed", "converts"),
    "nonlinear": (lambda x, w, t: ce(torch.tanh(x @ w.T), t), [X, W, T], "logits-no-product", "aten.tanh"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_say_why(name):
    fn, inputs, id, text = MISSES[name]
    module, context = fused(fn, " ".join(inputs).replace("b=3, n=5", "3, 5") if "apart" in name else " ".join(inputs))
    assert not found(module) and not context.rewrites
    assert [r.id for r in context.remarks] == [id]
    assert text in context.remarks[0].text and context.remarks[0].line is not None


def test_small_losses_stay_and_so_do_losses_of_rows_that_fit_into_memory():
    def mean(x, w, t):
        return F.cross_entropy(x @ w.T, t)

    def each(x, w, t):
        return F.cross_entropy(x @ w.T, t, reduction="none")

    def ids(fn, rows, **options):
        _, context = fused(fn, f"f32[t={rows}, 8] f32[1000, 8] i64[t]", FuseLoss(**options))
        return [r.id for r in context.remarks]

    assert ids(mean, 100) == ["loss-small"] and ids(mean, 1000) == ["loss-fused"]
    assert ids(each, 1000) == ["loss-of-rows"] and ids(each, 20_000) == ["loss-fused"]
    assert ids(each, 1000, min_recomputed=10**6) == ["loss-fused"]


def test_rows_that_only_the_data_counts_are_many():
    def fn(x, w, t, mask):
        kept = mask.nonzero()[:, 0]
        return F.cross_entropy(x[kept] @ w.T, t[kept])

    module, _ = fused(fn, "f32[t, 8] f32[1000, 8] i64[t] bool[t]", FuseLoss())
    assert found(module) == [TOTAL]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("widened", [False, True])
def test_half_precision_keeps_the_type_of_the_loss(dtype, reduction, widened):
    def fn(x, w, t):
        logits = x @ w.T
        return ce(logits.float() if widened else logits, t, reduction=reduction)

    inputs = f"{X} {W} {T}".replace("f64", dtype)
    module, _ = fused(fn, inputs)
    assert len(found(module)) == 1
    given = values(inputs)
    actual, expected = module(*given), fn(*given)
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, atol=0.05, rtol=0.02)
    wide = ce(given[0].double() @ given[1].double().T, given[2], reduction=reduction)
    assert (actual - wide).abs().max() <= (expected - wide).abs().max() + 1e-3


def test_autocast():
    def fn(x, w, t):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ce(F.linear(x, w), t)

    inputs = f"{X} {W} {T}".replace("f64", "f32")
    module, _ = fused(fn, inputs)
    assert found(module) == [TOTAL]
    given = values(inputs)
    torch.testing.assert_close(module(*given), fn(*given), atol=0.02, rtol=0.02)
    assert module(*given).dtype == torch.float32


@pytest.mark.parametrize("codegen", ["aten", "inductor"])
def test_compiled_training_step(codegen):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.items = torch.nn.Embedding(50, 8)
            self.body = torch.nn.Linear(8, 8)

        def forward(self, ids):
            hidden = self.body(self.items(ids[:, :-1]))
            return ce(hidden @ self.items.weight.T / 0.5, ids[:, 1:], ignore_index=0)

    torch.manual_seed(0)
    torch._dynamo.reset()
    model, ids = Model(), torch.randint(50, (4, 7))
    expected = model(ids)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    step = turbogr_compile.compile(model, codegen=codegen, pipeline=[ANY_SIZE], on_error="raise", verify="numeric")
    calls = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls):
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.extend([args[-1]] if func is ops.linear_cross_entropy_ahead.default else [])
            return func(*args, **(kwargs or {}))

    step(ids)
    with Seen():
        actual = step(ids)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.autograd.grad(actual, list(model.parameters())), wanted)
    with torch.no_grad():
        step(ids)
        with Seen():
            torch.testing.assert_close(step(ids), expected)
    assert calls == [[True, True, False], [False, False, False]]
