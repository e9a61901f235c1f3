"""Sampled softmax: the loss of each row's positive against the negatives of the row's group.

    logit[t, j] = scale · negative_scales[g] · <query[t], negative[j]>              for the negatives j of t's group g
    positive[t] = scale · <query[t], positive[t]>
    log_sum[t]  = log(exp(positive[t]) + sum over j of exp(logit[t, j]))
    loss[t]     = log_sum[t] - positive[t]

Group g holds the rows `query_offsets[g]:query_offsets[g + 1]` and the negatives `negative_offsets[g]:...`, so that one
op serves all ways of sharing negatives: one group has negatives that all rows share, a group for each row has its own,
and what lies between is logit sharing. A negative whose id is that of the positive (an accidental hit) is left out of
that row's sum. `negative_scales` has one number per group, by which rows of that group were divided before they were
rounded to 16 bits: with a power of two, none can overflow, and nothing else changes.

Loss and log_sum are in the precision of sums: float32 where the inputs are of 16 bits. Rows in no group have loss 0,
log_sum 0 and gradient 0, negatives in no group have gradient 0. The reference goes group by group; its largest tensor
holds one group's logits. The backward computes them anew, so only inputs and log_sum are saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import INT64, REAL, Array, As, Ascending, Contract, Flags, together
from .declare import accumulator, as_given, declare, has_data, runs

ops = torch.ops.turbogr

_ARGUMENTS = (
    "Tensor query, Tensor positive, Tensor negative, Tensor query_offsets, Tensor negative_offsets, "
    "Tensor? positive_ids, Tensor? negative_ids, Tensor? negative_scales, float scale"
)


class Inputs(NamedTuple):
    """Arguments of the op, in the order of its schema."""

    query: Tensor  # (T, D)
    positive: Tensor  # (T, D)
    negative: Tensor  # (N, D)
    query_offsets: Tensor  # int64 (G + 1,)
    negative_offsets: Tensor  # int64 (G + 1,)
    positive_ids: Tensor | None  # int64 (T,)
    negative_ids: Tensor | None  # int64 (N,)
    negative_scales: Tensor | None  # float32 (G,)
    scale: float


# --- one group ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The part of the inputs that belongs to group `index`, with halves widened."""

    a: Inputs
    index: int
    rows: slice
    negatives: slice

    def wide(self, x: Tensor, part: slice) -> Tensor:
        return x[part].to(accumulator(x.dtype))

    @property
    def query(self) -> Tensor:
        return self.wide(self.a.query, self.rows)

    @property
    def positive(self) -> Tensor:
        return self.wide(self.a.positive, self.rows)

    @property
    def negative(self) -> Tensor:
        """Rows as they were before they were divided."""
        rows, scales = self.wide(self.a.negative, self.negatives), self.a.negative_scales
        return rows if scales is None else rows * scales[self.index]

    def positive_logits(self) -> Tensor:
        return (self.query * self.positive).sum(1).mul_(self.a.scale)

    def logits(self) -> Tensor:
        """(rows, negatives) of the group; accidental hits are at minus infinity."""
        a = self.a
        logits = (self.query @ self.negative.t()).mul_(a.scale)
        if a.positive_ids is not None and a.negative_ids is not None:
            hits = a.positive_ids[self.rows, None] == a.negative_ids[None, self.negatives]
            logits.masked_fill_(hits, -torch.inf)
        return logits


def _groups(a: Inputs) -> Iterator[Group]:
    """Groups that have rows; the others contribute nothing."""
    rows, negatives = runs(a.query_offsets), runs(a.negative_offsets)
    for index, (own, others) in enumerate(zip(rows, negatives, strict=True)):
        if own[0] < own[1]:
            yield Group(a, index, slice(*own), slice(*others))


# --- the op ------------------------------------------------------------------------------------------


def sampled_softmax(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Loss and log_sum of each row."""
    a = Inputs(*arguments)
    loss, log_sum = (a.query.new_zeros(a.query.shape[0], dtype=accumulator(a.query.dtype)) for _ in range(2))
    with as_given(a.query):
        for group in _groups(a):
            own = group.positive_logits()
            log_sum[group.rows] = torch.logaddexp(own, group.logits().logsumexp(1))
            loss[group.rows] = log_sum[group.rows] - own
    return loss, log_sum


def sampled_softmax_backward(grad: Tensor, log_sum: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Gradients of query, positive and negative, from that of each row's loss; empty where not wanted."""
    a, wanted = Inputs(*arguments[:-1]), arguments[-1]
    # Results of an op share no memory, not even none.
    found = [x.new_zeros(x.shape if want else 0) for x, want in zip(a[:3], wanted, strict=True)]
    query, positive, negative = (x if want else None for x, want in zip(found, wanted, strict=True))
    with as_given(a.query):
        for group in _groups(a):
            top = group.wide(log_sum, group.rows)
            slope = group.wide(grad, group.rows) * a.scale  # of a logit that has all of the sum
            own = torch.expm1(group.positive_logits() - top).mul_(slope)[:, None]
            shares = (group.logits() - top[:, None]).exp_().mul_(slope[:, None])
            if query is not None:
                query[group.rows] = torch.addmm(own * group.positive, shares, group.negative)
            if positive is not None:
                positive[group.rows] = own * group.query
            if negative is not None:
                scaled = 1.0 if a.negative_scales is None else a.negative_scales[group.index]
                negative[group.negatives] = (shares.t() @ group.query) * scaled
    return tuple(found)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    a = Inputs(*arguments)
    loss, log_sum = (a.query.new_empty(a.query.shape[0], dtype=accumulator(a.query.dtype)) for _ in range(2))
    return loss, log_sum


def _backward_fake(grad: Tensor, log_sum: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    a, wanted = Inputs(*arguments[:-1]), arguments[-1]
    return tuple(x.new_empty(x.shape if want else 0) for x, want in zip(a[:3], wanted, strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.scale = inputs[-1]
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1], *inputs[:-1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    wanted = list(ctx.needs_input_grad[:3])
    found = ops.sampled_softmax_backward(grad, *ctx.saved_tensors, ctx.scale, wanted)
    return (*(g if want else None for g, want in zip(found, wanted, strict=True)), *[None] * 6)


# --- FLOPs -------------------------------------------------------------------------------------------


def _flops(*arguments: Any, out_val: Any = None) -> Any:
    """Products of rows with the negatives of their group, and with their positive."""
    a = Inputs(*arguments)
    return 2 * (_pairs(a) + a.query.shape[0]) * a.query.shape[1]


def _backward_flops(grad: Tensor, log_sum: Tensor, *arguments: Any, out_val: Any = None) -> Any:
    """One product for each gradient; logits that are computed anew do not count."""
    a, (query, positive, negative) = Inputs(*arguments[:-1]), arguments[-1]
    rows, pairs = a.query.shape[0], _pairs(a)
    return 2 * (query * (pairs + rows) + positive * rows + negative * pairs) * a.query.shape[1]


def _pairs(a: Inputs) -> Any:
    """Pairs of a row and a negative in one group; all there could be where offsets have no values yet."""
    if not (has_data(a.query_offsets) and has_data(a.negative_offsets)):
        return a.query.shape[0] * a.negative.shape[0]
    return int((a.query_offsets.diff() * a.negative_offsets.diff()).sum())


_CONTRACT = Contract(
    together("positive_ids", "negative_ids"),
    query=Array("T D", REAL),
    positive=Array("T D", As("query")),
    negative=Array("N D", As("query")),
    query_offsets=Array("G+1", INT64, Ascending("T")),
    negative_offsets=Array("G+1", INT64, Ascending("N")),
    positive_ids=Array("T", INT64),
    negative_ids=Array("N", INT64),
    negative_scales=Array("G", (torch.float32,)),
)

declare(
    f"sampled_softmax({_ARGUMENTS}) -> (Tensor loss, Tensor log_sum)",
    _CONTRACT,
    reference=sampled_softmax,
    fake=_fake,
    backward=_backward,
    save=_save,
    flops=_flops,
)
declare(
    f"sampled_softmax_backward(Tensor grad, Tensor log_sum, {_ARGUMENTS}, bool[] wanted) -> (Tensor, Tensor, Tensor)",
    _CONTRACT.extended(
        grad=Array("T", As("query", sums=True)),
        log_sum=Array("T", As("query", sums=True)),
        wanted=Flags(("query", "positive", "negative")),
    ),
    reference=sampled_softmax_backward,
    fake=_backward_fake,
    flops=_backward_flops,
)
