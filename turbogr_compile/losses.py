"""Losses against sampled negatives in plain torch ops, with what `fuse-sampling` does only where it is asked.

    losses = sampled_losses(query, table.weight, positive_ids, ids, temperature=0.05, share=8)
    loss = (losses * weights).sum() / weights.sum()

This is what `fuse-sampling{share=8, half=true}` computes, without the compiler: to train with it elsewhere, to look at
it, to compare. It stores rows of negatives, which the compiled loss does not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("softmax", "bce")


def sampled_losses(
    query: Tensor, table: Tensor, positive_ids: Tensor, ids: Tensor, *, temperature: float = 1.0,
    normalize_eps: float | None = None, mask_hits: bool = True, share: int = 1, half: bool = False,
    kind: str = "softmax",
) -> Tensor:  # fmt: skip
    """The loss of each position (T,): its positive against the negatives of its group.

    query          (T, D), one for each position
    table          (V, D), the rows that ids name
    positive_ids   (T,)
    ids            (T, K), negatives of each position
    temperature    what scores are divided by
    normalize_eps  divides looked-up rows by max(norm, eps); None leaves them as they are
    mask_hits      a negative whose id is the position's own positive is left out; it is in any case with share > 1
    share          positions g·share ... g·share + share - 1 are group g, the last of which may be shorter; each meets
                   the negatives of all of them, share · K
    half           rows of negatives are rounded to FP16, times one power of two for each position, and the table gets
                   the gradient as if they were not; for float32
    kind           "softmax": -log of the positive's share of the sum of exponentials; "bce": softplus(-positive) plus
                   the sum of softplus(negative)
    """
    _check(query, table, positive_ids, ids, share, half, kind)
    own = _normalized(F.embedding(positive_ids, table), normalize_eps)
    rows = F.embedding(ids, table)
    rows = _normalized(in_halves(rows) if half else rows, normalize_eps)
    positive = (query * own).sum(-1) / temperature
    # The last group is filled up with positions that have nothing: their negatives are left out like hits.
    there = torch.ones_like(ids, dtype=torch.bool)
    query, rows, positives, names, there = (_grouped(x, share) for x in (query, rows, positive_ids, ids, there))
    rows, names, there = (x.flatten(1, 2) for x in (rows, names, there))
    logits = torch.einsum("gmd,gjd->gmj", query, rows) / temperature
    out = ~there[:, None]
    if mask_hits or share > 1:
        out = out | (positives[..., None] == names[:, None])
    logits = logits.masked_fill(out, -torch.inf).flatten(0, 1)[: positive.shape[0]]
    if kind == "softmax":
        return torch.cat([positive[:, None], logits], 1).logsumexp(1) - positive
    return F.softplus(-positive) + F.softplus(logits).sum(1)


def in_halves(rows: Tensor) -> Tensor:
    """Rows (T, K, D) rounded to FP16 with one power of two for each T; gradients pass as if nothing was rounded."""
    with torch.no_grad():
        sizes = rows.abs()
        most = sizes.masked_fill(~sizes.isfinite(), 0.0).amax((1, 2), keepdim=True)
        exponent = (torch.frexp(most).exponent - 15).clamp_min(-100)
        scale = torch.where(most == 0, torch.ones_like(most), torch.ldexp(torch.ones_like(most), exponent))
        change = (rows / scale).half().float() * scale - rows
    return rows + change


def _grouped(x: Tensor, share: int) -> Tensor:
    """(T, ...) as (groups, share, ...), filled up with zeros."""
    missing = -x.shape[0] % share
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]).unflatten(0, (-1, share))


def _normalized(rows: Tensor, eps: float | None) -> Tensor:
    return rows if eps is None else F.normalize(rows, dim=-1, eps=eps)


def _check(query: Tensor, table: Tensor, positive_ids: Tensor, ids: Tensor, share: int, half: bool, kind: str) -> None:
    positions = query.shape[0]
    wanted = (positions, table.shape[-1]), (positions,), (positions,)
    found = tuple(query.shape), tuple(positive_ids.shape), tuple(ids.shape[:1])
    if table.dim() != 2 or ids.dim() != 2 or found != wanted:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, table, positive_ids, ids))
        raise ValueError(
            f"sampled_losses takes query (T, D), table (V, D), positive_ids (T,), ids (T, K), got {shapes}"
        )
    if share < 1:
        raise ValueError(f"sampled_losses: share takes 1 or more positions, got {share}")
    if kind not in KINDS:
        raise ValueError(f"sampled_losses: kind takes {' or '.join(KINDS)}, got {kind!r}")
    if half and table.dtype != torch.float32:
        raise ValueError(f"sampled_losses: half stands in for a table of float32, got {table.dtype}")
