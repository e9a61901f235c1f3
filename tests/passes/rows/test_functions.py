"""`torch.autograd.Function` with a body that works row by row, and what looks like one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import turbogr_compile

from .test_row_ops import BATCHES, COLUMNS, FEATURES, Watch

WIDE = 6


def parameter(*sizes):
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(7)).requires_grad_()


GAIN, SHIFT, WEIGHT, UP = parameter(FEATURES), parameter(FEATURES), parameter(WIDE, FEATURES), parameter(FEATURES, WIDE)
BY_COLUMN = parameter(COLUMNS, FEATURES)
WEIGHTS = [GAIN, SHIFT, WEIGHT, UP, BY_COLUMN]


def made(forward, backward):
    """A function that saves what its forward hands it."""

    class Made(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *given):
            result, saved = forward(*given)
            ctx.save_for_backward(*saved)
            return result

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, *ctx.saved_tensors)

    return Made.apply


class Scale(torch.autograd.Function):
    """Root mean square over features, on a view of all rows."""

    @staticmethod
    def forward(ctx, x, gain):
        rows = x.view(-1, x.shape[-1])
        inverse = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(rows, gain, inverse)
        return (rows * inverse * gain).view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        rows, gain, inverse = ctx.saved_tensors
        unit, grads = rows * inverse, grad.reshape(rows.shape)
        back = grads * gain
        back = inverse * (back - unit * (back * unit).mean(-1, keepdim=True))
        return back.view(grad.shape), (grads * unit).sum(0)


class Statistics(torch.autograd.Function):
    """Results without gradients beside the one that has one."""

    @staticmethod
    def forward(ctx, x, gain, shift):
        middle, spread = x.mean(-1, keepdim=True), x.std(-1, keepdim=True, unbiased=False) + 0.1
        unit = (x - middle) / spread
        ctx.save_for_backward(unit, gain, spread)
        ctx.mark_non_differentiable(middle, spread)
        return unit * gain + shift, middle, spread

    @staticmethod
    def backward(ctx, grad, *_):
        unit, gain, spread = ctx.saved_tensors
        back, every = grad * gain, tuple(range(grad.dim() - 1))
        back = (back - back.mean(-1, True) - unit * (back * unit).mean(-1, True)) / spread
        return back, (grad * unit).sum(every), grad.sum(every)


class AddThenScale(torch.autograd.Function):
    """Two results with gradients."""

    @staticmethod
    def forward(ctx, x, y):
        total = x + y
        ctx.save_for_backward(total)
        return total * 2, total.tanh()

    @staticmethod
    def backward(ctx, grad, other):
        (total,) = ctx.saved_tensors
        back = (grad * 2 + other * (1 - total.tanh() ** 2)).clamp(-0.5, 0.5)
        return back, back


def activated(x, w):
    h = F.linear(x, w)
    return h * torch.sigmoid(h), (x, w, h)


def activated_back(grad, x, w, h):
    s = torch.sigmoid(h)
    grad = grad * (s + h * s * (1 - s))
    return grad @ w, grad.flatten(0, 1).t() @ x.flatten(0, 1)


def by_letters_back(grad, x, w):
    return torch.einsum("bno,od->bnd", grad, w), torch.einsum("bno,bnd->od", grad, x)


def halves_back(grad, a, b):
    s = torch.sigmoid(a)
    return torch.cat([grad * b * s * (1 + a * (1 - s)), grad * a * s], -1)


def entropy(x, classes):
    given = x.logsumexp(-1) - x.gather(-1, classes[..., None]).squeeze(-1)
    return given, (x.softmax(-1), classes)


def entropy_back(grad, share, classes):
    return (share - F.one_hot(classes, FEATURES)) * grad[..., None], None


linear = made(lambda x, w: (x @ w.t(), (x, w)), lambda g, x, w: (g @ w, torch.mm(g.view(-1, WIDE).t(), x.view(-1, 4))))
silu_linear = made(activated, activated_back)
by_letters = made(lambda x, w: (x @ w.T, (x, w)), by_letters_back)
halves = made(lambda x: (F.silu(x[..., :3]) * x[..., 3:], x.chunk(2, -1)), halves_back)
clipped = made(lambda x: (x * 1.0, ()), lambda g: g.clamp(-0.3, 0.3) / (1 + g.norm(dim=-1, keepdim=True)))
cross_entropy = made(entropy, entropy_back)

by_count = made(lambda x: (x.sin(), (x,)), lambda g, x: g * x.cos() / (x.shape[0] * x.shape[1]))

PACKED = {
    "root mean square": lambda x, ids: Scale.apply(x, GAIN),
    "of a reshaped value": lambda x, ids: Scale.apply(x.view(x.shape[0], -1, 2, 2), GAIN[:2]).flatten(2),
    "with statistics": lambda x, ids: Statistics.apply(x, GAIN, SHIFT)[0],
    "statistics that are read": lambda x, ids: (y := Statistics.apply(x, GAIN, SHIFT))[0] * y[1] + y[2],
    "linear": lambda x, ids: linear(x, WEIGHT) @ UP.T,
    "linear and activation": lambda x, ids: silu_linear(x, WEIGHT) @ UP.T,
    "by letters": lambda x, ids: by_letters(x, WEIGHT) @ UP.T,
    "halves": lambda x, ids: F.pad(halves(x @ UP), (0, 1)),
    "gradients cut row by row": lambda x, ids: clipped(x).sin(),
    "gradients by the number of rows": lambda x, ids: by_count(x),
    "a loss for each row": lambda x, ids: cross_entropy(x, ids % FEATURES)[..., None] * SHIFT,
    "one after another": lambda x, ids: Scale.apply(x + silu_linear(Scale.apply(x, GAIN), WEIGHT) @ UP.T, SHIFT),
}


def plain(x):
    return x.sin(), (x,)


def kept(x, w):
    return x * w, (x, w)


def normed(x):
    """Several results of one op, none of which has rows."""
    spread, middle = torch.var_mean(x, (0, 1))
    inverse = torch.rsqrt(spread + 0.1)
    return (x - middle) * inverse, (inverse,)


LOOK_ALIKES = {
    "a mean over rows": made(lambda x: (x - x.mean(1, keepdim=True), ()), lambda g: g - g.mean(1, keepdim=True)),
    "gradients by their largest": made(plain, lambda g, x: g * x.cos() / (1 + g.abs().max())),
    "gradients by their norm": made(plain, lambda g, x: g / (1 + g.norm())),
    "a share of the value": made(plain, lambda g, x: g * x.cos() + 0.1 * x),
    "gradients of the row before": made(plain, lambda g, x: g.roll(1, 1)),
    "a running sum": made(lambda x: (x.cumsum(1), ()), lambda g: g.flip(1).cumsum(1).flip(1)),
    "gradients by their spread": made(plain, lambda g, x: g * x.cos() / (1 + torch.std_mean(g)[0])),
    "statistics of all": made(normed, lambda g, inverse: g * inverse),
    "the order of gradients": made(plain, lambda g, x: g.argsort(-1).to(g.dtype)),
    "random numbers": made(plain, lambda g, x: g * (torch.rand_like(x) >= 0)),
}
OF_WEIGHTS = {
    "a weight that all values pull at": made(kept, lambda g, x, w: (g * w, (g * x).sum((0, 1)) + x.sum((0, 1)))),
    "a product of values": made(kept, lambda g, x, w: (g * w, (x.flatten(0, 1).t() @ x.flatten(0, 1)).sum(0))),
    "a mean of gradients": made(kept, lambda g, x, w: (g * w, (g * x).mean((0, 1)))),
    "in two steps": made(kept, lambda g, x, w: (g * w, (g * x).sum(0).sum(0))),
}
LOOK_ALIKES |= {name: lambda x, f=f: f(x, GAIN) for name, f in OF_WEIGHTS.items()}
LOOK_ALIKES |= {
    "a weight for each column": lambda x: made(kept, lambda g, x, w: (g * w, (g * x).sum(0)))(x, BY_COLUMN),
    "two results with gradients": lambda x: (y := AddThenScale.apply(x, x.cos()))[0] * y[1],
}


def compare(change, table, *others):
    """Right on all batches; are rows packed?"""
    watch, table = Watch(), torch.nn.Parameter(table)

    def step(ids):
        y = change(F.embedding(ids, table), ids)
        return (y * (ids != 0)[..., None]).sin().sum()

    compiled = turbogr_compile.compile(step, target="eager", on_error="raise", worth="always", instruments=[watch])
    for ids in (*BATCHES, torch.cat(BATCHES), *others):
        outcomes = []
        for fn in (step, compiled):
            for x in (table, *WEIGHTS):
                x.grad = None
            loss = fn(ids)
            loss.backward()
            outcomes.append([loss.detach(), *(x.grad for x in (table, *WEIGHTS))])
        torch.testing.assert_close(*reversed(outcomes), rtol=1e-9, atol=1e-9)
    return watch.looks_up_packed


@pytest.mark.parametrize("change", PACKED.values(), ids=PACKED)
def test_functions_of_rows_are_packed(change, table):
    assert compare(change, table, torch.cat(BATCHES)[:, 1:5])


@pytest.mark.parametrize("change", LOOK_ALIKES.values(), ids=LOOK_ALIKES)
def test_look_alikes_are_right(change, table):
    assert not compare(lambda x, _: change(x), table)


def test_an_op_of_a_user_is_not_what_its_name_says(table):
    """`mul` of another namespace may make something of zeros."""
    with torch.library._scoped_library("row_functions", "DEF") as library:
        library.define("mul(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pt2_compliant_tag, torch.Tag.pointwise))
        library.impl("mul", lambda a, b: a * b + 1, "CPU")
        torch.library.register_fake("row_functions::mul", lambda a, b: torch.empty_like(a), lib=library)
        assert not compare(lambda x, _: made(plain, torch.ops.row_functions.mul)(x), table)


def test_rounded_row_counts(table):
    def step(ids):
        return (Scale.apply(F.embedding(ids, table), GAIN) * (ids != 0)[..., None]).sum()

    compiled = turbogr_compile.compile(step, target="eager", on_error="raise", worth="always", capacity=16)
    for ids in BATCHES:
        gradients = [torch.autograd.grad(fn(ids), [table, GAIN]) for fn in (step, compiled)]
        torch.testing.assert_close(*reversed(gradients), rtol=1e-9, atol=1e-9)


def test_in_generated_code(table):
    def step(ids):
        return (silu_linear(Scale.apply(F.embedding(ids, table), GAIN), WEIGHT) * (ids != 0)[..., None]).sum()

    compiled = turbogr_compile.compile(step, target="cpu", on_error="raise", worth="always")
    for ids in BATCHES:
        gradients = [torch.autograd.grad(fn(ids), [table, GAIN, WEIGHT]) for fn in (step, compiled)]
        torch.testing.assert_close(*reversed(gradients), rtol=1e-9, atol=1e-9)


def turned(x):
    """Saves views of its argument."""
    a, b = x.chunk(2, -1)
    return torch.cat([a.sin() * b, a], -1), (a, b)


def turned_back(grad, a, b):
    first, second = grad.chunk(2, -1)
    return torch.cat([first * a.cos() * b + second, first * a.sin()], -1)


def test_what_is_saved_is_no_view():
    """A code generator that reuses memory once its last reader has run does not know of readers by another name."""
    function, table = made(turned, turned_back), parameter(9, WIDE)

    def step(ids):
        return (function(F.embedding(ids, table) * 2.0).flip(-1).tanh() * (ids != 0)[..., None]).sum()

    compiled = turbogr_compile.compile(step, pipeline="", codegen="inductor", on_error="raise", verify="fast")
    gradients = [torch.autograd.grad(fn(BATCHES[0] % 9), table) for fn in (step, compiled)]
    torch.testing.assert_close(*reversed(gradients), rtol=1e-9, atol=1e-9)
