"""Idioms of published models and of the zoo, in static and symbolic sizes: what each is recognised as."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packing.zoo import BIAS, MASK, WEIGH, Seen, Sizes
from torch import Tensor, nn

from turbogr_compile._torch import guard_count, shape_env_of
from turbogr_compile.graph.shapes import symbolic_inputs
from turbogr_compile.passes.rows.attention.bias import ByBucket, ByDistance, ByTime, Dense
from turbogr_compile.passes.rows.attention.checks import GapAtMost
from turbogr_compile.passes.rows.attention.formula import KEY, QUERY, Formula
from turbogr_compile.passes.rows.attention.times import Times

from .harness import Blindness, NormalForm, Refused, attentions, compare, traced
from .packed import compare_packed

INF = math.inf
B, N, H, D = 3, 8, 2, 4  # sequences, columns, heads, width of a head


@pytest.fixture(autouse=True)
def wide_numbers():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def batch(kind: str, seed: int, b: int = B, n: int = N) -> list[Any]:
    """x, ids, times."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, n + 1, (b,), generator=g)
    columns = torch.arange(n)
    valid = columns < lengths[:, None] if kind == "right" else columns >= n - lengths[:, None]
    x = torch.randn(b, n, H * D, generator=g, requires_grad=True)
    ids = torch.randint(1, 9, (b, n), generator=g) * valid
    return [x, ids, torch.randint(0, 10**6, (b, n), generator=g).sort(-1).values]


def checked(program: Callable[..., Tensor], *more: Any, like: str = "", sizes: tuple[int, int] = (B, N)) -> NormalForm:
    """The one attention of a program of x, ids and times (and more inputs), right on other batches too."""
    inputs = [*batch("right", 0, *sizes), *more]
    fake = symbolic_inputs(like, sizes={"b": sizes[0], "n": sizes[1]}) if like else None
    module = traced(program, inputs, fake)
    env = shape_env_of(module.graph)
    before = guard_count(env)
    (form,) = attentions(module, inputs)
    assert guard_count(env) == before, "a question about sizes added a guard"
    assert isinstance(form, NormalForm), f"{form} at {form.node}"
    found = []
    others = [(2, 5), (4, 9)] if like else []
    for seed, kind in ((1, "right"), (2, "left")):
        for b, n in [sizes, *others]:
            later = [*batch(kind, seed, b, n), *more]
            found += [compare(module, form, later), compare_packed(module, form, later)]
    assert not any(f.startswith("DIFFERENT") for f in found), f"{found}\n{form}"
    assert "same" in found[::2], f"{found}\n{form}"
    assert "same" in found[1::2] or "without a kernel" in found[1], f"{found}\n{form}"
    return form


def heads(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], H, D).transpose(1, 2)


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


# --- layouts ---------------------------------------------------------------------------------------------


def _plain(x, seen):
    q, k, v = (heads(x * c) for c in (1.0, 0.5, 2.0))
    return (q @ k.transpose(2, 3) / 2).masked_fill(~seen[:, None], -1e9).softmax(-1) @ v


def _heads_in_batch(x, seen):
    """As torch's MultiheadAttention lays them out, with masks repeated per head."""
    b, n = x.shape[:2]
    q, k, v = (heads(x * c).reshape(b * H, n, D) for c in (1.0, 0.5, 2.0))
    mask = torch.zeros(b, n, n).masked_fill(~seen, -INF).repeat_interleave(H, 0)
    return torch.bmm(torch.baddbmm(mask, q, k.transpose(1, 2), alpha=0.5).softmax(-1), v).view(b, H, n, D)


def _heads_first(x, seen):
    """Chunks of the width put behind each other along the batch, as TensorFlow code does."""
    q, k, v = (torch.cat((x * c).chunk(H, -1), 0) for c in (1.0, 0.5, 2.0))
    s = torch.where(seen.repeat(H, 1, 1), q @ k.transpose(1, 2), torch.tensor(-(2.0**32) + 1))
    return torch.cat((s.softmax(-1) @ v).chunk(H, 0), -1)


def _einsum(x, seen):
    q, k, v = ((x * c).unflatten(-1, (H, D)) for c in (1.0, 0.5, 2.0))
    s = torch.einsum("bnhd,bmhd->bhnm", q, k) + torch.where(seen, 0.0, -1e9)[:, None]
    return torch.einsum("bhnm,bmhd->bnhd", s.softmax(-1), v)


def _sequence_first(x, seen):
    q, k, v = ((x * c).transpose(0, 1).unflatten(-1, (H, D)).permute(1, 2, 0, 3) for c in (1.0, 0.5, 2.0))
    return (q @ k.mT).masked_fill(~seen.unsqueeze(1), -1e9).softmax(-1) @ v


def _grouped(x, seen):
    """Two heads share keys and values."""
    q, k, v = heads(x), (x * 0.5)[..., None, :D].transpose(1, 2), (x * 2)[..., None, :D].transpose(1, 2)
    k, v = (t[:, :, None].expand(-1, -1, H, -1, -1).flatten(1, 2) for t in (k, v))
    return (q @ k.transpose(2, 3)).masked_fill(~seen[:, None], -1e9).softmax(-1) @ v


def _fused(x, seen):
    q, k, v = (heads(x * c) for c in (1.0, 0.5, 2.0))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])


def _fused_grouped(x, seen):
    q, k, v = heads(x), (x * 0.5)[..., None, :D].transpose(1, 2), (x * 2)[..., None, :D].transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None], enable_gqa=True)


LAYOUTS = [_plain, _heads_in_batch, _heads_first, _einsum, _sequence_first, _grouped, _fused, _fused_grouped]
SYMBOLIC = "f64[b=3, n=8, 8], i64[b=3, n=8], i64[b=3, n=8]"


@pytest.mark.parametrize("like", ["", SYMBOLIC], ids=["static", "symbolic"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__.strip("_"))
def test_layouts(layout, like):
    def program(x, ids, times):
        return layout(x, causal(x.shape[1]) & (ids != 0)[:, None])

    form = checked(program, like=like)
    assert form.opaque == 0 and "distance 0..inf" in str(form.visible) and "keys" in str(form.visible), form
    assert len(form.heads) == 1 and len(form.sequences) == 1, form
    assert form.groups == (() if "grouped" in layout.__name__ else form.heads)


def test_factors_and_limits_that_are_symbolic_sizes():
    """Weights divided by the number of columns; a mask that compares with it; a scale made of it."""

    def program(x, ids, times):
        n = x.shape[1]
        seen = causal(n) & (torch.arange(n) < n - 1) & (ids != 0)[:, None]
        return F.silu(x @ x.transpose(1, 2)) / n * seen @ x

    form = checked(program, like=SYMBOLIC)
    assert len(form.post_factors) == 1 and "distance 0..inf" in str(form.visible) and form.opaque == 0

    def scaled(x, ids, times):
        return ((x @ x.transpose(1, 2)) * x.shape[1] ** -0.5).masked_fill((ids == 0)[:, None], -1e9).softmax(-1) @ x

    assert len(checked(scaled, like=SYMBOLIC).score_factors) == 1


@pytest.mark.parametrize("sizes", [(8, 8), (3, 3), (1, 8), (4, 8), (2, 2)])
def test_sizes_that_are_equal_or_one(sizes):
    def program(x, ids, times):
        return _plain(x, causal(x.shape[1]) & (ids != 0)[:, None])

    assert "distance 0..inf" in str(checked(program, sizes=sizes).visible)


def test_groups_that_lie_inside():
    """Head h reads group h % 2. The op has heads of a group side by side, so each head is given keys of its own."""

    def program(x, ids, times):
        q = x.unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = ((x * c)[..., :4].unflatten(-1, (2, 2)).transpose(1, 2).repeat(1, 2, 1, 1) for c in (0.5, 2.0))
        return (q @ k.transpose(2, 3)).masked_fill((ids == 0)[:, None, None], -1e9).softmax(-1) @ v

    form = checked(program)
    assert len(form.heads) == 2 and form.groups == form.heads[1:]


def test_channels_that_write_the_same_scores_again():
    """Calls that compute the same are one value, whichever of them an attention is found from."""

    def program(x, ids, times):
        seen = causal(x.shape[1]) & (ids != 0)[:, None]
        plain = F.silu(x @ x.transpose(1, 2)) * seen @ x
        return F.silu(x @ x.transpose(1, 2) + 0.5) * seen @ (x + plain)

    inputs = batch("right", 0)
    found = attentions(traced(program, inputs), inputs)
    assert len(found) == 2 and not any(isinstance(form, Refused) for form in found), found


# --- masks and weights of the zoo ------------------------------------------------------------------------

PAIRS = {"outer-product", "targets"}  # masks that stay tensors of pairs


@pytest.mark.parametrize("mask", [m for m in MASK if m not in ("none", "causal-buffer")])
def test_masks_of_the_zoo(mask):
    def program(x, ids, times):
        seen = MASK[mask](Seen(ids != 0, causal(x.shape[1])))
        return (x @ x.transpose(1, 2)).masked_fill(~seen, -1e9).softmax(-1) @ x

    form = checked(program)
    assert (form.opaque > 0) == (mask in PAIRS), form


REFUSED = {"softmax-times-renormalised", "exponentials", "softmax-then-times"}


@pytest.mark.parametrize("weigh", WEIGH)
def test_weights_of_the_zoo(weigh):
    def program(x, ids, times):
        seen = causal(x.shape[1]) & (ids != 0)[:, None]
        return WEIGH[weigh](x @ x.transpose(1, 2), seen) @ x

    if weigh in REFUSED:
        inputs = batch("right", 0)
        (found,) = attentions(traced(program, inputs), inputs)
        assert isinstance(found, Refused)
        return
    form = checked(program)
    assert weigh == "soft-1" or "distance 0..inf" in str(form.visible)


# --- biases ----------------------------------------------------------------------------------------------


KINDS: dict[str, Any] = {
    "toeplitz": [ByDistance], "distance": [ByDistance], "buckets": [ByBucket], "slope": [ByBucket],
    "log-time": [ByTime], "log-time-next": [ByTime], "toeplitz-time": [ByDistance, ByTime],
}  # fmt: skip


@pytest.mark.parametrize("bias", [b for b in BIAS if b != "none"])
def test_biases_of_the_zoo(bias):
    module = BIAS[bias](Sizes(**{**dict.fromkeys(Sizes._fields, N), "n": N}))
    tables = [p for _, p in module.named_parameters()]
    names = [name for name, _ in module.named_parameters()]

    def program(x, ids, times, *given):
        added = torch.func.functional_call(module, dict(zip(names, given, strict=True)), (times,))
        seen = causal(x.shape[1]) & (ids != 0)[:, None]
        return F.silu(x @ x.transpose(1, 2) + added) / N * seen @ x

    form = checked(program, *(t.detach().requires_grad_() for t in tables))
    if bias in KINDS:
        assert [type(b) for b in form.biases] == KINDS[bias], form


def test_position_bias_of_the_distance():
    table = torch.randn(15, requires_grad=True)

    def clamped(x, ids, times, rel):
        at = torch.arange(N)
        return F.silu(x @ x.transpose(1, 2) + rel[(at[:, None] - at).clamp(-3, 3) + 7]) @ x

    def plain(x, ids, times, rel):
        at = torch.arange(N)
        return F.silu(x @ x.transpose(1, 2) + rel[at[:, None] - at + N - 1]) @ x

    assert [type(b) for b in checked(plain, table).biases] == [ByDistance]
    assert [type(b) for b in checked(clamped, table).biases] == [ByBucket]


def test_position_bias_of_a_symbolic_distance():
    """A table for the longest sequence, of which shorter ones read the middle."""
    table = torch.randn(2 * 16 - 1, requires_grad=True)

    def program(x, ids, times, rel):
        n = x.shape[1]
        spread = F.pad(rel[15 - (n - 1) : 15 + n], [0, n]).repeat(n)[..., :-n].reshape(1, n, 3 * n - 2)
        return F.silu(x @ x.transpose(1, 2) + spread[..., n - 1 : 2 * n - 1]) @ x

    assert [type(b) for b in checked(program, table).biases] == [ByDistance]
    assert [type(b) for b in checked(program, table, like=SYMBOLIC + ", f64[31]").biases] == [ByDistance]


def test_indices_before_the_first_count_from_the_last():
    table = torch.randn(15, requires_grad=True)

    def program(x, ids, times, rel):
        at = torch.arange(N)
        return F.silu(x @ x.transpose(1, 2) + rel[at[:, None] - at]) @ x

    def all_of_them(x, ids, times, rel):
        at = torch.arange(N)
        return F.silu(x @ x.transpose(1, 2) + rel[at[:, None] - at - N]) @ x

    assert [type(b) for b in checked(program, table).biases] == [Dense]
    assert [type(b) for b in checked(all_of_them, table).biases] == [ByDistance]


def test_numbers_that_distance_does_not_tell():
    table = torch.randn(5, requires_grad=True)

    def looked_up(x, ids, times, rel):
        at = torch.arange(N)
        return F.silu(x @ x.transpose(1, 2) + rel[(at[:, None] * at) % 5]) @ x

    def constant(x, ids, times, rel):
        at = torch.arange(N)
        return F.silu(x @ x.transpose(1, 2) + (at[:, None] * at).double() / 7) @ x

    for program in (looked_up, constant):
        assert [type(b) for b in checked(program, table).biases] == [Dense]


def test_bias_per_head():
    table = torch.randn(15, H, requires_grad=True)

    def program(x, ids, times, rel):
        at = torch.arange(N)
        bias = rel[at[:, None] - at + N - 1].permute(2, 0, 1)
        return F.silu(heads(x) @ heads(x).transpose(2, 3) + bias) @ heads(x)

    (bias,) = checked(program, table).biases
    assert isinstance(bias, ByDistance) and str(bias.data.index[1]) == "b1"


def test_t5_buckets():
    table = torch.randn(6, H, requires_grad=True)

    def program(x, ids, times, rel):
        at = torch.arange(N)
        far = (at[:, None] - at).clamp(min=0)
        bucket = torch.where(far < 3, far, (far.double().clamp(min=1).log() * 2).long() + 1).clamp(max=5)
        mask = torch.where(causal(N) & (ids != 0)[:, None], 0.0, torch.finfo(torch.float64).min)[:, None]
        bias = F.embedding(bucket, rel).permute(2, 0, 1).unsqueeze(0) + mask
        return (heads(x) @ heads(x).transpose(2, 3) + bias).softmax(-1) @ heads(x)

    form = checked(program, table)
    assert [type(b) for b in form.biases] == [ByBucket] and "distance 0..inf" in str(form.visible)


def test_gaps_between_other_times_than_those_of_queries_and_keys():
    table = torch.randn(8, requires_grad=True)

    def program(x, ids, times, rel):
        late = times[:, :, None] + times[:, None] * 2
        gap = (late - times[:, None]).abs() // 10**6
        return F.silu(x @ x.transpose(1, 2) + rel[gap.clamp(max=7)]) @ x

    assert [type(b) for b in checked(program, table).biases] == [Dense]


def test_a_time_beyond_the_table_is_noticed():
    table = torch.randn(4, requires_grad=True)

    def program(x, ids, times, rel):
        gap = (times[:, :, None] - times[:, None, :]).abs()
        return F.silu(x @ x.transpose(1, 2) + rel[gap // 10]) @ x

    inputs = [*batch("right", 0)[:2], torch.arange(N).expand(B, N), table]
    module = traced(program, inputs)
    (form,) = attentions(module, inputs)
    assert isinstance(form, NormalForm) and [type(b) for b in form.biases] == [ByTime]
    assert compare(module, form, inputs) == "same"
    later = [*inputs[:2], inputs[2] * 100, table]
    with pytest.raises(IndexError):
        program(*later)
    (check,) = [c for c in form.checks if isinstance(c, GapAtMost)]
    values = dict(zip(module.graph.nodes, later, strict=False))
    assert check.most == 39 and not check.holds(values)


def test_a_single_time_is_compared_with_all_others():
    graph = torch.fx.Graph()
    query, key = (Times(graph.placeholder(axis), (Formula.axis(axis),)) for axis in (QUERY, KEY))
    check = GapAtMost(query, key, 5)
    for gaps, holds in (([3], True), ([3, 9], False), ([], True)):
        assert check.holds({query.node: torch.tensor([0]), key.node: torch.tensor(gaps)}) is holds


# --- torch's own -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"need_weights": True}, {"float_mask": True}, {"bias_kv": True}, {"zero": True}]
)
def test_multihead_attention(options):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(
        H * D, H, batch_first=True, add_bias_kv="bias_kv" in options, add_zero_attn="zero" in options
    )

    def program(x, ids, times):
        mask = ~causal(N)
        pad = ids == 0
        if "float_mask" in options:
            mask, pad = (torch.zeros(m.shape).masked_fill(m, -INF) for m in (mask, pad))
        result, _ = layer(x, x, x, key_padding_mask=pad, attn_mask=mask, need_weights="need_weights" in options)
        return result

    form = checked(program)
    assert form.opaque == 0 and len(form.heads) == 1


def test_target_attention():
    """One query per sequence."""

    def program(x, ids, times):
        q = x[:, -1:] * 2
        return (q @ x.transpose(1, 2)).masked_fill((ids == 0)[:, None], -1e9).softmax(-1) @ x

    def by_einsum(x, ids, times):
        s = torch.einsum("bd,bnd->bn", x[:, -1] * 2, x).masked_fill(ids == 0, -1e9)
        return torch.einsum("bn,bnd->bd", s.softmax(-1), x)

    for each in (program, by_einsum):
        assert "keys" in str(checked(each).visible)


def test_a_layer_is_no_attention():
    """Hidden units are no keys."""
    first, second = nn.Linear(H * D, 16), nn.Linear(16, H * D)

    def program(x, ids, times):
        return F.silu(x @ first.weight.T) @ second.weight.T

    inputs = batch("right", 0)
    assert attentions(traced(program, inputs), inputs) == []


def test_a_product_that_adds_to_its_result_is_no_attention():
    def program(x, ids, times):
        return torch.baddbmm(x, (x @ x.transpose(1, 2)).softmax(-1), x)

    inputs = batch("right", 0)
    assert attentions(traced(program, inputs), inputs) == []


def test_a_sum_over_one_side_alone_is_no_score():
    def program(x, ids, times):
        s = torch.einsum("bnd,bmde->bnm", x, torch.stack([x, x * 2], -1))
        return s.softmax(-1) @ x

    inputs = batch("right", 0)
    (found,) = attentions(traced(program, inputs), inputs)
    assert isinstance(found, Refused) and "no product of queries and keys" in str(found)


def test_several_products_feed_one_score():
    """As DeBERTa: one is the scores, the others are biases, with gradients."""

    def program(x, ids, times):
        s = x @ x.transpose(1, 2) + (x * 0.3) @ x.flip(1).transpose(1, 2)
        return s.masked_fill((ids == 0)[:, None], -1e9).softmax(-1) @ x

    assert len(checked(program).biases) == 1


def test_blind_queries_of_fused_attention_give_zero():
    def program(x, ids, times):
        return F.scaled_dot_product_attention(x, x, x, attn_mask=(ids != 0)[:, None] & (ids != 0)[:, :, None])

    assert checked(program).blind is Blindness.ZERO
