"""Losses of a positive against sampled negatives, looked up, scored and differentiated in one go.

    positive[t] = scale · <query[t], row(positive_ids[t])>
    logit[t, j] = scale · <query[t], row(id of j)>          for all negatives j of t's group
                = hit_value                                 where the id of j is that of t's positive
    loss[t]     = log(exp(positive[t]) + sum over j of exp(logit[t, j])) - positive[t]      kind "softmax"
                = softplus(-positive[t]) + sum over j of softplus(logit[t, j])              kind "bce"
    total       = sum over t of weights[t] · loss[t]

`row` is that of kernels/lookup.py, with or without a norm. A `hit_value` of nan masks no hits. `group` neighbouring
positions share their negatives (logit sharing): each meets the group · K negatives of its group, the last of which may
be shorter. With 1 each position has its own. `half`, `places` and `scales` stand in for rows of negatives.

The gradient of a sum is known but for one factor. So the queries' gradient, and the slope of each logit, are computed
while looked-up rows are in cache, and multiplied in the end. What is kept between forward and backward is one number
for each logit; rows of the table are read once.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .contract import INT64, REAL, Array, Flags, Range, Whole, Word
from .cpu import sampled_loss as cpu
from .declare import accumulator, as_given, compose, declare, require
from .lookup import COPIED, GROUP, Source, look_up, parts

ops = torch.ops.turbogr

KINDS = ("softmax", "bce")


class Inputs(NamedTuple):
    """Arguments of the op, in the order of its schema."""

    query: Tensor  # (T, D)
    table: Tensor  # (V, D)
    positive_ids: Tensor  # int64 (T,)
    ids: Tensor  # int64 (T, K)
    weights: Tensor | None  # (T,)
    scale: float
    eps: float
    hit_value: float
    group: int
    kind: str
    half: Tensor | None = None
    places: Tensor | None = None
    scales: Tensor | None = None

    @property
    def source(self) -> Source:
        return Source(self.table, self.half, self.places, self.scales)

    @property
    def real(self) -> torch.dtype:
        return accumulator(self.query.dtype)


# --- reference ---------------------------------------------------------------------------------------


def total(*arguments: Any) -> Tensor:
    """Sum of the losses, times `weights` where given; gradients come along where somebody may ask."""
    a = Inputs(*arguments)
    training = torch.is_grad_enabled()
    wanted = [training and x.requires_grad for x in (a.query, a.table)]
    return ops.sampled_loss_ahead(*a[:10], wanted, *a[10:])[0]


def ahead(*arguments: Any) -> tuple[Tensor, ...]:
    """Total, losses, gradient of query, slopes (T · K, group) of logits and of positives; empty where not wanted."""
    a, wanted = _split(arguments)
    results = _ahead_fake(*arguments)
    _, losses, query_grad, slopes, own_slopes = results
    weights = losses.new_ones(losses.shape) if a.weights is None else a.weights.to(a.real)
    size = a.group * a.ids.shape[1]
    with as_given(a.query):
        for part in parts(-(-a.ids.shape[0] // a.group), size * a.query.shape[1]):
            rows = slice(part.start * a.group, min(part.stop * a.group, a.ids.shape[0]))
            groups = Groups(a, part, rows)
            losses[rows], own_slope, slope = groups.losses(weights[rows])
            if wanted[0]:
                query_grad[rows] = groups.query_gradient(own_slope, slope)
            if wanted[1]:
                own_slopes[rows] = own_slope
                each = slope.transpose(1, 2).reshape(-1, a.group)
                entries = slice(rows.start * a.ids.shape[1], rows.stop * a.ids.shape[1])
                slopes[entries] = each[: entries.stop - entries.start]
        return (losses * weights).sum(), *results[1:]


class Groups:
    """Some groups of positions, the last one filled up with positions that have no negatives."""

    def __init__(self, a: Inputs, part: slice, rows: slice) -> None:
        self.a, self.count = a, rows.stop - rows.start
        shape, each = (part.stop - part.start, a.group), a.ids.shape[1]
        query = self._filled(a.query[rows].to(a.real), shape)
        own = Source(a.table)
        self.query = query
        self.positive = self._filled(look_up(own, a.positive_ids[rows], a.eps, a.real), shape)
        there = torch.ones(self.count, each, dtype=torch.bool, device=a.ids.device)
        self.there = self._filled(there, shape).flatten(1)
        places = self._filled(a.source.at(a.ids)[rows], shape).flatten(1)
        # Rows that nobody asked for may hold anything.
        empty = a.query.new_zeros((*places.shape, a.query.shape[1]), dtype=a.real)
        found = look_up(a.source, places, a.eps, a.real) if a.source.rows.shape[0] else empty
        self.negative = found.masked_fill(~self.there[..., None], 0.0)
        ids, own_ids = self._filled(a.ids[rows], shape).flatten(1), self._filled(a.positive_ids[rows], shape)
        self.hits = ids[:, None, :] == own_ids[:, :, None]
        if math.isnan(a.hit_value):
            self.hits = torch.zeros_like(self.hits)

    def _filled(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        missing = shape[0] * shape[1] - self.count
        return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]).view(*shape, *x.shape[1:])

    def losses(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Losses of positions, slopes of positives and of the negatives' products."""
        a = self.a
        positive = torch.einsum("gmd,gmd->gm", self.query, self.positive) * a.scale
        logits = torch.einsum("gmd,gjd->gmj", self.query, self.negative) * a.scale
        logits = logits.masked_fill(self.hits, a.hit_value).masked_fill(~self.there[:, None], -torch.inf)
        if a.kind == "softmax":
            every = torch.cat([positive[..., None], logits], -1)
            log_sum = every.logsumexp(-1)
            losses, own, slopes = (
                log_sum - positive,
                torch.expm1(positive - log_sum),
                (logits - log_sum[..., None]).exp(),
            )
        else:
            losses = F.softplus(-positive) + F.softplus(logits).sum(-1)
            own, slopes = -torch.sigmoid(-positive), torch.sigmoid(logits)
        factor = self._filled(weights, positive.shape) * a.scale
        slopes = (slopes * factor[..., None]).masked_fill(self.hits | ~self.there[:, None], 0.0)
        return losses.flatten()[: self.count], (own * factor).flatten()[: self.count], slopes

    def query_gradient(self, own_slopes: Tensor, slopes: Tensor) -> Tensor:
        found = torch.einsum("gmj,gjd->gmd", slopes, self.negative)
        own = self._filled(own_slopes, found.shape[:2])[..., None] * self.positive
        return (found + own).flatten(0, 1)[: self.count]


# --- schema, fake, derivative ------------------------------------------------------------------------


def _split(arguments: tuple[Any, ...]) -> tuple[Inputs, list[bool]]:
    """The arguments of the op behind `wanted`, which stands before those that have a default."""
    return Inputs(*arguments[:10], *arguments[11:]), arguments[10]


def _ahead_fake(*arguments: Any) -> tuple[Tensor, ...]:
    a, wanted = _split(arguments)
    positions, each = a.ids.shape
    sizes = [(), (positions,), a.query.shape if wanted[0] else (0,)]
    sizes += [(positions * each, a.group), (positions,)] if wanted[1] else [(0, a.group), (0,)]
    return tuple(a.query.new_empty(size, dtype=a.real) for size in sizes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    a, ctx.wanted = _split(inputs)
    ctx.attributes = a.group, a.eps
    ctx.weights_dtype = None if a.weights is None else a.weights.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(a.query, a.table, a.ids, a.positive_ids, *output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
    query, table, ids, positive_ids, losses, query_grad, slopes, own_slopes = ctx.saved_tensors
    needed = ctx.needs_input_grad
    for need, have in zip(needed[:2], ctx.wanted, strict=True):
        require(have or not need, "sampled_loss_ahead: a gradient is asked for that `wanted` does not name")
    found: list[Tensor | None] = [None] * 13
    if needed[0]:
        found[0] = (query_grad * grad).to(query.dtype)
    if needed[1]:
        # The factor goes to the smallest of the operands.
        scaled = query.to(losses.dtype) * grad
        found[1] = ops.lookup_table_gradient(slopes, own_slopes, scaled, table, ids, positive_ids, *ctx.attributes)
    if needed[4]:
        found[4] = (losses * grad).to(ctx.weights_dtype)
    return *found[:10], None, *found[10:]


# --- kernel ------------------------------------------------------------------------------------------


def _kernel(library: ctypes.CDLL, *arguments: Any) -> tuple[Tensor, ...]:
    a, wanted = _split(arguments)
    results = _ahead_fake(*arguments)
    own = a.table.index_select(0, a.positive_ids).to(a.real)
    cpu.sampled_loss(library, a, own, results, wanted)
    return results


def _storage(*arguments: Any) -> torch.dtype:
    return _split(arguments)[0].source.rows.dtype


# --- FLOPs -------------------------------------------------------------------------------------------


def _flops(*arguments: Any, out_val: Any = None) -> Any:
    """Products of queries with the negatives of their group and with their positive; the last group counts as full."""
    a = Inputs(*arguments)
    return 2 * a.query.shape[0] * (a.group * a.ids.shape[1] + 1) * a.query.shape[1]


def _ahead_flops(*arguments: Any, out_val: Any = None) -> Any:
    a, wanted = _split(arguments)
    return (1 + wanted[0]) * _flops(*a)


_TENSORS = "Tensor query, Tensor table, Tensor positive_ids, Tensor ids, Tensor? weights"
_ATTRIBUTES = "float scale, float eps, float hit_value, int group, str kind"
_HALF = "Tensor? half=None, Tensor? places=None, Tensor? scales=None"

_CONTRACT = COPIED.extended(
    positive_ids=Array("T", INT64, Range("V")),
    weights=Array("T", REAL),
    group=Whole(1, GROUP),
    kind=Word(KINDS),
)

declare(
    f"sampled_loss_ahead({_TENSORS}, {_ATTRIBUTES}, bool[] wanted, {_HALF}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _CONTRACT.extended(wanted=Flags(("query", "table"))),
    reference=ahead,
    cpu=_kernel,
    storage=_storage,
    fake=_ahead_fake,
    backward=_backward,
    save=_save,
    flops=_ahead_flops,
)
compose(f"sampled_loss_total({_TENSORS}, {_ATTRIBUTES}, {_HALF}) -> Tensor", _CONTRACT, total, _flops)
