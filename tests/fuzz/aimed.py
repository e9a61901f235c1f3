"""Programs aimed at one rule each: a construct alone, between a mask that makes rows zero and a reader of every row.

What the compiler says about the construct, which of its rows are zero and which rows it reads, decides the result; in a
random program something else usually hides it. Beside the vocabulary stand constructs that faults planted in the rules
survived until they were written (`tests/plant`). They are no words: seeds keep their programs.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import rows
from .data import Sizes
from .draw import VOCABULARY, Draw
from .generate import GENTLE, SIZES
from .program import Program

KINDS = ("right", "left", "holes", "some-empty", "full", "disagree")
FAMILIES = {"rowwise": rows.rowwise, "move": rows.move, "spread": rows.spread}
# (B, N, D) from {x}; {v} says where {x} is not zero.
ROWS = {
    "flip-both": "{x}.flip(1, 2)",
    "roll-both": "{x}.roll((1, 1), (1, 2))",
    "pad-both": "F.pad({x}, (1, 0, 1, 0))[:, :-1, :-1]",
    "pad-other-value": "F.pad({x}, (0, 0, 1, 0), value=0.5)[:, :-1]",
    "pad-features-other-value": "F.pad({x}, (1, 0), value=0.5)[..., :-1]",
    "group-norm-shifted": "F.group_norm({x}.reshape(B * N, D), 1, gain, off).view(B, N, D)",
    "divided-by-its-size": "({x} / ({x}.abs() + 0.0)).detach().nan_to_num(0.25) + {x}",
    "split-rows": "torch.cat({x}.split([1, N - 1], 1)[::-1], 1)",
    "chunk-rows": "torch.cat({x}.chunk(2, 1)[::-1], 1)",
    "unbind-second": "{x} + {x}.unbind(1)[1][:, None]",
    "gather-sequences": "{x}.gather(0, torch.arange(B).flip(0)[:, None, None].expand(B, N, D))",
    "gather-sequences-by-data": "{x}.gather(0, (ids[:, :1] % B)[..., None].expand(B, N, D))",
    "gather-by-feature": "{x}.gather(1, (idx[:, :1, None] + torch.arange(D)) % N).expand(B, N, D) + {x}",
    "gather-corner": "{x} + {x}.gather(-1, (ids[:, :2] % D)[..., None]).sum(1, keepdim=True)",
    "select-sequence": "{x} + {x}[1]",
    "scatter-features": "{x}.scatter(-1, (ids % D)[..., None], 0.5)",
    "scatter-zero": "{x}.scatter(-1, (ids % D)[..., None], 0.0)",
    "scatter-add-features": "{x}.scatter_add(-1, (ids % D)[..., None].expand(B, N, D), {x})",
    "scatter-corner": "{x}.scatter(-1, (ids[:, :2] % D)[..., None], 0.5)",
    "slice-scatter-rows": "{x}.slice_scatter({x}[:, :1] + 1, 1, 1, 2)",
    "index-fill": "{x}.index_fill(-1, torch.tensor([0]), 0.5)",
    "index-fill-rows": "{x}.index_fill(1, torch.tensor([0]), 0.5)",
    "beta-zero": "torch.baddbmm(({x} * float('inf')).detach(), {x}, Q.expand(B, D, D), beta=0, alpha=2)",
    "stack-blocks": "torch.cat([{x}, {x} * 2], 1).view(B, 2, N, D).sum(1)",
    "interleaved": "torch.stack([{x}, {x} @ Q], 2).flatten(1, 2)[:, ::2]",
    "tile": "{x}.tile(1, 2, 1)[:, 1:N + 1]",
    "triangle-of-features": "{x}.tril()",
    "repeated-matrix-of-columns": "{x} + (({x} + 1).mT @ gain[:1].expand(B, N, N)).mT",
    "blind-at-some-keys": (
        "(({x} @ {x}.mT).masked_fill(~({v}[:, None] & (ids[:, :, None] > ids[:, None])), -1e9).softmax(-1)"
        " * mask[:, None]) @ ({x} + 1)"
    ),
    "distances-from-the-end": (
        "{x} + ({x} @ {x}.mT + rel[torch.arange(N)[:, None] - torch.arange(N)])"
        ".masked_fill(~{v}[:, None], -1e9).softmax(-1) @ {x}"
    ),
    "positions-turned-by-one": (
        "{x} + ({x} @ {x}.mT).masked_fill(~({v}[:, None] & (torch.arange(N)[torch.arange(N) - N + 1][:, None] + 1"
        " >= torch.arange(N))), -1e9).softmax(-1) @ {x}"
    ),
    "columns-mixed": "({x}.sum(-1) @ A[:N, :N])[..., None] + {x}",
    "columns-mixed-by-feature": "({x}.mT @ A[:N, :N]).mT + {x}",
    "distances-embedded": (
        "{x} + ({x} @ {x}.mT + F.embedding(torch.arange(N)[:, None] - torch.arange(N) + N - 1, rel[:, None],"
        " padding_idx=N - 1)[..., 0]).masked_fill(~{v}[:, None], -1e9).softmax(-1) @ {x}"
    ),
    "pairs-of-some-sequences": (
        "{x} + (({x} @ {x}.mT) * (label > 3)[:, None, None] + (torch.arange(N)[:, None] > torch.arange(N)).double())"
        ".sum(1)[..., None]"
    ),
    "moved-input": "{x} + (F.pad(raw[:, 1:], (0, 0, 0, 1)) + 1) * {v}[..., None]",
    "input-with-gradient": "{x} + feats * {v}[..., None]",
    "looked-up-on-some": "{x} + F.embedding(tgt, E2) * {v}[..., None]",
    "divided-where-hidden": (
        "{x} + (F.silu({x} @ {x}.mT).masked_fill(~{v}[:, None], 0.0)"
        " / torch.where({v}[:, None], 2.0, (ids[:, :1, None] - 1) * 1.0)) @ ({x} + 1)"
    ),
    "blocks-unbound": (
        "(torch.cat([{x}, {x} @ Q], 1) * torch.cat([{v}, {v}], 1)[..., None]).unbind(1)[1][:, None] + {x}"
    ),
    "largest-of-all": "{x} - {x}.amax((), keepdim=True)",
    "bytes-below-zero": (
        "{x} + ({x} @ {x}.mT).masked_fill(~({v}[:, None] & ((torch.arange(N, dtype=torch.uint8) - 1)[:, None]"
        " >= torch.arange(N, dtype=torch.uint8)) | torch.eye(N, dtype=torch.bool)), -1e9).softmax(-1) @ {x}"
    ),
    "features-picked": "{x} + {x}[:, :, torch.tensor([1, 0])].sum(-1, keepdim=True)",
    "product-added": "torch.addmm(gain, {x}.flatten(0, 1), Q).view(B, N, D)",
    "product-added-by-sequence": "torch.baddbmm({x}, {x}, Q.expand(B, D, D), beta=0.5)",
    "score-shifted": "{x} + ({x} @ {x}.mT + sink[0]).masked_fill(~{v}[:, None], -1e9).softmax(-1) @ {x}",
    "among-numbers": "{x} + torch.isin(({x}.detach() * 3).long(), torch.tensor([0, 2])) * 0.5",
    "recurrent-over-sequences": (
        "{x} + torch.gru({x}.transpose(0, 1), torch.zeros(1, N, D), [Win, Win, Bin, Bin], True, 1, 0.0, False, False,"
        " True)[0].transpose(0, 1)"
    ),
    "factors-of-the-next-key": (
        "{x} + F.silu(({x} @ {x}[:, :-1].mT) * wts[:, None, 1:]).masked_fill(~{v}[:, None, :-1], 0.0) @ {x}[:, :-1]"
    ),
    "keys-by-what-they-are": (
        "{x} + ({x} @ {x}.mT).masked_fill(~({v} & ((({x} @ w) > -0.2) | (torch.arange(N) < 1)))[:, None], -1e9)"
        ".softmax(-1) @ {x}"
    ),
    "distances-far-apart": (
        "{x} + ({x} @ {x}.mT + torch.where(torch.arange(N)[:, None] - torch.arange(N) > 1,"
        " rel[torch.arange(N)[:, None] - torch.arange(N) + N - 1], 0.0)).masked_fill(~{v}[:, None], -1e9).softmax(-1)"
        " @ {x}"
    ),
    "bytes-that-wrap": (
        "{x} + ({x} @ {x}.mT).masked_fill(~({v} & ~((ids.byte() == 257) & (ids.byte() == 1)))[:, None], -1e9)"
        ".softmax(-1) @ {x}"
    ),
    "each-sequence": "{x} + {x}[each, last][:, None]",
    "every-other-window": (
        "{x} + (F.conv1d({x}.mT, Q[..., None].expand(D, D, 2), stride=2) * {v}[:, None, :N // 2]).sum(-1)[:, None]"
    ),
    "outer": "torch.einsum('bnd,bne->bnde', {x}, {x}).sum(-1)",
    "outer-turned": "({x} @ {x}.transpose(1, 2)).transpose(1, 2) @ {x}",
    "summed-pairs": "{x} + ({x} @ {x}.transpose(1, 2)).sum(1)[..., None]",
    "norm-of-rows": "{x} + {x}.norm(dim=1, keepdim=True)",
    "unfold-features": "{x} + {x}.unfold(-1, 2, 1).sum((-1, -2))[..., None]",
    "unfold-rows": "{x} + F.pad({x}, (0, 0, 1, 0)).unfold(1, 2, 1).sum(-1)",
    "cosine-of-rows": "{x} + F.cosine_similarity({x}, {x} @ Q, dim=1)[:, None]",
    "quantile": "{x} + {x}.quantile(0.5, -1, keepdim=True)",
    "argmax": "{x} + {x}.argmax(-1, keepdim=True)",
    "all-features": "{x} + ({x} != 0).all(-1, keepdim=True)",
    "prelu": "F.prelu({x}.transpose(1, 2), gain).transpose(1, 2)",
    "prelu-rows": "F.prelu({x}, torch.arange(N) * 0.5)",
    "where-zero-first": "torch.where({v}[..., None], 0.0, {x} + 1)",
    "fill-true": "{x}.masked_fill({v}[..., None], 0.0) + {x}.masked_fill({v}[..., None], 0.5)",
    "zero-by-zero": "torch.atan2({x}, {x}.abs())",
    "sign-of-zero": "torch.copysign(torch.ones(()), {x})",
    "bits-of-zero": "{x} + ({x}.detach().view(torch.int64) != 0) * 0.5",
    "divided": "{x} / (1 + {x}.abs())",
    "reciprocal": "(1 / {x}.detach()).clamp(-9, 9) + {x}",
    "minus-by-zero": "({x} / {x}.detach().flip(-1)).detach().clamp(-9, 9).nan_to_num(0.25) + {x}",
    "power-of-zero": "{x}.abs() ** {x}.abs()",
    "expanded-rows": "{x} + {x}[:, :1].expand(B, N, D)",
    "embedding-of-counts": "F.embedding({v}.cumsum(1).clamp(max=N - 1), P) + {x}",
    "negative-slice-step": "torch.cat([{x}[:, 1::2], {x}[:, ::2]], 1)",
    "select-row": "{x} * {x}.select(1, 1)[:, None]",
}
# Batches that a construct is tried on besides.
MORE_KINDS = {
    "rows:moved-input": ("inf-pads",),
    "rows:input-with-gradient": ("inf-pads",),
    "rows:looked-up-on-some": ("bad-target",),
    "rows:each-sequence": ("turned",),
    "rows:factors-of-the-next-key": ("inf-pads",),
}
# A number from {x}.
LOSSES = {
    "some-sequences": "({x}[lens > 1] * torch.arange(1, N + 1)[:, None]).sum(1).square().sum()",
    "some-features": "({x}[..., torch.arange(D) % 2 == 0] * torch.arange(1, N + 1)[:, None]).sum()",
    "some-columns": "({x}[:, perm % 2 == 0] * 2).sum(1).square().sum()",
    "both-coordinates": "({x}.flatten(0, 1).index_select(0, {v}.nonzero().reshape(-1)) * gain).square().sum()",
    "mask-of-another-kind": "({x}[(tgt != 0) & {v}] * gain).square().sum()",
    "flat-mask-turned": "({x}.flatten(0, 1)[{v}.T.flatten()] * gain).square().sum()",
    "expanded-label": "F.cross_entropy(({x} @ W).flatten(0, 1), label[:, None].expand(B, N).flatten(), ignore_index=1)",
    "weights-in-loss": "F.binary_cross_entropy_with_logits({x}, torch.full_like({x}, 0.3), reduction='none').sum()",
    "smooth": "F.smooth_l1_loss({x}, torch.full_like({x}, 0.3), reduction='none').sum()",
    "pooled-both": "torch.einsum('bnd,bne->de', {x}, {x} @ Q).square().sum()",
    "pooled-turned": "(({x}.transpose(1, 2) @ ({x} + 1)).square() * gain).sum()",
    "largest-row": "({x} - 1).amax(1).sum() + ({x} + 1).amin(1).sum()",
    "logsumexp-rows": "{x}.logsumexp(1).sum()",
    "softmax-rows": "({x}.softmax(1) * torch.arange(N)[:, None]).sum()",
    "cumulated": "({x}.cumsum(1) * torch.arange(1, N + 1)[:, None]).sum()",
    "counted": "({x} != 0).sum() * {x}.sum()",
    "mean-of-some": "{x}.mean() + {x}[:, 1:].mean()",
}


def program(seed: int, word: str) -> Program:
    """Of one construct: after rows were made zero, and, every other time, before another mask."""
    family, _, name = word.partition(":")
    b, n, d, h, v, k, m = SIZES[seed % 3]
    g = Draw(seed, Sizes(b, n, d, h, v, k, m), word, GENTLE)
    mask, after = g.let("v", "ids != 0"), g.one("mask", "(torch.arange(N) < lens[:, None])", "(tgt != 0)")
    x = g.let("x", f"(F.embedding(ids, E) + P) * {mask}[..., None]")
    if family == "loss":
        loss = g.let("loss", LOSSES[name].format(x=x, v=mask))
    else:
        x = FAMILIES[family](g, x, mask) if family in FAMILIES else g.let("x", ROWS[name].format(x=x, v=mask))
        read = f"{x} * {after}[..., None]" if seed % 2 else x
        loss = g.let("loss", f"({read} * (torch.arange(N * D).reshape(N, D) % 7 - 2.5)).sum()")
    return Program(tuple(g.lines), loss, (), g.sizes, KINDS + MORE_KINDS.get(word, ()), seed)


def words() -> list[str]:
    """Constructs of rows: those of the vocabulary, and those that are here alone."""
    known = [f"{family}:{name}" for family in FAMILIES for name in VOCABULARY[family]]
    return [*known, *(f"rows:{name}" for name in ROWS), *(f"loss:{name}" for name in LOSSES)]


def aimed(first: int = 0, only: str = "") -> Iterator[tuple[str, Program]]:
    for word in words():
        if only in word:
            yield from ((f"aimed {word} {seed}", program(seed, word)) for seed in (first, first + 1))
