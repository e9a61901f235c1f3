"""Attention as people write it, and as an enemy would: anything between the QK and the PV product."""

from __future__ import annotations

from .draw import Draw, outer, slot
from .masks import hide, number, places, seen

# Scores; {x} are rows (B, N, D), {q} {k} projected.
SCORES = slot(
    "scores",
    {
        "transpose": "{q} @ {k}.transpose(1, 2)",
        "mT": "{q} @ {k}.mT",
        "einsum": "torch.einsum('bqd,bkd->bqk', {q}, {k})",
        "bmm": "torch.bmm({q}, {k}.permute(0, 2, 1))",
        "matmul-function": "torch.matmul({q}, {k}.transpose(-2, -1))",
        "baddbmm": "torch.baddbmm(torch.zeros(1, 1, 1), {q}, {k}.transpose(1, 2), beta=0.0, alpha=0.5)",
        "baddbmm-bias": "torch.baddbmm(torch.ones(1, N, N), {q}, {k}.transpose(1, 2), beta=0.5, alpha=0.5)",
        "keys-first": "({k} @ {q}.transpose(1, 2)).transpose(1, 2)",
        "scaled-queries": "({q} * 0.5) @ {k}.mT",
        "distance": "-torch.cdist({q}, {k})",
        "products": "({q}[:, :, None] * {k}[:, None]).sum(-1)",
    },
)
HEADS = slot(
    "heads",
    {
        "view": "{x}.view(B, N, H, D // H).transpose(1, 2)",
        "reshape": "{x}.reshape(B, N, H, -1).permute(0, 2, 1, 3)",
        "unflatten": "{x}.unflatten(-1, (H, D // H)).transpose(1, 2)",
        "split": "torch.stack({x}.split(D // H, -1), 1)",
        "chunk": "torch.stack({x}.chunk(H, dim=2), dim=1)",
    },
)

# What may happen to scores besides masks.
STEP = slot(
    "score-step",
    {
        "divide": "{s} / 2",
        "root": "{s} / D ** 0.5",
        "times": "{s} * 0.3",
        "negative": "{s} * -0.5",
        "neg": "-{s}",
        "floor-div": "torch.div({s} * 4, 2, rounding_mode='floor')",
        "trunc-div": "({s} * 3).div(1.5, rounding_mode='trunc')",
        "floor-divide": "({s} * 4).detach() // 2 + {s}",
        "add-alpha": "torch.add({s}, {s}, alpha=0.25)",
        "add-const": "{s} + 0.5",
        "add-number-alpha": "torch.add({s}, 2, alpha=0.5)",
        "sub-alpha": "torch.sub({s}, {s}.detach(), alpha=0.5)",
        "rsub": "1 - {s}",
        "rsub-alpha": "torch.rsub({s}, 1.0, alpha=2)",
        "half": "{s}.half().double()",
        "bfloat16": "{s}.to(torch.bfloat16).double()",
        "float": "{s}.float().double()",
        "int": "({s} * 3).long().double()",
        "byte": "({s} * 3).abs().byte().double()",
        "cap": "torch.tanh({s} / 5) * 5",
        "clamp": "{s}.clamp(-2, 2)",
        "clamp-far": "{s}.clamp(min=-1e30)",
        "relu": "{s}.relu()",
        "abs": "{s}.abs()",
        "less-max": "{s} - {s}.amax(-1, keepdim=True)",
        "less-max-detached": "{s} - {s}.max(-1, keepdim=True).values.detach()",
        "temperature": "{s} / temp",
        "per-query": "{s} * wts{q}",
        "per-key": "{s} * wts{k}",
        "add-per-query": "{s} + wts{q}",
        "add-per-key": "{s} + wts{k}",
        "by-lens": "{s} / lens.clamp(min=1){b}",
        "relative": "{s} + rel[torch.arange(N)[:, None] - torch.arange(N) + N - 1]",
        "relative-keys-first": "{s} + rel[torch.arange(N) - torch.arange(N)[:, None] + N - 1]",
        "relative-clamped": "{s} + rel[((torch.arange(N)[:, None] - torch.arange(N)).clamp(-2, 2) + 2) % (2 * N)]",
        "dense": "{s} + {A}",
        "dense-head": "{s} + {A} * sink[0]",
        "time": "{s} + Tb[((times[{qi}] - times[{ki}]).abs() // 10).clamp(max=63)]",
        "time-log": (
            "{s} + Tb[((times[{qi}] - times[{ki}]).abs().clamp(min=1).double().log() / 0.301).long().clamp(0, 63)]"
        ),
        "time-unclamped": "{s} + Tb[(times[{qi}] - times[{ki}]).abs() // 10]",
        "time-linear": "{s} - 0.01 * (times[{qi}] - times[{ki}]).abs()",
        "alibi": "{s} - (torch.arange(N)[:, None] - torch.arange(N)).abs() * 0.1",
        "pair-input": "{s} + {pairsf}",
        "position-table": "{s} + (x0 @ {P}.T){wide}",
        "floor": "{s}.floor()",
        "round": "{s}.round(decimals=1)",
        "square": "{s}.pow(2) * 0.1",
        "detached": "{s}.detach() + {s} * 0.5",
        "softplus": "F.softplus({s})",
        "zero": "{s} * 0.0",
        "nan-to-num": "{s}.nan_to_num()",
        "transposed-sum": "{s} + {s}.transpose(-1, -2)",
        "maximum": "torch.maximum({s}, torch.full((), -1.0))",
        "rolled-keys": "{s}.roll(1, -1)",
        "flipped-keys": "{s}.flip(-1)",
        "tril": "{s}.tril()",
        "sink": "{s} + sink[0]",
        "product": "{s} * (1 + {s}.tanh())",
        "product-left": "({s} * 0.5) * wts{k} + {s}",
        "normalised": "F.layer_norm({s}, ({s}.shape[-1],))",
        "double-sum": "{s} + {s}.logsumexp(-1, keepdim=True)",
        "query-sum": "{s} - {s}.sum(-1, keepdim=True) * 0.1",
        "standardised": "({s} - {s}.mean(-1, keepdim=True)) / ({s}.std(-1, keepdim=True, unbiased=False) + 1)",
        "times-lens": "{s} * lens{b} * 0.1",
        "per-pair-of-ids": "{s} + (ids[{qi}] == ids[{ki}]) * temp",
        "bias-by-id": "{s} + E[ids][..., 0][{ki}]",
        "distance-clamped": "{s} - (torch.arange(N)[:, None] - torch.arange(N)).clamp(min=0) * temp",
        "distance-root": "{s} - (torch.arange(N)[:, None] - torch.arange(N)).abs().double().sqrt() * temp",
        "float-then-scale": "({s}.float() * 0.3).double()",
        "half-scaled": "({s}.half() * 0.125).double()",
        "power-of-two": "{s} * 2.0 ** -(torch.arange(N)[:, None] - torch.arange(N)).abs()",
        "triangle-factor": "{s} * {tri}",
        "gated-by-keys": "{s} * (wts > 0.8){k}",
        "time-root": "{s} - (times[{qi}] - times[{ki}]).abs().double().sqrt() * 0.05",
        "time-signed": "{s} + Tb[((times[{qi}] - times[{ki}]) // 10).clamp(-10, 20) + 20]",
        "time-exp": "{s} + torch.exp(-(times[{qi}] - times[{ki}]).abs() / 30.0) * temp",
        "remainder": "{s} + rel[(torch.arange(N)[:, None] * 3 + torch.arange(N)) % N]",
        "gathered-relative": (
            "{s} + (x0 @ {P}.T).gather(-1, (torch.arange(N)[:, None] - torch.arange(N)).abs().expand(B, N, N)){wide}"
        ),
        "gathered-by-position": "{s} + (x0 @ {P}.T).gather(-1, pos[:, None].expand(B, N, N)){wide}",
        "upcast": "torch.max({s}.float(), torch.full((), torch.finfo(torch.float32).min).float()).double()",
    },
)
HARMLESS = ("divide", "root", "times", "times", "root", "relative", "alibi", "dense", "time", "add-per-key")

ACTIVATION = slot(
    "activation",
    {
        "softmax": "{s}.softmax(-1)",
        "function": "F.softmax({s}, dim=-1)",
        "dim-number": "torch.softmax({s}, {last})",
        "float": "{s}.softmax(-1, dtype=torch.float32).double()",
        "half": "F.softmax({s}, -1, dtype=torch.float16).double()",
        "bfloat16": "torch.softmax({s}, -1, dtype=torch.bfloat16).double()",
        "double": "{s}.softmax(-1, dtype=torch.float64)",
        "upcast": "{s}.float().softmax(-1).to({s}.dtype)",
        "log": "{s}.log_softmax(-1).exp()",
        "log-double": "F.log_softmax({s}, -1, dtype=torch.float64).exp()",
        "by-hand": "{s}.exp() / {s}.exp().sum(-1, keepdim=True)",
        "logsumexp": "({s} - {s}.logsumexp(-1, keepdim=True)).exp()",
        "stable": (
            "({s} - {s}.amax(-1, keepdim=True)).exp() / ({s} - {s}.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)"
        ),
        "queries": "{s}.softmax(-2)",
        "silu": "F.silu({s})",
        "silu-n": "F.silu({s}) / N",
        "silu-lens": "F.silu({s}) / lens.clamp(min=1){b}",
        "relu": "{s}.relu()",
        "relu-squared": "{s}.relu().square()",
        "sigmoid": "{s}.sigmoid()",
        "tanh": "{s}.tanh()",
        "exp": "({s} - 3).exp()",
        "gelu": "F.gelu({s})",
        "none": "{s} * 0.1",
        "sinks": "torch.cat([{s}, sink[0].expand({s}.shape[:-1])[..., None]], -1).softmax(-1)[..., :-1]",
        "softmin": "F.softmin({s}, -1)",
        "sparse-by-top": (
            "torch.where({s} >= {s}.topk(min(2, {s}.shape[-1]), -1).values[..., -1:], {s}, -1e9).softmax(-1)"
        ),
        "elu": "F.elu({s}) + 1",
    },
)
COMMON_ACTIVATION = ("softmax", "softmax", "function", "dim-number", "silu", "silu-n", "upcast", "sigmoid", "relu")

PROBABILITY = slot(
    "probability",
    {
        "keys": "{p} * {v}{k}",
        "queries": "{p} * {v}{q}",
        "fill": "{p}.masked_fill(~{a}, 0.0)",
        "times": "{p} * {n}",
        "times-half": "{p} * ({n} * 0.5)",
        "nan-to-num": "{p}.nan_to_num()",
        "nan-to-num-zero": "torch.nan_to_num({p}, nan=0.0)",
        "half": "{p}.half().double()",
        "bfloat16": "{p}.to(torch.bfloat16).double()",
        "int": "({p} * 9).long().double()",
        "byte": "({p} * 9).byte().double()",
        "scaled": "{p} * 0.5",
        "floor-div": "({p} * 7).div(2, rounding_mode='floor')",
        "renormalised": "{p} / {p}.sum(-1, keepdim=True)",
        "renormalised-mask": "({p} * {a}.double()) / (({p} * {a}.double()).sum(-1, keepdim=True) + 1e-6)",
        "by-lens": "{p} / lens.clamp(min=1){b}",
        "tril": "{p}.tril()",
        "triangle": "{p} * {tri}",
        "dropout": "F.dropout({p}, 0.0)",
        "dropout-off": "F.dropout({p}, 0.5, training=False)",
        "add": "{p} + 0.1",
        "square": "{p}.square()",
        "weights": "{p} * wts{k}",
        "where": "torch.where({a}, {p}, 0.0)",
        "where-other": "torch.where({a}, {p}, 0.01)",
        "add-alpha": "torch.add({p}, {p}, alpha=0.5)",
        "subtract-mean": "{p} - {p}.mean(-1, keepdim=True)",
        "transposed": "{p}.transpose(-1, -2)",
        "clamp": "{p}.clamp(min=1e-3)",
        "pairs": "{p} * {pairsf}",
        "detached": "{p}.detach()",
        "log-exp": "({p} + 1e-9).log().exp()",
        "max-only": "{p} * ({p} == {p}.amax(-1, keepdim=True))",
        "queries-fill": "{p}.masked_fill(~{v}{q}, 0.0)",
        "clamp-max": "{p}.clamp(max=2.0)",
        "per-query-sum": "{p} / {p}.detach().sum(-1, keepdim=True).clamp(min=1e-6)",
        "by-count": "{p} / {a}.expand({p}.shape).sum(-1, keepdim=True).clamp(min=1)",
        "times-lens-keys": "{p} * (torch.arange(N) < lens{b})",
        "eye-added": "{p} + torch.eye(N)",
        "both-ways": "({p} + {p}.transpose(-1, -2)) * 0.5",
        "float": "{p}.float().double()",
        "rolled": "{p}.roll(1, -1)",
        "pow": "{p}.abs().pow(0.5)",
        "isnan": "torch.where({p}.isnan(), 0.0, {p})",
    },
)
GENTLE = ("fill", "keys", "queries", "nan-to-num", "dropout", "scaled", "times")
APPLY = slot(
    "values",
    {
        "matmul": "{p} @ {v}",
        "einsum": "torch.einsum('...qk,...kd->...qd', {p}, {v})",
        "function": "torch.matmul({p}, {v})",
        "products": "({p}.unsqueeze(-1) * {v}.unsqueeze(-3)).sum(-2)",
        "transposed": "({v}.mT @ {p}.mT).mT",
        # Two readers of one draw: what they differ by is zero, whatever was drawn.
        "thinned": "(lambda w: {p} @ {v} + w @ {v} - torch.einsum('...qk,...kd->...qd', w, {v}))(F.dropout({p}, 0.5))",
        "thinned-sum": (
            "(lambda w: {p} @ {v} + w @ torch.ones_like({v}) - w.sum(-1, keepdim=True))(F.dropout({p}, 0.5))"
        ),
    },
)


def projected(g: Draw, x: str, by: str) -> str:
    return f"({x} @ {by})" if g.chance(0.7) else x


def extra(g: Draw, heads: bool) -> dict[str, str]:
    """Places of one number per query, per key, per sequence."""
    front = ":, None, " if heads else ":, "
    return {
        "q": f"[{front}:, None]",
        "k": f"[{front}None, :]",
        "b": "[:, None, None, None]" if heads else "[:, None, None]",
        "qi": f"{front}:, None", "ki": f"{front}None, :", "A": outer(g.columns("A", 2)), "P": outer(g.columns("P")),
        "tri": outer(g.columns("tri", 2)), "wide": "[:, None]" if heads else "",
        "pairsf": "pairsf[:, None]" if heads else "pairsf",
        "last": "3" if heads else "2",
    }  # fmt: skip


# Where keys come from; values come from there, or from the rows themselves.
KEYS_FROM = slot(
    "keys-from",
    {
        "rows": "{x}",
        "moved": "{x}.roll(1, 1)",
        "flipped": "{x}.flip(1)",
        "shifted": "F.pad({x}, (0, 0, 1, 0))[:, :-1]",
        "zeroed": "{x} * {v}[..., None]",
        "entry": "x0",
        "detached": "{x}.detach()",
        "normalised": "F.layer_norm({x}, (D,))",
        "summed": "({x} * {v}[..., None]).cumsum(1)",
        "ids": "F.embedding(ids, E2)",
        "features": "raw @ Kw",
        "positions": "{x}[:, :1] + F.embedding(ids, E2)",
    },
)


def attention(g: Draw, x: str, v: str) -> str:
    """(B, N, D) from rows; `v` says which count."""
    kind = g.word("attend", ATTEND, ("by-hand",), 0.5)
    return kind(g, x, v)


def by_hand(g: Draw, x: str, v: str) -> str:
    heads = (
        g.sizes.H > 1 and g.sizes.D % g.sizes.H == 0 and (g.chance(0.4) or g.forced("heads")) and not g.forced("scores")
    )
    y = g.let("y", g.word("keys-from", KEYS_FROM, ("rows",), 0.3).format(x=x, v=v))
    q, k, u = projected(g, x, "Q"), projected(g, y, "Kw"), projected(g, g.one(x, y), "Vw")
    if heads:
        head = g.word("heads", HEADS, ("view", "reshape"), 0.5)
        q, k, u = (g.let("h", head.format(x=outer(t))) for t in (q, k, u))
        s = g.let("s", f"{q} @ {k}.transpose(-1, -2)")
    else:
        s = g.let(
            "s", g.word("scores", SCORES, ("transpose", "mT", "einsum", "bmm"), 0.4).format(q=outer(q), k=outer(k))
        )
    p = weights(g, s, v, heads)
    o = g.let("o", g.word("values", APPLY, ("matmul", "matmul", "einsum"), 0.4).format(p=p, v=outer(u)))
    return g.let("o", f"{o}.transpose(1, 2).reshape(B, N, D)") if heads else o


def weights(g: Draw, s: str, v: str, heads: bool) -> str:
    """From scores to what multiplies values: masks and steps in any order, an activation, what follows it."""
    a = seen(g, v, heads)
    todo = ["hide"] + ["step"] * (g.one(0, 1, 1, 2) if not g.forced("score-step") else 1)
    if g.hostile(0.3):
        todo.append("hide")
    if g.hostile(0.12) and not g.forced("hide", "minus-infinity"):
        todo.remove("hide")
    g.random.shuffle(todo)
    for what in todo:
        if what == "hide":
            s = hide(g, s, a, v, heads)
            a = a if g.chance(0.7) else seen(g, v, heads)
        else:
            text = g.word("score-step", STEP, HARMLESS, 0.6)
            s = g.let("s", text.format(s=s, **extra(g, heads)))
    p = g.let("p", g.word("activation", ACTIVATION, COMMON_ACTIVATION, 0.5).format(s=s, **extra(g, heads)))
    while g.chance(0.3) or g.forced("probability"):
        text = g.word("probability", PROBABILITY, GENTLE, 0.6)
        n = number(g, a) if "{n}" in text else ""
        p = g.let("p", text.format(p=p, v=v, a=outer(a), n=n, **extra(g, heads)))
    return p


# --- ready-made attention ---------------------------------------------------------------------------------

SDPA = slot(
    "sdpa",
    {
        "bool": "F.scaled_dot_product_attention({q}, {k}, {u}, attn_mask={a})",
        "causal": "F.scaled_dot_product_attention({q}, {k}, {u}, is_causal=True)",
        "scale": "F.scaled_dot_product_attention({q}, {k}, {u}, attn_mask={a}, scale=0.3)",
        "float": (
            "F.scaled_dot_product_attention({q}, {k}, {u}, attn_mask=torch.zeros({a}.shape).masked_fill(~{a}, {c}))"
        ),
        "float-bias": "F.scaled_dot_product_attention({q}, {k}, {u}, attn_mask=torch.where({a}, 0.3, {c}))",
        "wide": "F.scaled_dot_product_attention({q}, {k}, {u}, attn_mask={a}.expand(B, {h}, N, N))",
        "grouped": "F.scaled_dot_product_attention({q}, {k}[:, :1], {u}[:, :1], attn_mask={a}, enable_gqa=True)",
        "dropout-zero": "F.scaled_dot_product_attention({q}, {k}, {u}, {a}, 0.0, False)",
    },
)


def sdpa(g: Draw, x: str, v: str) -> str:
    several = g.sizes.D % g.sizes.H == 0 and g.sizes.H > 1
    a = seen(g, v, heads=True)
    shape = "view(B, N, H, D // H).transpose(1, 2)" if several else "unsqueeze(1)"
    q, k, u = (g.let("h", f"{outer(projected(g, x, by))}.{shape}") for by in ("Q", "Kw", "Vw"))
    text = g.word("sdpa", SDPA, ("bool", "bool", "causal", "scale"), 0.6)
    c = g.word("minus-infinity", {"inf": "float('-inf')", "1e9": "-1e9", "1e4": "-1e4"})
    o = g.let("o", text.format(q=q, k=k, u=u, a=outer(a), c=c, h="H" if several else "1"))
    return g.let("o", f"{o}.transpose(1, 2).reshape(B, N, D)")


_MHA = (
    "F.multi_head_attention_forward({x}.transpose(0, 1), {x}.transpose(0, 1), {x}.transpose(0, 1), D, {h}, Win, Bin,"
    " None, None, False, 0.0, O, off, key_padding_mask={pad}, need_weights={need}, attn_mask={mask})[0].transpose(0, 1)"
)
MHA = slot("mha", {
    "padding": (False, "~{v}", "None"), "causal": (False, "None", "~{tri}"), "both": (False, "~{v}", "~{tri}"),
    "weights": (True, "~{v}", "~{tri}"), "float-padding": (False, "torch.zeros(B, N).masked_fill(~{v}, -1e9)", "None"),
    "float-causal": (False, "None", "{trif}"),
    "float-both": (False, "torch.zeros(B, N).masked_fill(~{v}, -torch.inf)", "{trif}"),
})  # fmt: skip


def mha(g: Draw, x: str, v: str) -> str:
    need, pad, mask = g.word("mha", MHA, ("padding", "both", "causal"), 0.5)
    at = places(g, v, False)
    h = "H" if g.sizes.D % g.sizes.H == 0 else "1"
    return g.let("o", _MHA.format(x=x, h=h, need=need, pad=pad.format(**at), mask=mask.format(**at)))


CROSS = slot(
    "cross",
    {
        "keys": "(cids != 0)[:, None, :]",
        "both": "(cids != 0)[:, None, :] & {v}[:, :, None]",
        "band": "(cids != 0)[:, None, :] & (torch.arange(N)[:, None] >= torch.arange(M))",
        "window": "(cids != 0)[:, None, :] & ((torch.arange(N)[:, None] - torch.arange(M)).abs() <= 2)",
        "triangle": "torch.ones(N, M, dtype=torch.bool).tril() & (cids != 0)[:, None, :]",
        "all": "torch.ones(B, N, M, dtype=torch.bool)",
        "first": "(torch.arange(M) < 2) & (cids != 0)[:, None, :]",
    },
)


def cross(g: Draw, x: str, v: str) -> str:
    """Rows attend to a second sequence."""
    y = g.let("y", g.one("F.embedding(cids, E2)", "F.embedding(cids, E)", "E2[cids] * (cids != 0)[..., None]"))
    a = g.let("a", g.word("cross", CROSS, ("keys", "keys", "both"), 0.6).format(v=v))
    s = g.let("s", f"{outer(projected(g, x, 'Q'))} @ {y}.transpose(1, 2)")
    s = hide_cross(g, s, a)
    p = g.let("p", f"{s}.{g.one('softmax(-1)', 'softmax(-1)', 'sigmoid()')}")
    return g.let("o", f"{p} @ {y}")


def hide_cross(g: Draw, s: str, a: str) -> str:
    c = g.one("float('-inf')", "-1e9", "-1e4")
    return g.let(
        "s", g.one(f"{s}.masked_fill(~{a}, {c})", f"torch.where({a}, {s}, {c})", f"{s} + (~{a}).double() * -1e9")
    )


def target(g: Draw, x: str, v: str) -> str:
    """Every row attends to the rows of its sequence by one candidate: one query."""
    c = g.let("c", g.one("F.embedding(label, E2)", "F.embedding(label, E)"))
    s = g.let("s", f"({x} @ {c}.unsqueeze(-1)).squeeze(-1)")
    s = g.let(
        "s",
        g.one(f"{s}.masked_fill(~{v}, -1e9)", f"torch.where({v}, {s}, float('-inf'))", f"{s} + (~{v}).double() * -1e4"),
    )
    p = g.let("p", f"{s}.softmax({g.one('1', '-1')})")
    return g.let("o", f"({p}.unsqueeze(1) @ {x}).expand(B, N, D)")


def folded(g: Draw, x: str, v: str) -> str:
    """Heads in the batch, masks repeated for them."""
    h = "H" if g.sizes.D % g.sizes.H == 0 else "1"
    fold, widen = g.one(
        (f"torch.cat({{x}}.chunk({h}, -1), 0)", f"{{a}}.repeat({h}, 1, 1)"),
        (f"{{x}}.view(B, N, {h}, -1).transpose(1, 2).flatten(0, 1)", f"{{a}}.repeat_interleave({h}, 0)"),
        (f"{{x}}.view(B, N, {h}, -1).permute(2, 0, 1, 3).reshape({h} * B, N, -1)", f"{{a}}.repeat({h}, 1, 1)"),
    )
    q, k, u = (g.let("h", fold.format(x=outer(projected(g, x, by)))) for by in ("Q", "Kw", "Vw"))
    a = g.let("b", widen.format(a=f"{outer(seen(g, v, False))}.expand(B, N, N)"))
    c = g.one("float('-inf')", "-1e9", "-2.0**32 + 1")
    s = g.let("s", g.one(f"torch.bmm({q}, {k}.mT).masked_fill(~{a}, {c})", f"torch.where({a}, {q} @ {k}.mT / 2, {c})"))
    o = g.let("o", f"{s}.softmax(-1) @ {u}")
    if "torch.cat" in fold:
        return g.let("o", f"torch.cat({o}.split(B, 0), -1)")
    if "flatten" in fold:
        return g.let("o", f"{o}.view(B, {h}, N, -1).transpose(1, 2).reshape(B, N, D)")
    return g.let("o", f"{o}.view({h}, B, N, -1).permute(1, 2, 0, 3).reshape(B, N, D)")


def memory(g: Draw, x: str, v: str) -> str:
    """Keys have a row more than queries, in front or behind, which all may see."""
    front = g.chance(0.5)
    token = g.one("w.expand(B, 1, D)", "F.embedding(label, E2)[:, None]", f"{x}.mean(1, keepdim=True)")
    one = "torch.ones(B, 1, dtype=torch.bool)"
    y = g.let("y", f"torch.cat([{token}, {x}], 1)" if front else f"torch.cat([{x}, {token}], 1)")
    a = g.let("b", f"torch.cat([{one}, {v}], 1)" if front else f"torch.cat([{v}, {one}], 1)")
    a = f"{a}[:, None, :]"
    if g.chance(0.4):
        a = f"({a} & torch.ones(N, N + 1, dtype=torch.bool).tril({g.one('0', '1')}))"
    s = g.let("s", f"{outer(projected(g, x, 'Q'))} @ {y}.mT")
    s = g.let("s", g.one(f"{s}.masked_fill(~{a}, -1e9)", f"torch.where({a}, {s}, float('-inf'))"))
    return g.let("o", f"{s}.softmax(-1) @ {y}")


# Rows of {x}, which of them count by {v}, and how many there are: who asks, or who is asked.
SIDE = slot("side", {
    "rows": ("{x}", "{v}", "N"), "but-first": ("{x}[:, 1:]", "{v}[:, 1:]", "(N - 1)"),
    "but-last": ("{x}[:, :-1]", "{v}[:, :-1]", "(N - 1)"), "flipped": ("{x}.flip(1)", "{v}.flip(1)", "N"),
    "first-half": ("{x}.chunk(2, 1)[0]", "{v}.chunk(2, 1)[0]", "((N + 1) // 2)"),
    "second-part": ("{x}.tensor_split(2, 1)[1]", "{v}.tensor_split(2, 1)[1]", "(N // 2)"),
    "every-other": ("{x}[:, ::2]", "{v}[:, ::2]", "((N + 1) // 2)"), "moved": ("{x}.roll(1, 1)", "{v}.roll(1, 1)", "N"),
    "one-more": ("torch.cat([{x}[:, :1], {x}], 1)", "torch.cat([{v}[:, :1], {v}], 1)", "(N + 1)"),
    "twice": ("torch.cat([{x}, {x} @ Q], 1)", "torch.cat([{v}, {v}], 1)", "(2 * N)"),
    "interleaved": (
        "torch.stack([{x}, {x} @ Q], 2).flatten(1, 2)", "torch.stack([{v}, {v}], 2).flatten(1, 2)", "(2 * N)",
    ),
    "repeated": ("{x}.repeat_interleave(2, 1)", "{v}.repeat_interleave(2, 1)", "(2 * N)"),
    "last-column": ("{x}[:, -1:]", "{v}[:, -1:]", "1"),
    "middle": ("{x}[:, N // 2:N // 2 + 1]", "{v}[:, N // 2:N // 2 + 1]", "1"),
    "last": ("{x}[torch.arange(B), last][:, None]", "torch.ones(B, 1, dtype=torch.bool)", "1"),
    "slots": ("{x}.gather(1, idx[..., None].expand(B, K, D))", "{v}.gather(1, idx)", "K"),
    "permuted": ("{x}[:, perm]", "{v}[:, perm]", "N"),
    "first-expanded": ("{x}[:, :1].expand(B, N, D)", "{v}[:, :1].expand(B, N)", "N"),
    "other-sequence": ("F.embedding(cids, E2)", "(cids != 0)", "M"),
    "shared": ("E2[shared].expand(B, K, D)", "torch.ones(B, K, dtype=torch.bool)", "K"),
})  # fmt: skip


def between(g: Draw, x: str, v: str) -> str:
    """Some rows ask others: each side is cut out of the rows, or joined from them, in its own way."""
    asks, asked = (g.word("side", SIDE) for _ in range(2))
    (q, mq), (k, mk) = ((g.let("y", t[0].format(x=x)), g.let("b", t[1].format(v=v))) for t in (asks, asked))
    far = f"torch.arange({asks[2]})[:, None] - torch.arange({asked[2]})"
    a = g.let("b", g.one(
        f"{mk}[:, None]", f"{mk}[:, None] & {mq}[:, :, None]", f"{mk}[:, None] & ({far} >= 0)",
        f"{mk}[:, None] & (({far}).abs() <= 1)",
    ))  # fmt: skip
    s = g.let("s", f"{outer(projected(g, q, 'Q'))} @ {outer(projected(g, k, 'Kw'))}.mT")
    p = g.let("p", g.one(
        f"{s}.masked_fill(~{a}, -1e9).softmax(-1)", f"torch.where({a}, {s}, float('-inf')).softmax(-1)",
        f"F.silu({s}) * {a}", f"{s}.sigmoid() * {a} / N",
    ))  # fmt: skip
    o = g.let("o", f"{p} @ {k}")
    o = g.let("o", f"{o} * {mq}[..., None]") if g.chance(0.5) else o
    return g.let("o", g.one(f"torch.cat([{o}, {x}], 1)[:, :N]", f"{o}.sum(1, keepdim=True).expand(B, N, D)"))


ATTEND = slot("attend", {
    "by-hand": by_hand, "sdpa": sdpa, "mha": mha, "cross": cross, "target": target, "folded": folded,
    "memory": memory, "between": between,
})  # fmt: skip
