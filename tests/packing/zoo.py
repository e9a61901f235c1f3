"""Small recommenders assembled from the idioms in which published models express padding, attention and losses.

A model is a `Spec`: one named idiom per slot. It prints as the choices that differ from the standard model, and that
text makes the model again, so that a failure is reproduced from its name:

    Spec.parse("mask=causal readout=gather").model(n=8, d=8)

Some idioms let pads influence the loss. They are as right as the others: a compiled model gives what eager gives.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import ACTIONS, SLOTS, VOCABULARY, Batch

HEADS = 2


class Sizes(NamedTuple):
    n: int  # rows of the padded sequences, as the idiom sees them
    d: int

    @property
    def head(self) -> int:
        return self.d // HEADS


# --- which ids, which rows are valid -----------------------------------------------------------------


class Table(nn.Embedding):
    def __init__(self, sizes: Sizes, **more: Any) -> None:
        super().__init__(VOCABULARY, sizes.d, **more)


class FloatIds(Table):
    """Ids make a round trip through float32."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.float().long())


class ClampedIds(Table):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids.clamp(min=0))


class IndexedTable(Table):
    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


TABLE: dict[str, Callable[[Sizes], Table]] = {
    "plain": ClampedIds,
    "padding-idx": lambda s: Table(s, padding_idx=0),
    "float-ids": FloatIds,
    "indexed": IndexedTable,
    "by-frequency": lambda s: Table(s, scale_grad_by_freq=True),
    "max-norm": lambda s: Table(s, max_norm=1.0),
}

Valid = Callable[[Batch, Tensor], Tensor]  # batch, embedded rows -> (B, N) bool

VALID: dict[str, Valid] = {
    "ne": lambda b, x: b.ids != 0,
    "gt": lambda b, x: b.ids > 0,
    "not-eq": lambda b, x: ~(b.ids == 0),
    "bool": lambda b, x: b.ids.bool(),
    "ne-last-id": lambda b, x: b.ids != VOCABULARY - 1,
    "ge-zero": lambda b, x: b.ids >= 0,
    "lengths": lambda b, x: torch.arange(b.ids.shape[1]) < b.lengths.unsqueeze(1),
    "lengths-inclusive": lambda b, x: torch.arange(b.ids.shape[1]).expand_as(b.ids) <= b.lengths[:, None],
    "lengths-left": lambda b, x: torch.arange(b.ids.shape[1]) >= b.ids.shape[1] - b.lengths[:, None],
    "mask-bool": lambda b, x: b.valid,
    "mask-int": lambda b, x: b.valid_int == 1,
    "mask-int-bool": lambda b, x: b.valid_int.bool(),
    "mask-float": lambda b, x: b.valid_float > 0.5,
    "mask-and-ids": lambda b, x: b.valid & (b.ids != 0),
    "mask-or-ids": lambda b, x: b.valid | (b.ids != 0),
    "product": lambda b, x: ((b.ids != 0).double() * b.valid_float).bool(),
    "nonzero-row": lambda b, x: (x.detach() != 0).any(-1),
    "seen-so-far": lambda b, x: (b.ids != 0).cumsum(1) > 0,
}
PAD_IDS = {"ne-last-id": VOCABULARY - 1, "ge-zero": -1}  # all others pad with 0


# --- positions and other things added to the embedded rows -------------------------------------------


class Position(nn.Module):
    def __init__(self, sizes: Sizes, rows: int | None = None, **more: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(sizes.n if rows is None else rows, sizes.d, **more)

    def forward(self, x: Tensor, batch: Batch, valid: Tensor) -> Tensor:
        return x + self.table(self.index(x.shape[1], batch, valid))

    def index(self, n: int, batch: Batch, valid: Tensor) -> Tensor:
        return torch.arange(n)


class Expanded(Position):
    def index(self, n, batch, valid):
        return torch.arange(n).unsqueeze(0).expand_as(batch.ids)


class Given(Position):
    def index(self, n, batch, valid):
        return batch.positions


class Reversed(Position):
    def index(self, n, batch, valid):
        return torch.arange(n - 1, -1, -1)


class FromTheEnd(Position):
    """Distance to the last item."""

    def index(self, n, batch, valid):
        return (batch.lengths[:, None] - 1 - torch.arange(n)).clamp(min=0)


class TimesValid(Position):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, sizes.n + 1, padding_idx=0)

    def index(self, n, batch, valid):
        return torch.arange(1, n + 1) * valid


class Counted(Position):
    """Number of valid rows so far."""

    def index(self, n, batch, valid):
        return (valid.long().cumsum(1) - 1).clamp(min=0)


class LastOfTable(Position):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes, 2 * sizes.n)

    def forward(self, x, batch, valid):
        return x + self.table.weight[-x.shape[1] :]


class WholeTable(Position):
    def forward(self, x, batch, valid):
        return x + self.table.weight.unsqueeze(0)


class ConcatPosition(Position):
    """Concatenated to the items and projected, instead of added."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.project = nn.Linear(2 * sizes.d, sizes.d)

    def forward(self, x, batch, valid):
        return self.project(torch.cat([x, self.table.weight.expand_as(x)], -1))


class NoPosition(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()

    def forward(self, x, batch, valid):
        return x


POSITION: dict[str, Callable[[Sizes], nn.Module]] = {
    "column": Position, "expanded": Expanded, "given": Given, "reversed": Reversed, "from-end": FromTheEnd,
    "times-valid": TimesValid, "counted": Counted, "last-of-table": LastOfTable, "whole-table": WholeTable,
    "concat": ConcatPosition, "none": NoPosition,
}  # fmt: skip


class NoExtra(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x


class Actions(NoExtra):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.table = nn.Embedding(ACTIONS, sizes.d)

    def forward(self, x, batch):
        return x + self.table(batch.actions)


class FeatureMean(NoExtra):
    """Mean of the features of each item; 0 is no feature."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.table = nn.Embedding(VOCABULARY, sizes.d)

    def forward(self, x, batch):
        there = (batch.features != 0).unsqueeze(-1)
        return x + (self.table(batch.features) * there).sum(2) / there.sum(2).clamp(min=1)


class TimeGap(NoExtra):
    """Logarithm of the time since the row before."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.project = nn.Linear(1, sizes.d)

    def forward(self, x, batch):
        gaps = F.pad(batch.times[:, 1:] - batch.times[:, :-1], (1, 0))
        return x + self.project(gaps.abs().add(1).log().double().unsqueeze(-1))


EXTRA = {"none": NoExtra, "actions": Actions, "features": FeatureMean, "time-gap": TimeGap}


# --- what happens to pad rows between the layers -----------------------------------------------------


def _times_in_place(x: Tensor, valid: Tensor) -> Tensor:
    x = x * 1.0
    x *= valid.unsqueeze(-1)
    return x


def _assigned(x: Tensor, valid: Tensor) -> Tensor:
    x = x * 1.0
    x[~valid] = 0.0
    return x


ZERO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda x, valid: x,
    "times": lambda x, valid: x * valid.unsqueeze(-1),
    "times-float": lambda x, valid: x * valid.to(x.dtype)[..., None],
    "times-in-place": _times_in_place,
    "fill": lambda x, valid: x.masked_fill(~valid.unsqueeze(-1), 0.0),
    "fill-in-place": lambda x, valid: (x * 1.0).masked_fill_(~valid[:, :, None], 0.0),
    "where": lambda x, valid: torch.where(valid.unsqueeze(-1), x, torch.zeros_like(x)),
    "assign": _assigned,
    "times-two-masks": lambda x, valid: x * valid.unsqueeze(-1) * valid.cumsum(1).clamp(max=1).unsqueeze(-1),
}


# --- which pairs of rows see each other --------------------------------------------------------------

TRIANGLE: dict[str, Callable[[int], Tensor]] = {
    "tril": lambda n: torch.tril(torch.ones(n, n, dtype=torch.bool)),
    "not-triu": lambda n: ~torch.triu(torch.ones(n, n, dtype=torch.bool), diagonal=1),
    "triu-is-zero": lambda n: torch.ones(n, n).triu(1) == 0,
    "arange": lambda n: torch.arange(n)[:, None] >= torch.arange(n)[None, :],
    "arange-less": lambda n: torch.arange(n).unsqueeze(0) < torch.arange(n).unsqueeze(1) + 1,
    "cumsum": lambda n: torch.eye(n).cumsum(0) > 0,
    "additive": lambda n: torch.full((n, n), float("-inf")).triu(1) == 0,
}


class Seen(NamedTuple):
    """What a mask is made of."""

    valid: Tensor  # (B, n)
    causal: Tensor  # (n, n): row sees column

    @property
    def keys(self) -> Tensor:
        return self.valid[:, None, :]

    @property
    def queries(self) -> Tensor:
        return self.valid[:, :, None]

    @property
    def distance(self) -> Tensor:
        n = self.valid.shape[1]
        return torch.arange(n)[:, None] - torch.arange(n)


def _diagonal_open(seen: Seen) -> Tensor:
    open_ = (seen.causal & seen.keys).clone()
    open_.diagonal(dim1=-2, dim2=-1).fill_(True)
    return open_


def _no_targets(seen: Seen) -> Tensor:
    """The last two items are targets, which see the history and themselves."""
    history = (seen.valid.sum(1) - 2).clamp(min=0)[:, None]
    step = torch.minimum(torch.arange(seen.valid.shape[1]), history)
    return (step[:, :, None] > step[:, None, :]) | (seen.distance == 0)


MASK: dict[str, Callable[[Seen], Tensor | None]] = {
    "none": lambda s: None,
    "causal": lambda s: s.causal.unsqueeze(0),
    "key": lambda s: s.keys,
    "key-expanded": lambda s: s.keys.expand(-1, s.valid.shape[1], -1),
    "causal-key": lambda s: s.causal & s.keys,
    "tril-of-keys": lambda s: torch.tril(s.keys.expand(-1, s.valid.shape[1], -1)),
    "key-product": lambda s: (s.causal.double() * s.keys.double()) > 0,
    "both-sides": lambda s: s.causal & s.keys & s.queries,
    "outer-product": lambda s: torch.bmm(s.queries.double(), s.keys.double()) > 0,
    "query": lambda s: s.causal & s.queries,
    "strict": lambda s: (s.distance > 0) & s.keys,
    "anti-causal": lambda s: s.causal.mT & s.keys,
    "window": lambda s: s.causal & (s.distance < 3) & s.keys,
    "window-both-ways": lambda s: (s.distance.abs() <= 2) & s.keys,
    "window-without-key": lambda s: (s.causal & (s.distance < 3)).unsqueeze(0),
    "diagonal-open": lambda s: (s.causal & s.keys) | (s.distance == 0),
    "diagonal-filled": _diagonal_open,
    "first-open": lambda s: (s.causal & s.keys) | (torch.arange(s.valid.shape[1]) == 0),
    "prefix-open": lambda s: (s.causal | (torch.arange(s.valid.shape[1]) < 3)) & s.keys,
    "targets": lambda s: _no_targets(s) & s.keys,
    "causal-buffer": lambda s: s.causal.unsqueeze(0),
    "or-of-invalid": lambda s: ~(~s.causal | ~s.keys),
}

# --- from scores to weights --------------------------------------------------------------------------

Weigh = Callable[[Tensor, Tensor], Tensor]  # scores, allowed -> weights


def _additive(low: float) -> Weigh:
    return lambda scores, allowed: (scores + torch.where(allowed, 0.0, low)).softmax(-1)


def _one_minus(low: float) -> Weigh:
    return lambda scores, allowed: torch.softmax(scores + (1.0 - allowed.to(scores.dtype)) * low, dim=-1)


def _filled(low: float) -> Weigh:
    return lambda scores, allowed: F.softmax(scores.masked_fill(~allowed, low), dim=-1)


def _chosen(low: float) -> Weigh:
    return lambda scores, allowed: torch.where(allowed, scores, torch.full_like(scores, low)).softmax(-1)


def _times_renormalised(scores: Tensor, allowed: Tensor) -> Tensor:
    weights = scores.softmax(-1) * allowed
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)


def _exponentials(scores: Tensor, allowed: Tensor) -> Tensor:
    weights = scores.exp() * allowed
    return weights / (weights.sum(-1, keepdim=True) + 1e-9)


INFINITY = float("inf")
LOWEST = torch.finfo(torch.float64).min

WEIGH: dict[str, Weigh] = {
    "additive-1e4": _additive(-1e4),
    "additive-1e9": _additive(-1e9),
    "additive-inf": _additive(-INFINITY),
    "additive-min": lambda s, a: (s + torch.zeros(a.shape, dtype=s.dtype).masked_fill(~a, LOWEST)).softmax(-1),
    "one-minus-1e4": _one_minus(-1e4),
    "one-minus-1e9": _one_minus(-1e9),
    "fill-1e9": _filled(-1e9),
    "fill-inf": _filled(-INFINITY),
    "fill-2-32": _filled(-(2.0**32) + 1),
    "where-1e9": _chosen(-1e9),
    "where-inf": _chosen(-INFINITY),
    "fill-inf-cleaned": lambda s, a: s.masked_fill(~a, -INFINITY).softmax(-1).nan_to_num(0.0),
    "fill-1e9-then-times": lambda s, a: s.masked_fill(~a, -1e9).softmax(-1) * a,
    "softmax-then-times": lambda s, a: s.softmax(-1) * a,
    "softmax-times-renormalised": _times_renormalised,
    "exponentials": _exponentials,
    "soft-1": lambda s, a: (s - (~a).to(s.dtype)).softmax(-1),  # a penalty, not a mask: pads matter
    "silu": lambda s, a: F.silu(s) / s.shape[-1] * a,
    "silu-where": lambda s, a: torch.where(a, F.silu(s) / s.shape[-1], 0.0),
    "silu-fill": lambda s, a: (F.silu(s) * (1.0 / s.shape[-1])).masked_fill(~a, 0.0),
    "relu-squared": lambda s, a: F.relu(s).square() * a / s.shape[-1],
    "sigmoid": lambda s, a: torch.sigmoid(s) * a,
    "sigmoid-of-filled": lambda s, a: torch.sigmoid(s.masked_fill(~a, -INFINITY)),
    "silu-by-count": lambda s, a: F.silu(s) * a / a.sum(-1, keepdim=True).clamp(min=1),
}


# --- biases on the scores ----------------------------------------------------------------------------


class NoBias(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.n = sizes.n

    def forward(self, times: Tensor) -> Tensor | None:
        """(B or 1, n, n), to be added to the scores."""
        return None


class Toeplitz(NoBias):
    """A table over distances, spread over pairs by padding, repeating and reshaping."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.table = nn.Parameter(torch.randn(2 * sizes.n - 1) * 0.5)

    def forward(self, times):
        n = self.n
        spread = F.pad(self.table, [0, n]).repeat(n)[..., :-n].reshape(1, n, 3 * n - 2)
        return spread[..., n - 1 : 2 * n - 1]


class Distance(NoBias):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.table = nn.Parameter(torch.randn(2 * sizes.n - 1) * 0.5)

    def forward(self, times):
        at = torch.arange(self.n)
        return self.table[at[:, None] - at[None, :] + self.n - 1].unsqueeze(0)


class PairTable(NoBias):
    """An embedding of the pair of positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.table = nn.Embedding(sizes.n**2, 1)

    def forward(self, times):
        return self.table(torch.arange(self.n**2)).view(1, self.n, self.n)


class RelativeBuckets(NoBias):
    """Few buckets: near distances exactly, far ones logarithmically."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.table = nn.Embedding(6, 1)

    def forward(self, times):
        at = torch.arange(self.n)
        far = (at[:, None] - at[None, :]).clamp(min=0)
        bucket = torch.where(far < 3, far, (far.double().clamp(min=1).log() * 2).long() + 1).clamp(max=5)
        return self.table(bucket).squeeze(-1).unsqueeze(0)


class Slope(NoBias):
    """A constant times the distance."""

    def forward(self, times):
        at = torch.arange(self.n, dtype=torch.float64)
        return -0.1 * (at[:, None] - at[None, :]).abs().unsqueeze(0)


class LogTime(NoBias):
    """Logarithmic buckets of the time between two rows."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.table = nn.Parameter(torch.randn(33) * 0.5)

    def gaps(self, times: Tensor) -> Tensor:
        return times[:, :, None] - times[:, None, :]

    def forward(self, times):
        buckets = (self.gaps(times).abs().clamp(min=1).double().log() / 0.301).long().clamp(0, 32)
        return torch.index_select(self.table, 0, buckets.view(-1)).view(-1, self.n, self.n)


class LogTimeOfTheNext(LogTime):
    """Row i asks with the time of row i + 1, as published HSTU code does."""

    def gaps(self, times):
        following = torch.cat([times[:, 1:], times[:, -1:]], dim=1)
        return following[:, :, None] - times[:, None, :]


class ToeplitzAndTime(Toeplitz):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.time = LogTimeOfTheNext(sizes)

    def forward(self, times):
        return super().forward(times) + self.time(times)


BIAS = {
    "none": NoBias, "toeplitz": Toeplitz, "distance": Distance, "pair-table": PairTable, "buckets": RelativeBuckets,
    "slope": Slope, "log-time": LogTime, "log-time-next": LogTimeOfTheNext, "toeplitz-time": ToeplitzAndTime,
}  # fmt: skip


# --- how rows are cut into heads ---------------------------------------------------------------------


class Heads(nn.Module):
    """(B, n, D) -> q, k, v as (B, heads, n, d), and back."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(sizes.d, sizes.d) for _ in range(3))
        self.out = nn.Linear(sizes.d, sizes.d)

    def forward(self, x: Tensor, weigh: Callable[[Tensor], Tensor]) -> Tensor:
        q, k, v = (self.split(project(x)) for project in self.qkv)
        return self.out(self.merge(self.mix(weigh(self.scores(q, k)), v)))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])

    def mix(self, weights: Tensor, v: Tensor) -> Tensor:
        return weights @ v

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)

    def pairs(self, x: Tensor) -> Tensor:
        """A (B or 1, n or 1, n) tensor, made to fit the scores."""
        return x.unsqueeze(1)


class Permuted(Heads):
    def split(self, x):
        return x.reshape(*x.shape[:-1], HEADS, -1).permute(0, 2, 1, 3).contiguous()

    def scores(self, q, k):
        return torch.matmul(q * q.shape[-1] ** -0.5, k.permute(0, 1, 3, 2))

    def merge(self, x):
        return x.permute(0, 2, 1, 3).contiguous().flatten(2)


class Einsum(Heads):
    def split(self, x):
        return x.view(*x.shape[:2], HEADS, -1)

    def scores(self, q, k):
        return torch.einsum("bnhd,bmhd->bhnm", q, k)

    def mix(self, weights, v):
        return torch.einsum("bhnm,bmhd->bnhd", weights, v)

    def merge(self, x):
        return x.reshape(*x.shape[:2], -1)


class HeadsInBatch(Heads):
    """Heads are chunks of D, concatenated along the batch."""

    def split(self, x):
        return torch.cat(torch.chunk(x, HEADS, dim=-1), dim=0)

    def scores(self, q, k):
        return torch.bmm(q, k.transpose(1, 2)) * 0.5

    def mix(self, weights, v):
        return torch.bmm(weights, v)

    def merge(self, x):
        return torch.cat(torch.chunk(x, HEADS, dim=0), dim=-1)

    def pairs(self, x):
        return x.repeat(HEADS if x.shape[0] > 1 else 1, 1, 1)


class OneHead(Heads):
    def split(self, x):
        return x

    def merge(self, x):
        return x

    def pairs(self, x):
        return x


class Fused(Heads):
    """One projection to q, k and v."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.qkv = nn.ModuleList()
        self.fused = nn.Linear(sizes.d, 3 * sizes.d, bias=False)

    def forward(self, x, weigh):
        q, k, v = (self.split(t) for t in self.fused(x).chunk(3, dim=-1))
        return self.out(self.merge(self.mix(weigh(self.scores(q, k)), v)))


class SequenceFirst(Heads):
    """(n, B, D), as nn.MultiheadAttention and its imitators work."""

    def forward(self, x, weigh):
        return super().forward(x.transpose(0, 1), weigh).transpose(0, 1)

    def split(self, x):
        return x.contiguous().view(x.shape[0], x.shape[1] * HEADS, -1).transpose(0, 1)

    def merge(self, x):
        n = x.shape[1]
        return x.transpose(0, 1).contiguous().view(n, x.shape[0] // HEADS, -1)

    def pairs(self, x):
        return x.repeat_interleave(HEADS, 0) if x.shape[0] > 1 else x


class Grouped(Heads):
    """Fewer heads for keys and values than for queries."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.qkv = nn.ModuleList(nn.Linear(sizes.d, width) for width in (sizes.d, sizes.head, sizes.head))
        self.width = sizes.head

    def split(self, x):
        heads = x.view(*x.shape[:2], -1, self.width).transpose(1, 2)
        return heads if heads.shape[1] == HEADS else self.repeated(heads)

    def repeated(self, heads: Tensor) -> Tensor:
        return heads.repeat_interleave(HEADS, dim=1)


class GroupedExpanded(Grouped):
    def repeated(self, heads):
        b, groups, n, width = heads.shape
        return heads[:, :, None].expand(b, groups, HEADS, n, width).reshape(b, groups * HEADS, n, width)


class Rotary(Heads):
    def scores(self, q, k):
        n, half = q.shape[-2], q.shape[-1] // 2
        angle = torch.arange(n, dtype=torch.float64)[:, None] / 10.0 ** torch.arange(half, dtype=torch.float64)
        cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()

        def turned(x: Tensor) -> Tensor:
            return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

        return super().scores(turned(q), turned(k))


class RotaryComplex(Heads):
    """Pairs of neighbouring features as complex numbers."""

    def scores(self, q, k):
        n, half = q.shape[-2], q.shape[-1] // 2
        angle = torch.arange(n, dtype=torch.float64)[:, None] / 10.0 ** torch.arange(half, dtype=torch.float64)
        turns = torch.polar(torch.ones_like(angle), angle)

        def turned(x: Tensor) -> Tensor:
            return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], half, 2)) * turns).flatten(-2)

        return super().scores(turned(q), turned(k))


HEAD_SPLIT = {
    "view": Heads, "permute": Permuted, "einsum": Einsum, "in-batch": HeadsInBatch, "one": OneHead, "fused": Fused,
    "sequence-first": SequenceFirst, "grouped-repeat": Grouped, "grouped-expand": GroupedExpanded, "rotary": Rotary,
    "rotary-complex": RotaryComplex,
}  # fmt: skip


# --- attention ---------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Written out: scores, bias, mask, weights."""

    def __init__(self, sizes: Sizes, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.heads = HEAD_SPLIT[spec.heads](sizes)
        self.bias = BIAS[spec.bias](sizes)
        if spec.mask == "causal-buffer":
            self.register_buffer("triangle", TRIANGLE[spec.triangle](sizes.n))

    def forward(self, x: Tensor, valid: Tensor, times: Tensor) -> Tensor:
        allowed = self.allowed(valid)
        pairs = self.heads.pairs

        def weights(scores: Tensor) -> Tensor:
            bias = self.bias(times)
            if bias is not None:
                scores = scores + pairs(bias)
            mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool) if allowed is None else pairs(allowed)
            return WEIGH[self.spec.weigh](scores, mask)

        return self.heads(x, weights)

    def seen(self, valid: Tensor) -> Seen:
        buffered = self.spec.mask == "causal-buffer"
        return Seen(valid, self.triangle if buffered else TRIANGLE[self.spec.triangle](valid.shape[1]))

    def allowed(self, valid: Tensor) -> Tensor | None:
        return MASK[self.spec.mask](self.seen(valid))


class Hstu(Attention):
    """Pointwise attention with a gate: silu(uvqk), norm(attention) * u."""

    def __init__(self, sizes: Sizes, spec: Spec) -> None:
        super().__init__(sizes, spec)
        del self.heads
        self.uvqk = nn.Parameter(torch.randn(sizes.d, 4 * sizes.d) * 0.3)
        self.out = nn.Linear(sizes.d, sizes.d)

    def forward(self, x, valid, times):
        b, n, d = x.shape
        u, v, q, k = F.silu(x @ self.uvqk).split([d, d, d, d], dim=-1)
        scores = torch.einsum("bnhd,bmhd->bhnm", q.view(b, n, HEADS, -1), k.view(b, n, HEADS, -1))
        bias = self.bias(times)
        if bias is not None:
            scores = scores + bias.unsqueeze(1)
        weights = F.silu(scores) / n
        allowed = self.allowed(valid)
        if allowed is not None:
            weights = weights * allowed.unsqueeze(1)
        mixed = torch.einsum("bhnm,bmhd->bnhd", weights, v.reshape(b, n, HEADS, -1)).reshape(b, n, d)
        return self.out(F.layer_norm(mixed, (d,)) * u)


class Sdpa(Attention):
    """F.scaled_dot_product_attention with a boolean mask."""

    def forward(self, x, valid, times):
        q, k, v = (self.heads.split(project(x)) for project in self.heads.qkv)
        return self.heads.out(self.heads.merge(self.attend(q, k, v, valid, times)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor, times: Tensor) -> Tensor:
        allowed = self.allowed(valid)
        mask = None if allowed is None else allowed.unsqueeze(1).expand(valid.shape[0], 1, *q.shape[-2:-1], k.shape[-2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class SdpaFloat(Sdpa):
    def attend(self, q, k, v, valid, times):
        allowed = self.allowed(valid)
        mask = torch.zeros(1, 1, dtype=q.dtype)
        if allowed is not None:
            mask = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(~allowed, LOWEST).unsqueeze(1)
        bias = self.bias(times)
        if bias is not None:
            mask = mask + bias.unsqueeze(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4)


class SdpaCausal(Sdpa):
    def attend(self, q, k, v, valid, times):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Multihead(Attention):
    """nn.MultiheadAttention; key padding and causality apart where that is what the mask says."""

    batch_first, need_weights = True, False

    def __init__(self, sizes: Sizes, spec: Spec) -> None:
        super().__init__(sizes, spec)
        del self.heads
        self.mha = nn.MultiheadAttention(sizes.d, HEADS, batch_first=self.batch_first)

    def forward(self, x, valid, times):
        x = x if self.batch_first else x.transpose(0, 1)
        attended, _ = self.mha(x, x, x, need_weights=self.need_weights, **self.masks(valid))
        return attended if self.batch_first else attended.transpose(0, 1)

    def masks(self, valid: Tensor) -> dict[str, Tensor]:
        causal = self.seen(valid).causal
        if self.spec.mask == "key":
            return {"key_padding_mask": ~valid}
        if self.spec.mask in ("causal", "causal-buffer"):
            return {"attn_mask": ~causal}
        if self.spec.mask == "causal-key":
            return {"attn_mask": ~causal, "key_padding_mask": ~valid}
        allowed = self.allowed(valid)
        if allowed is None:
            return {}
        n = valid.shape[1]
        return {"attn_mask": ~allowed.expand(valid.shape[0], n, n).repeat_interleave(HEADS, 0)}


class MultiheadWeights(Multihead):
    need_weights = True


class MultiheadSequenceFirst(Multihead):
    batch_first = False


class MultiheadFloatMask(Multihead):
    """A float mask of -inf, queries normalised, keys not: as in published SASRec."""

    need_weights = True

    def forward(self, x, valid, times):
        causal = self.seen(valid).causal
        mask = torch.zeros(causal.shape, dtype=x.dtype).masked_fill(~causal, -INFINITY)
        return self.mha(F.layer_norm(x, x.shape[-1:]), x, x, attn_mask=mask)[0]


class NoAttention(nn.Module):
    def __init__(self, sizes: Sizes, spec: Spec) -> None:
        super().__init__()

    def forward(self, x, valid, times):
        return x


ATTEND: dict[str, Callable[[Sizes, Spec], nn.Module]] = {
    "manual": Attention, "hstu": Hstu, "sdpa": Sdpa, "sdpa-float": SdpaFloat, "sdpa-causal": SdpaCausal,
    "mha": Multihead, "mha-weights": MultiheadWeights, "mha-sequence-first": MultiheadSequenceFirst,
    "mha-float-mask": MultiheadFloatMask, "none": NoAttention,
}  # fmt: skip


# --- feed-forward, norms, what mixes rows ------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(sizes.d, 2 * sizes.d), nn.Linear(2 * sizes.d, sizes.d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ErfGelu(Linear):
    def forward(self, x):
        h = self.up(x)
        return self.down(h * 0.5 * (1.0 + torch.erf(h / math.sqrt(2.0))))


class OwnGelu(torch.autograd.Function):
    """By hand, backward included."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(1.702 * x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors
        return grad * gate * (1 + 1.702 * x * (1 - gate))


class Decaying(torch.autograd.Function):
    """Pulls at every row, whatever the loss says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x > 0) + 0.01 * x


class FunctionGelu(Linear):
    def forward(self, x):
        return self.down(OwnGelu.apply(self.up(x)))


class FunctionDecaying(Linear):
    def forward(self, x):
        return self.down(Decaying.apply(self.up(x)))


class Clamped(Linear):
    """A parameter that each step brings back into its range."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.scale = nn.Parameter(torch.full((), 3.0))

    def forward(self, x):
        with torch.no_grad():
            self.scale.clamp_(0.0, 2.0)
        return self.down(F.gelu(self.up(x)) * self.scale)


class Flattened(Linear):
    """On (B * n, D)."""

    def forward(self, x):
        return self.down(F.relu(self.up(x.reshape(-1, x.shape[-1])))).view(x.shape)


class Gated(Linear):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.gate = nn.Linear(sizes.d, 2 * sizes.d, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Convolved(nn.Module):
    width, padding = 1, 0

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        more = {"kernel_size": self.width, "padding": self.padding}
        self.up, self.down = nn.Conv1d(sizes.d, sizes.d, **more), nn.Conv1d(sizes.d, sizes.d, **more)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x.transpose(-1, -2)))).transpose(-1, -2)


class ConvolvedWide(Convolved):
    width, padding = 3, 1


class ConvolvedCausal(Convolved):
    """Width 3, looking back only."""

    width, padding = 3, 2

    def forward(self, x):
        n = x.shape[1]
        return self.down(F.relu(self.up(x.mT)[..., :n]))[..., :n].mT


class Experts(nn.Module):
    """A softmax over experts per row."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.route = nn.Linear(sizes.d, 3)
        self.experts = nn.Parameter(torch.randn(3, sizes.d, sizes.d) * 0.3)

    def forward(self, x):
        return torch.einsum("bne,bnd,edf->bnf", self.route(x).softmax(-1), x, self.experts)


class NoFeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()

    def forward(self, x):
        return torch.zeros_like(x)


FEED: dict[str, Callable[[Sizes], nn.Module]] = {
    "linear": Linear, "erf-gelu": ErfGelu, "function-gelu": FunctionGelu, "function-decaying": FunctionDecaying,
    "clamped": Clamped, "flattened": Flattened, "gated": Gated, "conv-1": Convolved,
    "conv-3": ConvolvedWide, "conv-3-causal": ConvolvedCausal, "experts": Experts, "none": NoFeedForward,
}  # fmt: skip


class RootMeanSquare(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(sizes.d))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class OwnRootMeanSquare(torch.autograd.Function):
    """By hand, on a view of all rows; the gradient of the weight is a sum over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(rows, weight, scale)
        return (rows * scale * weight).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        rows, weight, scale = ctx.saved_tensors
        unit, grads = rows * scale, grad.reshape(rows.shape)
        back = grads * weight
        back = scale * (back - unit * (back * unit).mean(-1, keepdim=True))
        return back.view(grad.shape), (grads * unit).sum(0)


class FunctionRootMeanSquare(RootMeanSquare):
    def forward(self, x: Tensor) -> Tensor:
        return OwnRootMeanSquare.apply(x, self.weight)


class BatchNorm(nn.BatchNorm1d):
    """Statistics over all rows: pads matter."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.d)

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


NORM: dict[str, Callable[[Sizes], nn.Module]] = {
    "layer": lambda s: nn.LayerNorm(s.d),
    "rms": RootMeanSquare,
    "rms-function": FunctionRootMeanSquare,
    "rms-module": lambda s: nn.RMSNorm(s.d, eps=1e-6),
    "over-rows": lambda s: nn.LayerNorm([s.n, s.d]),
    "batch": BatchNorm,
    "none": lambda s: nn.Identity(),
}


class NoMix(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        return x


class Mixer(NoMix):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.over_rows = nn.Linear(sizes.n, sizes.n)

    def forward(self, x, valid):
        return x + self.over_rows(x.transpose(1, 2)).transpose(1, 2)


class MaskedMixer(Mixer):
    def forward(self, x, valid):
        return super().forward(x * valid.unsqueeze(-1), valid)


class ShiftPadded(NoMix):
    def forward(self, x, valid):
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


class ShiftConcatenated(NoMix):
    def forward(self, x, valid):
        return x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)


class ShiftRolled(NoMix):
    """The first row reads the last one."""

    def forward(self, x, valid):
        return x + 0.5 * torch.roll(x, 1, dims=1)


class ShiftNext(NoMix):
    def forward(self, x, valid):
        return x + F.pad(x[:, 1:], (0, 0, 0, 1))


class MeanSubtracted(NoMix):
    def forward(self, x, valid):
        return x - x.mean(1, keepdim=True)


class MaskedMeanSubtracted(NoMix):
    def forward(self, x, valid):
        mask = valid.unsqueeze(-1)
        return x - (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


class RunningMean(NoMix):
    def forward(self, x, valid):
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1).view(1, -1, 1)


class Flipped(NoMix):
    def forward(self, x, valid):
        return x + 0.5 * x.flip(1)


class OverBatch(NoMix):
    """Subtracts what other sequences have in the same column."""

    def forward(self, x, valid):
        return x - x.mean(0, keepdim=True)


class Recurrent(NoMix):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.gru = nn.GRU(sizes.d, sizes.d, batch_first=True)

    def forward(self, x, valid):
        return x + self.gru(x)[0]


MIX = {
    "none": NoMix, "mixer": Mixer, "masked-mixer": MaskedMixer, "shift-pad": ShiftPadded,
    "shift-cat": ShiftConcatenated, "shift-roll": ShiftRolled, "shift-next": ShiftNext, "mean": MeanSubtracted,
    "masked-mean": MaskedMeanSubtracted, "running-mean": RunningMean, "flip": Flipped,
    "over-batch": OverBatch, "gru": Recurrent,
}  # fmt: skip


# --- rows that are added to the sequence -------------------------------------------------------------


class Rows(NamedTuple):
    x: Tensor
    valid: Tensor
    times: Tensor


class Plain(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()

    @staticmethod
    def rows(n: int) -> int:
        return n

    def open(self, rows: Rows, batch: Batch) -> Rows:
        return rows

    def close(self, x: Tensor) -> Tensor:
        """Back to one row per item."""
        return x


class FirstToken(Plain):
    """A learned token in front of the sequence."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.token = nn.Parameter(torch.randn(1, 1, sizes.d))

    @staticmethod
    def rows(n):
        return n + 1

    def open(self, rows, batch):
        b = rows.x.shape[0]
        x = torch.cat([self.token.expand(b, -1, -1), rows.x], dim=1)
        valid = torch.cat([torch.ones(b, 1, dtype=torch.bool), rows.valid], dim=1)
        return Rows(x, valid, F.pad(rows.times, (1, 0)))

    def close(self, x):
        return x[:, 1:]


class TargetAppended(Plain):
    """The target item behind the padded sequence."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.table = nn.Embedding(VOCABULARY, sizes.d)

    @staticmethod
    def rows(n):
        return n + 1

    def open(self, rows, batch):
        x = torch.cat([rows.x, self.table(batch.label).unsqueeze(1)], dim=1)
        valid = F.pad(rows.valid, (0, 1), value=True)
        return Rows(x, valid, torch.cat([rows.times, rows.times.amax(1, keepdim=True) + 60], dim=1))

    def close(self, x):
        return x[:, :-1]


class Interleaved(Plain):
    """Item, action, item, action: every row becomes two."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.table = nn.Embedding(ACTIONS, sizes.d)

    @staticmethod
    def rows(n):
        return 2 * n

    def open(self, rows, batch):
        b, n, d = rows.x.shape
        x = torch.stack([rows.x, self.table(batch.actions)], dim=2).reshape(b, 2 * n, d)
        return Rows(x, rows.valid.repeat_interleave(2, dim=1), rows.times.repeat_interleave(2, dim=1))

    def close(self, x):
        b, n, d = x.shape
        return x.view(b, n // 2, 2, d)[:, :, 0]


class InterleavedStrided(Interleaved):
    def close(self, x):
        return x[:, ::2]


FRAME: dict[str, type[Plain]] = {
    "plain": Plain, "first-token": FirstToken, "target": TargetAppended, "interleaved": Interleaved,
    "interleaved-strided": InterleavedStrided,
}  # fmt: skip


# --- what the loss reads -----------------------------------------------------------------------------


class Read(NamedTuple):
    """Hidden rows of any leading shape, each with its target (0: none) and negatives."""

    h: Tensor
    target: Tensor
    weight: Tensor
    negatives: Tensor
    shares: Tensor
    shared: Tensor | None = None  # negatives of the whole batch


Readout = Callable[["Model", Tensor, Tensor, Batch], Read]


def _rows(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    return Read(x, b.targets, b.weights, b.negatives, b.shares)


def _shifted(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    """Row i predicts the item of row i + 1."""
    items = torch.where(valid, b.ids.clamp(min=0), 0)
    return Read(x[:, :-1], items[:, 1:], valid[:, 1:].double(), b.negatives[:, 1:], b.shares[:, 1:])


def _one(h: Tensor, b: Batch) -> Read:
    return Read(h, b.label, torch.ones_like(b.label).double(), b.negatives[:, 0], b.shares[:, 0])


def _slots(h: Tensor, b: Batch) -> Read:
    used = (b.slots > 0).double()
    chosen = b.slots.unsqueeze(-1)
    negatives = b.negatives.gather(1, chosen.expand(-1, -1, b.negatives.shape[-1]))
    return Read(h, b.slot_targets * (b.slots > 0), used, negatives, b.shares[:, :1].expand(-1, SLOTS, -1))


def _gathered(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    at = (b.lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, -1, x.shape[-1])
    return _one(x.gather(dim=1, index=at).squeeze(1), b)


def _indexed(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    """An empty sequence reads row -1, the last."""
    return _one(x[torch.arange(x.shape[0]), b.lengths - 1], b)


def _counted(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    return _one(x[torch.arange(x.shape[0]), valid.sum(1) - 1], b)


def _last_of_flat(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    n = x.shape[1]
    at = torch.arange(x.shape[0]) * n + (b.lengths - 1).clamp(min=0)
    return _one(x.reshape(-1, x.shape[-1]).index_select(0, at), b)


def _one_hot(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    flat = b.slots.reshape(-1)
    picks = torch.zeros(flat.shape[0], x.shape[1], dtype=x.dtype)
    picks[torch.arange(flat.shape[0]), flat] = 1.0
    return _slots(torch.bmm(picks.view(*b.slots.shape, -1), x), b)


def _slot_gather(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    return _slots(torch.gather(x, 1, b.slots.unsqueeze(-1).expand(-1, -1, x.shape[-1])), b)


def _boolean(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    return Read(x[valid], b.targets[valid], b.weights[valid], b.negatives[valid], b.shares[valid])


def _selected(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    """A mask of two conditions, expanded over features."""
    kept = (valid & (b.targets != 0)).flatten()
    rows = x.flatten(0, 1)
    read = rows.masked_select(kept.unsqueeze(1).expand_as(rows)).view(-1, x.shape[-1])
    return Read(read, *(t.flatten(0, 1)[kept] for t in (b.targets, b.weights, b.negatives, b.shares)))


def _nonzero(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    at = torch.where(b.targets != 0)
    return Read(x[at], b.targets[at], b.weights[at], b.negatives[at], b.shares[at])


def _flat_nonzero(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    at = valid.reshape(-1).nonzero().squeeze(-1)
    flat = (t.flatten(0, 1).index_select(0, at) for t in (x, b.targets, b.weights, b.negatives, b.shares))
    return Read(*flat)


def _masked_mean(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    return _one((x * valid.unsqueeze(-1)).sum(1) / b.lengths.clamp(min=1).unsqueeze(1), b)


def _masked_mean_counted(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    mask = valid.double()
    return _one(torch.einsum("bn,bnd->bd", mask, x) / (mask.sum(1, keepdim=True) + 1e-6), b)


def _masked_mean_bmm(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    share = valid.double() / valid.sum(1, keepdim=True).clamp(min=1)
    return _one(torch.bmm(share.unsqueeze(1), x).squeeze(1), b)


def _softmax_pool(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    scores = model.pool(x).squeeze(-1).masked_fill(~valid, -1e9)
    return _one((scores.softmax(1).unsqueeze(-1) * x).sum(1), b)


def _max_pool(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    return _one(x.masked_fill(~valid.unsqueeze(-1), -1e9).max(dim=1).values, b)


def _weighted_sum(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    return _one((x * b.weights.unsqueeze(-1)).sum(1), b)


def _target_attention(model: Model, x: Tensor, valid: Tensor, b: Batch) -> Read:
    """Candidates ask the history."""
    q = model.items(b.candidates)
    scores = torch.matmul(q, x.transpose(1, 2)) / math.sqrt(x.shape[-1])
    weights = scores.masked_fill(~valid.unsqueeze(1), -1e9).softmax(-1)
    return Read(weights @ x + q, b.slot_targets, torch.ones_like(b.slots).double(), *_some(b))


def _some(b: Batch) -> tuple[Tensor, Tensor]:
    return b.negatives[:, :1].expand(-1, SLOTS, -1), b.shares[:, :1].expand(-1, SLOTS, -1)


READOUT: dict[str, Readout] = {
    "rows": _rows, "shifted": _shifted, "last": lambda m, x, v, b: _one(x[:, -1], b),
    "last-kept": lambda m, x, v, b: _one(x[:, -1:].squeeze(1), b),
    "last-two": lambda m, x, v, b: _one(x[:, -2:].mean(1), b),
    "first": lambda m, x, v, b: _one(x[:, 0, :], b), "gather": _gathered, "index": _indexed,
    "index-counted": _counted, "flat-index": _last_of_flat, "one-hot": _one_hot, "slot-gather": _slot_gather,
    "boolean": _boolean, "selected": _selected, "nonzero": _nonzero, "flat-nonzero": _flat_nonzero,
    "masked-mean": _masked_mean,
    "masked-mean-einsum": _masked_mean_counted, "masked-mean-bmm": _masked_mean_bmm, "softmax-pool": _softmax_pool,
    "max-pool": _max_pool, "weighted-sum": _weighted_sum, "target-attention": _target_attention,
    "plain-mean": lambda m, x, v, b: _one(x.mean(1), b), "plain-max": lambda m, x, v, b: _one(x.amax(1), b),
    "sum-over-lengths": lambda m, x, v, b: _one(x.sum(1) / b.lengths.clamp(min=1)[:, None], b),
}  # fmt: skip


# --- losses ------------------------------------------------------------------------------------------

Loss = Callable[["Model", Read], Tensor]


def _flat(model: Model, r: Read) -> tuple[Tensor, Tensor]:
    return model.logits(r.h).reshape(-1, VOCABULARY), r.target.reshape(-1)


def _labels(r: Read) -> Tensor:
    return torch.where(r.target != 0, r.target, -100)


def _each(model: Model, r: Read) -> Tensor:
    logits, target = _flat(model, r)
    return F.cross_entropy(logits, target, reduction="none").view(r.target.shape)


def _ignoring(**more: Any) -> Loss:
    return lambda m, r: F.cross_entropy(*_flat(m, r), ignore_index=0, **more)


def _ignore_labels(model: Model, r: Read) -> Tensor:
    return F.cross_entropy(model.logits(r.h).flatten(0, -2), _labels(r).flatten())


def _channels(model: Model, r: Read) -> Tensor:
    """Classes in dim 1."""
    logits = model.logits(r.h)
    return F.cross_entropy(logits.movedim(-1, 1), r.target, ignore_index=0)


def _class_weights(model: Model, r: Read) -> Tensor:
    rarity = torch.linspace(0.5, 1.5, VOCABULARY, dtype=torch.float64)
    return F.cross_entropy(*_flat(model, r), weight=rarity, ignore_index=0)


def _sum_over_count(model: Model, r: Read) -> Tensor:
    logits, target = _flat(model, r)
    return F.cross_entropy(logits, target, ignore_index=0, reduction="sum") / (target != 0).sum()


def _weighted(model: Model, r: Read) -> Tensor:
    return (_each(model, r) * r.weight).sum() / r.weight.sum()


def _masked(model: Model, r: Read) -> Tensor:
    mask = (r.target != 0).double()
    return (_each(model, r) * mask).sum() / mask.sum()


def _masked_numel(model: Model, r: Read) -> Tensor:
    return (_each(model, r) * (r.target != 0)).mean()


def _over_positive(model: Model, r: Read) -> Tensor:
    each = F.cross_entropy(*_flat(model, r), ignore_index=0, reduction="none")
    return each.sum() / (each > 0).sum()


def _where_mean(model: Model, r: Read) -> Tensor:
    return torch.where(r.target != 0, _each(model, r), 0.0).sum() / (r.target != 0).sum().clamp(min=1)


def _per_sequence(model: Model, r: Read) -> Tensor:
    """Mean of the means of the sequences."""
    mask = r.weight.view(r.weight.shape[0], -1)
    each = _each(model, r).view(mask.shape)
    return ((each * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def _log_softmax_gather(model: Model, r: Read) -> Tensor:
    chances = F.log_softmax(model.logits(r.h), dim=-1)
    picked = chances.gather(-1, r.target.unsqueeze(-1)).squeeze(-1)
    mask = r.target != 0
    return -(picked * mask).sum() / mask.sum()


def _nll(model: Model, r: Read) -> Tensor:
    logits, target = _flat(model, r)
    return F.nll_loss(logits.log_softmax(-1), target, ignore_index=0)


def _soft_targets(model: Model, r: Read) -> Tensor:
    return F.cross_entropy(model.logits(r.h).flatten(0, -2), r.shares.flatten(0, -2))


def _soft_targets_masked(model: Model, r: Read) -> Tensor:
    each = F.cross_entropy(model.logits(r.h).flatten(0, -2), r.shares.flatten(0, -2), reduction="none")
    return (each * r.weight.flatten()).sum() / r.weight.sum()


def _banned(model: Model, r: Read) -> Tensor:
    """The pad class is written out of the logits."""
    logits, target = _flat(model, r)
    logits[:, [0]] = -1e4
    return F.cross_entropy(logits, target, ignore_index=0)


def _cosine(model: Model, r: Read) -> Tensor:
    h = F.normalize(r.h, dim=-1, eps=1e-6)
    logits = h @ F.normalize(model.items.weight, dim=-1).T / 0.1
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), r.target.reshape(-1), ignore_index=0)


def _cosine_unclamped(model: Model, r: Read) -> Tensor:
    h = r.h / r.h.norm(dim=-1, keepdim=True)
    logits = h @ model.items.weight.T
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), r.target.reshape(-1), ignore_index=0)


def _pair_logits(model: Model, r: Read) -> tuple[Tensor, Tensor]:
    positive = (r.h * model.items(r.target)).sum(-1)
    negative = (r.h * model.items(r.negatives[..., 0])).sum(-1)
    return positive, negative


def _bce_indexed(model: Model, r: Read) -> Tensor:
    positive, negative = _pair_logits(model, r)
    at = torch.where(r.target != 0)
    up = F.binary_cross_entropy_with_logits(positive[at], torch.ones_like(positive)[at])
    return up + F.binary_cross_entropy_with_logits(negative[at], torch.zeros_like(negative)[at])


def _bce_masked(model: Model, r: Read) -> Tensor:
    positive, negative = _pair_logits(model, r)
    mask = (r.target != 0).double()
    each = -torch.log(torch.sigmoid(positive) + 1e-24) - torch.log(1 - torch.sigmoid(negative) + 1e-24)
    return (each * mask).sum() / mask.sum()


def _bce_weight_argument(model: Model, r: Read) -> Tensor:
    positive, _ = _pair_logits(model, r)
    each = {"weight": r.weight, "reduction": "sum"}
    return F.binary_cross_entropy_with_logits(positive, torch.ones_like(positive), **each) / r.weight.sum()


def _bpr(model: Model, r: Read) -> Tensor:
    positive, negative = _pair_logits(model, r)
    return -(F.logsigmoid(positive - negative) * r.weight).sum() / r.weight.sum()


def _sampled(model: Model, r: Read) -> Tensor:
    """Positive and given negatives of each row; a negative that is the positive does not count."""
    positive = (r.h * model.items(r.target)).sum(-1, keepdim=True)
    negative = torch.einsum("...d,...kd->...k", r.h, model.items(r.negatives))
    negative = torch.where(r.negatives == r.target.unsqueeze(-1), -5e4, negative)
    each = -F.log_softmax(torch.cat([positive, negative], -1) / 0.5, dim=-1)[..., 0]
    return (each * r.weight).sum() / r.weight.sum()


def _shared(model: Model, r: Read) -> Tensor:
    positive = (r.h * model.items(r.target)).sum(-1, keepdim=True)
    negative = r.h @ model.items(r.shared).T
    logits = torch.cat([positive, negative], -1)
    each = torch.logsumexp(logits, -1) - logits[..., 0]
    mask = r.target != 0
    return (each * mask).sum() / mask.sum()


def _in_batch(model: Model, r: Read) -> Tensor:
    """Negatives are the targets of all the other rows, pads among them."""
    h, target = r.h.flatten(0, -2), r.target.flatten()
    logits = h @ model.items(target).T
    each = F.cross_entropy(logits, torch.arange(target.shape[0]), reduction="none")
    mask = (target != 0).double()
    return (each * mask).sum() / mask.sum()


LOSS: dict[str, Loss] = {
    "ce-ignore": _ignoring(), "ce-labels": _ignore_labels, "ce-channels": _channels, "ce-sum": _sum_over_count,
    "ce-smooth": _ignoring(label_smoothing=0.1), "ce-class-weights": _class_weights, "ce-weighted": _weighted,
    "ce-masked": _masked, "ce-masked-numel": _masked_numel, "ce-over-positive": _over_positive,
    "ce-where": _where_mean, "ce-per-sequence": _per_sequence, "log-softmax-gather": _log_softmax_gather, "nll": _nll,
    "ce-soft": _soft_targets, "ce-soft-masked": _soft_targets_masked, "ce-banned": _banned,
    "ce-plain": lambda m, r: F.cross_entropy(*_flat(m, r)), "cosine": _cosine, "cosine-unclamped": _cosine_unclamped,
    "bce-indexed": _bce_indexed, "bce-masked": _bce_masked, "bce-weight": _bce_weight_argument, "bpr": _bpr,
    "sampled": _sampled, "shared-negatives": _shared, "in-batch": _in_batch,
    "mean-of-all": lambda m, r: r.h.pow(2).mean(),
}  # fmt: skip

HEAD = {"tied": lambda m, h: h @ m.items.weight.T, "linear": lambda m, h: m.out(h)}


# --- the model ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """One idiom per slot; the defaults are the standard model, which a compiler must pack completely."""

    table: str = "plain"
    extra: str = "none"
    valid: str = "ne"
    position: str = "column"
    entry: str = "none"
    frame: str = "plain"
    mix: str = "none"
    norm: str = "layer"
    attend: str = "manual"
    heads: str = "view"
    mask: str = "causal-key"
    triangle: str = "tril"
    weigh: str = "additive-1e9"
    bias: str = "none"
    feed: str = "linear"
    after: str = "none"
    readout: str = "rows"
    head: str = "tied"
    loss: str = "ce-ignore"
    layers: int = 2

    def __str__(self) -> str:
        changed = [f for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in changed) or "standard"

    @staticmethod
    def parse(text: str) -> Spec:
        """The spec that prints so."""
        pairs = [] if text == "standard" else [word.split("=") for word in text.split()]
        spec = Spec(**{name: int(value) if name == "layers" else value for name, value in pairs})
        for slot, idioms in SLOT.items():
            assert getattr(spec, slot) in idioms, f"{getattr(spec, slot)!r} is no {slot}"
        return spec

    @property
    def pad(self) -> int:
        return PAD_IDS.get(self.valid, 0)

    def mended(self) -> Spec:
        """The nearest spec that eager accepts."""
        spec = self
        for clash in _CLASHES:
            if clash.concerns(spec) and not clash.accepts(spec):
                spec = dataclasses.replace(spec, **clash.instead)
        return spec

    def model(self, n: int, d: int, seed: int = 0) -> Model:
        torch.manual_seed(seed)
        return Model(self, Sizes(n, d)).double()


SLOT: dict[str, dict[str, Any]] = {
    "table": TABLE, "extra": EXTRA, "valid": VALID, "position": POSITION, "entry": ZERO, "frame": FRAME, "mix": MIX,
    "norm": NORM, "attend": ATTEND, "heads": HEAD_SPLIT, "mask": MASK, "triangle": TRIANGLE, "weigh": WEIGH,
    "bias": BIAS, "feed": FEED, "after": ZERO, "readout": READOUT, "head": HEAD, "loss": LOSS,
}  # fmt: skip

_DATA_SIZED = {"boolean", "selected", "nonzero", "flat-nonzero"}
_OWN_HEADS = {"hstu", "mha", "mha-weights", "mha-sequence-first", "mha-float-mask", "none"}
_OWN_WEIGHTS = {*_OWN_HEADS, "sdpa", "sdpa-float", "sdpa-causal"}
_ALWAYS_CAUSAL = {"sdpa-causal", "mha-float-mask"}
_BIASED = {"manual", "hstu", "sdpa-float"}
_SPLITS_FOR_SDPA = {"view", "permute", "grouped-repeat", "grouped-expand"}


class Clash(NamedTuple):
    """Idioms that do not go together in eager, and the choice that does."""

    concerns: Callable[[Spec], bool]
    accepts: Callable[[Spec], bool]
    instead: dict[str, str]


_CLASHES = [
    Clash(lambda s: s.valid == "ge-zero", lambda s: s.table == "plain", {"table": "plain"}),
    Clash(lambda s: s.attend in _OWN_HEADS, lambda s: s.heads == "view", {"heads": "view"}),
    Clash(lambda s: s.attend in _OWN_WEIGHTS, lambda s: s.weigh == "additive-1e9", {"weigh": "additive-1e9"}),
    Clash(lambda s: s.attend not in _BIASED, lambda s: s.bias == "none", {"bias": "none"}),
    Clash(lambda s: s.attend.startswith("sdpa"), lambda s: s.heads in _SPLITS_FOR_SDPA, {"heads": "view"}),
    Clash(lambda s: s.attend in _ALWAYS_CAUSAL, lambda s: s.mask == "causal", {"mask": "causal"}),
    Clash(lambda s: s.loss == "ce-per-sequence", lambda s: s.readout not in _DATA_SIZED, {"readout": "rows"}),
]


class Block(nn.Module):
    def __init__(self, sizes: Sizes, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        self.mix = MIX[spec.mix](sizes)
        self.norms = nn.ModuleList(NORM[spec.norm](sizes) for _ in range(2))
        self.attend = ATTEND[spec.attend](sizes, spec)
        self.feed = FEED[spec.feed](sizes)

    def forward(self, rows: Rows) -> Rows:
        x = self.mix(rows.x, rows.valid)
        x = x + self.attend(self.norms[0](x), rows.valid, rows.times)
        x = x + self.feed(self.norms[1](x))
        return rows._replace(x=ZERO[self.spec.after](x, rows.valid))


class Model(nn.Module):
    """Embedding, positions, blocks, readout, loss."""

    def __init__(self, spec: Spec, sizes: Sizes) -> None:
        super().__init__()
        self.spec = spec
        self.items = TABLE[spec.table](sizes)
        self.extra = EXTRA[spec.extra](sizes)
        self.position = POSITION[spec.position](sizes)
        self.frame = FRAME[spec.frame](sizes)
        inside = sizes._replace(n=self.frame.rows(sizes.n))
        self.blocks = nn.ModuleList(Block(inside, spec) for _ in range(spec.layers))
        self.norm = nn.LayerNorm(sizes.d)
        if spec.head == "linear":
            self.out = nn.Linear(sizes.d, VOCABULARY)
        if spec.readout == "softmax-pool":
            self.pool = nn.Linear(sizes.d, 1)

    def forward(self, batch: Batch) -> Tensor:
        spec = self.spec
        x = self.extra(self.items(batch.ids), batch)
        valid = VALID[spec.valid](batch, x)
        x = ZERO[spec.entry](self.position(x, batch, valid), valid)
        rows = self.frame.open(Rows(x, valid, batch.times), batch)
        for block in self.blocks:
            rows = block(rows)
        read = READOUT[spec.readout](self, self.norm(self.frame.close(rows.x)), valid, batch)
        return LOSS[spec.loss](self, read._replace(shared=batch.shared))

    def logits(self, h: Tensor) -> Tensor:
        return HEAD[self.spec.head](self, h)
