"""Masks of every kind: which positions count, how that is spelled, and how it is laid over scores."""

from __future__ import annotations

from collections.abc import Callable

from .draw import Draw, outer, slot

Text = Callable[[Draw], str]

# (B, N) of bool, true where there is an item; {pad} is the id that stands for none.
VALID = slot(
    "valid",
    {
        "ne": "ids != {pad}",
        "gt": "ids > {pad}",
        "not-eq": "~(ids == {pad})",
        "ne-function": "torch.ne(ids, {pad})",
        "logical-not": "torch.logical_not(ids.eq({pad}))",
        "less-than-lens": "torch.arange(N) < lens[:, None]",
        "lens-greater": "lens.unsqueeze(1) > torch.arange(N).unsqueeze(0)",
        "lens-at-the-end": "torch.arange(N) >= N - lens[:, None]",
        "lens-at-least-one": "torch.arange(N) < lens.clamp(min=1)[:, None]",
        "lens-less-one": "torch.arange(N) < (lens - 1)[:, None]",
        "lens-not-more": "torch.arange(N) <= lens[:, None]",
        "bfloat16-arange": "torch.arange(N, dtype=torch.bfloat16) < lens[:, None]",
        "int8-arange": "torch.arange(N, dtype=torch.int8) < lens[:, None]",
        "arange-twice": "torch.arange(0, 2 * N, 2) < 2 * lens[:, None]",
        "bool": "mask",
        "float-above-half": "maskf > 0.5",
        "float-bool": "maskf.bool()",
        "float-ne": "maskf != 0",
        "int-one": "maski == 1",
        "int-bool": "maski.to(torch.bool)",
        "byte": "masku.bool()",
        "byte-ne": "masku != 0",
        "byte-wraps": "(masku - 1) == 0",
        "byte-wraps-below": "(masku - 2) > 100",
        "int-negative": "maski - 1 >= 0",
        "until-the-last": "(ids != {pad}).flip(1).cumsum(1).flip(1) > 0",
        "from-the-first": "(ids != {pad}).cumsum(1) > 0",
        "first-two": "(ids != {pad}).cumsum(1) <= 2",
        "any-mask": "(ids != {pad}) | mask",
        "both": "(ids != {pad}) & mask",
        "xor": "(ids != {pad}) ^ mask",
        "except": "(ids != {pad}) & ~(ids == 2)",
        "left-shift": "F.pad((ids != {pad})[:, 1:], (0, 1))",
        "right-shift": "F.pad((ids != {pad})[:, :-1], (1, 0), value=True)",
        "rolled": "(ids != {pad}).roll(1, 1)",
        "flipped": "(ids != {pad}).flip(1)",
        "first-always": "torch.cat([torch.ones(B, 1, dtype=torch.bool), (ids != {pad})[:, 1:]], 1)",
        "features-any": "(feats != 0).any(-1)",
        "features-sum": "feats.abs().sum(-1) > 0",
        "labelled": "tgt != 0",
        "labels": "lab >= 0",
        "weighted": "wts > 0",
        "one-minus": "(1 - (ids == {pad}).long()).bool()",
        "product": "((ids != {pad}) * (ids != 1)) > 0",
        "sum-of-bools": "((ids != {pad}).long() + mask.long()) > 1",
        "bool-plus-bool": "((ids != {pad}) + mask)",
        "where": "torch.where(ids == {pad}, False, True)",
        "sign": "(ids - {pad}).abs().sign() > 0",
        "clamped": "(ids - {pad}).abs().clamp(max=1).bool()",
        "floor-of-half": "(ids != {pad}).double().div(2, rounding_mode='floor') >= 0",
        "halved": "(ids != {pad}).double().div(2) > 0.25",
        "truncated": "(maskf * 0.5).long() == 0",
        "integer-half": "(ids != {pad}).long().div(1, rounding_mode='floor') > 0",
        "minimum": "torch.minimum(maski, (ids != {pad}).long()) > 0",
        "not-in": "~torch.isin(ids, torch.full((1,), {pad}))",
        "one-hot": "~F.one_hot(ids, V)[..., {pad}].bool()",
        "any-of-pairs": "pairs.any(-1) & (ids != {pad})",
        "time-passes": "(times > 5) & (ids != {pad})",
        "twice-cast": "(ids != {pad}).half().to(torch.uint8).bool()",
        "count-left": "lens[:, None] - torch.arange(N) > 0",
        "square": "torch.arange(N)[None, :].expand(B, N).lt(lens[:, None])",
        "last-column": "(ids != {pad})[:, -1:] | mask",
        "narrow-expand": "(torch.arange(N) < 3).expand(B, N) & (ids != {pad})",
        "one-row-triangle": "torch.ones(1, N, dtype=torch.bool).tril(2) & (ids != {pad})",
        "activations": "{x}.abs().sum(-1) > 0",
        "activations-sign": "{x}.abs().sum(-1).sign().bool()",
        "activations-any": "({x} != 0).any(-1)",
        "activations-large": "{x}.detach()[..., 0] > 0",
    },
)
COMMON_VALID = ("ne", "ne", "gt", "not-eq", "less-than-lens", "bool", "float-bool", "int-one", "left-shift", "byte")


def valid(g: Draw) -> str:
    """A fresh (B, N) mask."""
    usual = COMMON_VALID if g.sizes.pad == 0 else tuple(v for v in COMMON_VALID if v != "gt")
    return g.let("m", g.word("valid", VALID, usual, 0.6).format(pad=g.sizes.pad, x=g.latest("x")))


# A bool mask as numbers: 1 where true.
NUMBER = slot(
    "number",
    {
        "double": "{m}.double()",
        "float": "{m}.float()",
        "half": "{m}.half()",
        "bfloat16": "{m}.to(torch.bfloat16)",
        "long": "{m}.long()",
        "byte": "{m}.byte()",
        "int8": "{m}.to(torch.int8)",
        "times-one": "({m} * 1)",
        "type-as": "{m}.type(torch.float64)",
        "one-minus": "(1 - (~{m}).double())",
        "one-minus-byte": "(1 - (~{m}).byte())",
        "where": "torch.where({m}, 1.0, 0.0)",
        "cast-twice": "{m}.half().double()",
        "minus-minus": "(-(-{m}.double()))",
        "floored": "{m}.double().div(1, rounding_mode='floor')",
        "squared": "{m}.double().pow(2)",
        "filled": "torch.ones({m}.shape).masked_fill(~{m}, 0.0)",
        "byte-back": "{m}.double().byte().double()",
        "zeros-like": "torch.zeros({m}.shape).masked_fill({m}, 1.0)",
    },
)


def number(g: Draw, m: str) -> str:
    return g.word("number", NUMBER, ("double", "double", "long", "float"), 0.5).format(m=outer(m))


# --- masks of pairs: (…, N, N) of bool, true where a query sees a key -------------------------------------

# {v} a (B, N) mask; {q} and {k} index it as queries and as keys, behind heads where there are any.
SEEN = slot(
    "seen",
    {
        "keys": "{v}[{k}]",
        "causal": "{tri}",
        "causal-keys": "{tri} & {v}[{k}]",
        "both-sides": "{v}[{k}] & {v}[{q}]",
        "causal-both": "{tri} & {v}[{k}] & {v}[{q}]",
        "ones-tril": "torch.ones(N, N, dtype=torch.bool).tril()",
        "ones-tril-keys": "torch.ones(N, N).tril().bool() & {v}[{k}]",
        "arange": "(torch.arange(N)[:, None] >= torch.arange(N)) & {v}[{k}]",
        "arange-bfloat16": (
            "(torch.arange(N, dtype=torch.bfloat16)[:, None] >= torch.arange(N, dtype=torch.bfloat16)) & {v}[{k}]"
        ),
        "arange-int8": "(torch.arange(N, dtype=torch.int8)[:, None] >= torch.arange(N, dtype=torch.int8)) & {v}[{k}]",
        "strict": "(torch.arange(N)[:, None] > torch.arange(N)) & {v}[{k}]",
        "window": "((torch.arange(N)[:, None] - torch.arange(N)).abs() <= 2) & {v}[{k}]",
        "causal-window": "{tri} & (torch.arange(N)[:, None] - torch.arange(N) < 3) & {v}[{k}]",
        "band": "torch.ones(N, N, dtype=torch.bool).tril(1).triu(-2) & {v}[{k}]",
        "future": "torch.ones(N, N, dtype=torch.bool).triu() & {v}[{k}]",
        "one-row": "torch.ones(1, N, dtype=torch.bool).tril(2) & {v}[{k}]",
        "one-column": "torch.ones(N, 1, dtype=torch.bool).tril() & {v}[{k}]",
        "one-row-arange": "(torch.arange(N)[None, :] < 3) & {v}[{k}]",
        "not-self": "~torch.eye(N, dtype=torch.bool) & {v}[{k}]",
        "self-or-key": "torch.eye(N, dtype=torch.bool) | {v}[{k}]",
        "pairs": "{pairs}",
        "pairs-keys": "{pairs} & {v}[{k}]",
        "pairs-causal": "{pairs} & {tri}",
        "pairs-window": "{pairs} & ((torch.arange(N)[:, None] - torch.arange(N)).abs() <= 2) & {v}[{k}]",
        "pairs-float": "({pairsf} * {tri}) > 0",
        "equal-times": "(times[{q}] // 20 == times[{k}] // 20) & {v}[{k}]",
        "earlier": "(times[{q}] >= times[{k}]) & {v}[{k}]",
        "product": "({v}.double()[{q}] * {v}.double()[{k}]).bool()",
        "tril-of-keys": "{v}[{k}].expand({full}).tril()",
        "tril-of-bytes": "{v}.byte()[{k}].expand({full}).tril() != 0",
        "queries": "{v}[{q}].expand({full})",
        "first-key": "{v}[{k}] | (torch.arange(N) == 0)",
        "prefix": "({tri} | (torch.arange(N) < 2)) & {v}[{k}]",
        "blocks": "(torch.arange(N)[:, None] // 2 == torch.arange(N) // 2) & {v}[{k}]",
        "counted": "{v}.cumsum(1)[{q}] >= {v}.cumsum(1)[{k}]",
        "sorted-positions": "(pos[{q}] >= pos[{k}]) & {v}[{k}]",
        "buffer": "({trif} == 0) & {v}[{k}]",
        "transposed": "{tri}.T & {v}[{k}]",
        "flipped": "{tri}.flip(0) & {v}[{k}]",
        "same-or-before": "(ids[{q}] == ids[{k}]) | ({tri} & {v}[{k}])",
        "not-same-id": "(ids[{q}] != ids[{k}]) & {v}[{k}]",
        "lens-of-query": "(torch.arange(N) < lens[{b}]) & (torch.arange(N)[:, None] < lens[{b}])",
        "strided": "((torch.arange(N)[:, None] - torch.arange(N)) % 2 == 0) & {tri} & {v}[{k}]",
        "dilated": "((torch.arange(N)[:, None] - torch.arange(N)) % 3 == 0) & {v}[{k}]",
        "one-step": "(torch.arange(N)[:, None] - torch.arange(N) == 1) & {v}[{k}]",
        "sum-below": "(torch.arange(N)[:, None] + torch.arange(N) < N) & {v}[{k}]",
        "halves": "((torch.arange(N)[:, None] < N // 2) == (torch.arange(N) < N // 2)) & {v}[{k}]",
        "ones-tril-lower": "torch.ones(N, N, dtype=torch.bool).tril(-1) | torch.eye(N, dtype=torch.bool) & {v}[{k}]",
        "keys-rolled": "{v}.roll(1, 1)[{k}]",
        "queries-or-keys": "{v}[{k}] | {v}[{q}]",
        "byte-product": "({v}.byte()[{q}] * {v}.byte()[{k}] * {tri}.byte()).bool()",
        "byte-wraps": "({v}.byte()[{q}] + {v}.byte()[{k}] * 255) == 0",
        "lens-window": "(torch.arange(N)[:, None] - torch.arange(N) < lens[{b}]) & {tri} & {v}[{k}]",
        "time-window": "((times[{q}] - times[{k}]).abs() < 25) & {v}[{k}]",
        "cat-of-parts": "torch.cat([torch.ones(N, 1, dtype=torch.bool), {tri}[:, 1:]], 1) & {v}[{k}]",
        "trif-finite": "torch.isfinite({trif}) & {v}[{k}]",
        "int-triangle": "({tri}.long() * {v}.long()[{k}]).bool()",
        "activations": "({x}.abs().sum(-1) != 0)[{k}]",
        "activations-both": "({x}.abs().sum(-1).sign()[{k}] * {x}.abs().sum(-1).sign()[{q}]).bool()",
        "either": "torch.logical_or({tri}, {v}[{k}])",
        "diagonal-set": "torch.zeros(N, N).diagonal_scatter(torch.ones(N)).bool() | {v}[{k}]",
        "segments": "(({v}.cumsum(1) // 2)[{q}] == ({v}.cumsum(1) // 2)[{k}]) & {v}[{k}]",
        "given-positions": "((pos[{q}] - pos[{k}]).abs() <= 2) & {v}[{k}]",
    },
)
COMMON_SEEN = ("keys", "keys", "causal", "causal-keys", "causal-keys", "both-sides", "ones-tril-keys", "arange")


def seen(g: Draw, v: str, heads: bool) -> str:
    name = "ah" if heads else "a"
    before = [line.name for line in g.lines if line.name.rstrip("0123456789") == name]
    if before and g.chance(0.3) and not g.forced("seen"):
        return g.one(*before)  # layers share their masks
    text = g.word("seen", SEEN, COMMON_SEEN, 0.6)
    return g.let(name, text.format(**places(g, v, heads)))


def places(g: Draw, v: str, heads: bool) -> dict[str, str]:
    """How a (B, N) mask lies over scores."""
    wide = "[:, None]" if heads else ""
    return {
        "v": v, "q": ":, None, :, None" if heads else ":, :, None", "k": ":, None, None, :" if heads else ":, None, :",
        "tri": outer(g.columns("tri", 2)), "trif": outer(g.columns("trif", 2)), "pairs": f"pairs{wide}",
        "pairsf": f"pairsf{wide}", "b": ":, None, None, None" if heads else ":, None, None",
        "full": "B, 1, N, N" if heads else "B, N, N", "x": g.latest("x"),
    }  # fmt: skip


# --- laying a mask over scores ------------------------------------------------------------------------------

# {s} scores, {a} what is seen, {n} the same as numbers, {c} what hides a score.
HIDE = slot(
    "hide",
    {
        "fill": "{s}.masked_fill(~{a}, {c})",
        "fill-eq": "{s}.masked_fill({a} == 0, {c})",
        "fill-not": "torch.masked_fill({s}, {a}.logical_not(), {c})",
        "fill-number": "{s}.masked_fill({n} == 0, {c})",
        "fill-in-place": "{s}.clone().masked_fill_(~{a}, {c})",
        "where": "torch.where({a}, {s}, {c})",
        "where-not": "torch.where(~{a}, {c}, {s})",
        "where-method": "{s}.where({a}, torch.full((), {c}))",
        "add": "{s} + (1 - {n}) * {small}",
        "sub": "{s} - (1 - {n}) * -{small}",
        "add-minus": "{s} + ({n} - 1) * -{small}",
        "add-double": "{s} + (1.0 - {a}.double()) * {small}",
        "add-pad": "{s} + (~{a}).double() * {small}",
        "add-left": "(~{a}).double() * {small} + {s}",
        "add-where": "{s} + torch.where({a}, 0.0, {c})",
        "add-zeros": "{s} + torch.zeros({a}.shape).masked_fill(~{a}, {c})",
        "add-log": "{s} + {a}.double().log()",
        "add-log-eps": "{s} + torch.log({a}.double() + 1e-9)",
        "add-byte": "{s} + ({a}.byte() - 1) * -{small}",
        "add-byte-minus": "{s} + ({a}.byte() - 1) * {small}",
        "causal-then-pairs": "{s}.masked_fill(~{tri}, {c}).masked_fill(~pairs{wide}, {c}).masked_fill(~{a}, {c})",
        "pairs-then-window": (
            "{s}.masked_fill(~pairs{wide}, {c}).masked_fill(~{a}, {c})"
            ".masked_fill((torch.arange(N)[:, None] - torch.arange(N)).abs() > 1, {c})"
        ),
        "pairs-added-causal": "{s} + (~pairs{wide}).double() * {small} + (~{tri}).double() * {small}",
        "fill-then-negative": "{s}.masked_fill(~{a}, {c}) * -1",
        "maximum-of-scores": "torch.maximum({s} + (~{a}).double() * {small}, {s} + (~{a2}).double() * {small})",
        "add-bools": "{s} + ((~{a}).double() + (~{a2}).double()) * {small}",
        "add-product": "{s} + (1 - {a}.double() * {a2}.double()) * {small}",
        "factor": "({s} + (~{a}).double() * {small}) * torch.where({a}, 1.0, 0.0)",
        "add-long": "{s} + ({a}.long() - 1) * -{small}",
        "add-int-factor": "{s} + (~{a}).long() * -100000",
        "add-byte-factor": "{s} - ((~{a}).byte() * 250) * 1e7",
        "add-half": "{s} + ((~{a}).half() * -6e4).double()",
        "add-half-overflow": "{s} + ((~{a}).float() * -1e9).half()",
        "add-bfloat16": "{s} + ((~{a}).double() * torch.finfo(torch.float32).min).to(torch.bfloat16)",
        "add-alpha": "torch.add({s}, (~{a}).double(), alpha={small})",
        "alpha-on-scores": "torch.add((~{a}).double() * {small}, {s}, alpha=0.5)",
        "sub-alpha": "torch.sub({s}, (~{a}).double(), alpha=-{small})",
        "rsub": "torch.rsub((~{a}).double() * -{small}, {s})",
        "addcmul": "torch.addcmul({s}, (~{a}).double(), torch.full((), {small}))",
        "maximum": "torch.maximum({s}.masked_fill(~{a}, {c}), torch.full((), {small}))",
        "maximum-of-masks": "{s} + torch.maximum((~{a}).double() * {small}, (~{a2}).double() * {small})",
        "minimum": "torch.minimum({s}, torch.where({a}, 1e30, {c}))",
        "minimum-of-masks": "{s} + torch.minimum((~{a}).double() * {small}, (~{a2}).double() * {small})",
        "times": "{s} * {n}",
        "times-then-add": "{s} * {n} + (1 - {n}) * {small}",
        "nested": "{s}.masked_fill(~{a}, {c}).masked_fill(~{a2}, {c})",
        "nested-other": "{s}.masked_fill(~{a}, -1e9).masked_fill(~{a2}, -2e9)",
        "where-of-where": "torch.where({a}, torch.where({a2}, {s}, {c}), {c})",
        "floored-mask": "{s}.masked_fill((~{a}).double().div(2, rounding_mode='floor') > 0, {c})",
        "floored-add": "{s} + (~{a}).double().mul(1.5).div(1, rounding_mode='floor') * {small}",
        "half-mask": "{s} + (~{a}).double() * 0.5 * {small}",
        "clamped": "({s} + (~{a}).double() * {small}).clamp(min=-1e30)",
        "clamped-tight": "({s} + (~{a}).double() * {small}).clamp(min=-20)",
        "inverted": "{s}.masked_fill({a}, {c})",
        "times-minus-one": "({s}.masked_fill(~{a}, 1e9)) * -1",
        "divided": "({s} + (~{a}).double() * -1e4) / 1024",
        "fill-then-scale": "{s}.masked_fill(~{a}, -1e4) * 1e-3",
        "scaled-up": "({s} + (~{a}).double() * -50) * 1e4",
        "visible-number": "{s}.masked_fill(~{a}, -3.0)",
        "fifty": "{s} + (~{a}).double() * -50",
        "nan-cleaned": "{s}.masked_fill(~{a}, float('nan')).nan_to_num(nan=-1e9)",
        "tensor-fill": "{s}.masked_fill(~{a}, one * -1e9)",
        "by-index": "{s}.index_fill(-1, torch.full((1,), N - 1), -1e9).masked_fill(~{a}, -1e9)",
        "swallowed": "({s} + (~{a}).double() * -1e9) + 1e9",
        "half-lowest": "{s}.half().masked_fill(~{a}, torch.finfo(torch.float16).min).double()",
        "half-inf": "{s}.half().masked_fill(~{a}, float('-inf')).double()",
        "half-sum": "({s}.half() + (~{a}).half() * -65504.0).double()",
        "bfloat16-sum": "({s}.bfloat16() + (~{a}).bfloat16() * -1e9).double()",
        "float-sum": "({s}.float() + (~{a}).float() * -1e9).double()",
        "lowest-twice": "{s} + (~{a}).double() * torch.finfo(torch.float64).min + (~{a2}).double() * -1e300",
        "xor": "{s}.masked_fill({a} ^ {a2}, {c})",
        "either": "{s}.masked_fill(~({a} | {a2}), {c})",
        "softly": "{s} + torch.where({a}, 0.0, -30.0)",
        "sliced": "torch.cat([{s}[..., :1], {s}[..., 1:].masked_fill(~{a}.expand({s}.shape)[..., 1:], {c})], -1)",
        "twice-flipped": "{s}.flip(-1).masked_fill(~{a}.expand({s}.shape).flip(-1), {c}).flip(-1)",
        "triu-added": "{s} + torch.full((N, N), {c}).triu(1) + (~{a}).double() * {small}",
        "times-mask": "{s} * {a} + (~{a}).double() * {small}",
        "minus-square": "{s} - 1e5 * (1 - {a}.double()) ** 2",
        "int-mask-sum": "{s} + ({a}.long() + {a2}.long() - 2) * 1e6",
        "clamped-mask": "{s} + ({a}.long() + {a2}.long() - 1).clamp(min=-1, max=0) * 1e6",
        "less-than-zero": "torch.where({a}.double() - 0.5 < 0, {c}, {s})",
        "by-lens": "{s}.masked_fill(torch.arange(N) >= lens.clamp(min=1)[{lens}], {c})",
        "batch-bias": "{s} + (pairsf{wide} - 1) * 1e9",
        "buffer-add": "{s} + {trif}",
        "new-zeros": "{s} + {s}.new_zeros({s}.shape).masked_fill(~{a}, {c})",
        "ones-like": "{s} + torch.ones_like({s}).masked_fill({a}, 0.0) * {small}",
        "new-full": "torch.where({a}, {s}, {s}.new_full((), {c}))",
        "scalar-tensor": "torch.where({a}, {s}, torch.scalar_tensor({c}, dtype=torch.float64))",
        "diagonal-kept": (
            "{s}.masked_fill(~{a}, {c}).diagonal_scatter({s}.diagonal(dim1=-2, dim2=-1), dim1=-2, dim2=-1)"
        ),
        "clamped-above": "{s}.masked_fill(~{a}, {c}).clamp_max(3.0)",
        "both-adds": "{s} + {trif} + (~{a}).double() * {small}",
    },
)
COMMON_HIDE = ("fill", "fill", "where", "add-double", "add-pad", "add-where", "fill-eq", "fill-in-place")
NUMBERS = slot(
    "minus-infinity",
    {
        "inf": "float('-inf')",
        "1e9": "-1e9",
        "1e4": "-1e4",
        "lowest": "torch.finfo(torch.float64).min",
        "2**32": "-2.0**32 + 1",
        "lowest-float": "torch.finfo(torch.float32).min",
        "1e30": "-1e30",
        "65504": "-65504.0",
        "1e12": "-1e12",
    },
)
FINITE = ("-1e9", "-1e4", "-1e9", "-2.0**32", "-1e6")


def hide(g: Draw, s: str, a: str, v: str, heads: bool) -> str:
    """Scores with a mask laid over them."""
    text = g.word("hide", HIDE, COMMON_HIDE, 0.6)
    c = g.word("minus-infinity", NUMBERS, ("1e9", "1e9", "1e4", "inf", "lowest"), 0.4)
    a2 = seen(g, v, heads) if "{a2}" in text else ""
    n = number(g, a) if "{n}" in text else ""
    given = {"s": s, "a": outer(a), "a2": outer(a2), "n": n, "c": c, "small": g.one(*FINITE)}
    over = {
        "wide": "[:, None]" if heads else "",
        "lens": ":, None, None, None" if heads else ":, None, None",
        "tri": outer(g.columns("tri", 2)),
        "trif": outer(g.columns("trif", 2)),
    }
    made = text.format(**given, **over)
    return g.let("s", made)
