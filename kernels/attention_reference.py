"""Reference of `jagged_attention` and of its backward, in torch ops: for every device, and what kernels are tested by.

It goes sequence by sequence; its largest tensor is one sequence's (H, Lq, Lk).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import dropout as dropping
from .attention_inputs import DIFFERENTIABLE, Inputs, log_sum_shape
from .declare import accumulator, as_given, runs

# --- one sequence ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneSequence:
    """The part of the inputs that belongs to sequence `index`, with heads first and halves widened."""

    a: Inputs
    index: int
    queries: slice
    keys: slice
    seed: int | None

    @property
    def dtype(self) -> torch.dtype:
        return accumulator(self.a.query.dtype)

    @property
    def count(self) -> int:
        """Lq."""
        return self.queries.stop - self.queries.start

    def grouped(self, x: Tensor) -> Tensor:
        """(Lq, H, D) -> (G, H/G · Lq, D): heads of a group share one product with its keys."""
        groups, members = self.a.key.shape[1], x.shape[1] // self.a.key.shape[1]
        return x[self.queries].to(self.dtype).transpose(0, 1).reshape(groups, members * self.count, x.shape[2])

    def shared(self, x: Tensor) -> Tensor:
        """(Lk, G, D) -> (G, Lk, D)."""
        return x[self.keys].to(self.dtype).transpose(0, 1)

    def by_head(self, x: Tensor) -> Tensor:
        """(G, H/G · Lq, …) -> (H, Lq, …)."""
        return x.reshape(self.a.query.shape[1], self.count, x.shape[2])

    def by_group(self, x: Tensor) -> Tensor:
        """(H, Lq, Lk) -> (G, H/G · Lq, Lk)."""
        return x.reshape(self.a.key.shape[1], -1, x.shape[2])

    @property
    def query_columns(self) -> Tensor:
        return self.a.query_columns[self.queries]

    @property
    def key_columns(self) -> Tensor:
        return self.a.key_columns[self.keys]

    def distances(self) -> Tensor:
        return self.query_columns[:, None] - self.key_columns[None, :]

    def own(self, table: Tensor) -> Tensor:
        """This sequence's part of a mask or bias, (H or 1, Nq or 1, Nk or 1)."""
        return table[self.index if table.shape[0] > 1 else 0]

    def places(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Where rows of queries and of keys stand in it: (Lq or 1, 1) and (1, Lk or 1)."""
        first = self.query_columns.new_zeros(1)
        queries = self.query_columns if own.shape[1] > 1 else first
        keys = self.key_columns if own.shape[2] > 1 else first
        return queries[:, None], keys[None, :]

    def pairs(self, table: Tensor) -> Tensor:
        """Entries of a mask or bias, (H or 1, Lq or 1, Lk or 1)."""
        own = self.own(table)
        queries, keys = self.places(own)
        return own[:, queries, keys]

    def positions(self, table: Tensor) -> Tensor:
        """Entry of the position bias for each pair, (Lq, Lk)."""
        return self.distances().add_(table.shape[1] // 2)

    def buckets(self) -> Tensor:
        """Entry of the time bias for each pair, (Lq, Lk)."""
        a = self.a
        assert a.time_bounds is not None and a.query_times is not None and a.key_times is not None
        gaps = (a.query_times[self.queries, None] - a.key_times[None, self.keys]).abs_()
        return torch.bucketize(gaps, a.time_bounds, right=True)

    def hidden(self) -> Tensor | None:
        """bool (H or 1, Lq or 1, Lk): pairs that do not see each other; None where all do."""
        a = self.a
        distances = self.distances()
        low, high = (int(x) for x in distances.aminmax())
        hidden: Tensor | None = None
        if low < a.min_distance or high > a.max_distance:
            hidden = ((distances < a.min_distance) | (distances > a.max_distance))[None]
        if a.key_valid is not None:
            invalid = ~a.key_valid[self.keys][None, None, :]
            hidden = invalid if hidden is None else hidden | invalid
        if a.pair_mask is not None:
            masked = ~self.pairs(a.pair_mask)
            hidden = masked if hidden is None else hidden | masked
        return hidden

    def products(self) -> Tensor:
        """scale · <query, key>, (H, Lq, Lk)."""
        return self.by_head(self.grouped(self.a.query) @ self.shared(self.a.key).transpose(1, 2)).mul_(self.a.scale)

    def saturation(self) -> Tensor:
        """tanh(product / score_cap): how far a score is towards its cap, from -1 to 1."""
        return self.products().div_(self.a.score_cap).tanh_()

    def scores(self) -> Tensor:
        """(H, Lq, Lk), hidden pairs included."""
        a = self.a
        scores = self.saturation().mul_(a.score_cap) if a.score_cap else self.products()
        if a.bias is not None:
            scores += self.pairs(a.bias)
        if a.position_bias is not None:
            scores += a.position_bias[:, self.positions(a.position_bias)]
        if a.time_bias is not None:
            scores += a.time_bias[:, self.buckets()]
        return scores

    def sink(self) -> Tensor | None:
        """(H, 1, 1)."""
        return None if self.a.sink is None else self.a.sink.to(self.dtype)[:, None, None]

    def kept(self) -> Tensor | None:
        """bool (H, Lq, Lk): pairs that dropout leaves; None where it leaves all."""
        if self.seed is None:
            return None
        heads = self.a.query.shape[1]
        return dropping.kept(self.seed, self.index, heads, self.query_columns, self.key_columns, self.a.dropout)

    def scaled(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """What follows the activation, in place; linear, so that it serves weights and their gradients alike."""
        if kept is None:
            return x.mul_(self.a.post_scale)
        return x.mul_(self.a.post_scale * dropping.gain(self.a.dropout)).mul_(kept)


def _sequences(a: Inputs) -> Iterator[OneSequence]:
    """Sequences that have queries and keys; the others contribute nothing."""
    queries, keys = runs(a.query_offsets), runs(a.key_offsets)
    seed = int(a.dropout_seed.item()) if a.dropout_seed is not None and a.dropout > 0.0 else None
    for index, (rows, columns) in enumerate(zip(queries, keys, strict=True)):
        if rows[0] < rows[1] and columns[0] < columns[1]:
            yield OneSequence(a, index, slice(*rows), slice(*columns), seed)


# --- activations -------------------------------------------------------------------------------------


def _softmax(part: OneSequence) -> tuple[Tensor, Tensor]:
    """Weights over visible keys, and log_sum (H, Lq); a query that sees none has no weights."""
    scores, hidden, sink = part.scores(), part.hidden(), part.sink()
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    blind = top == -torch.inf
    top.masked_fill_(blind, 0.0)
    if sink is not None:
        top = torch.maximum(top, sink)
    total = scores.sub_(top).exp_().sum(-1, keepdim=True)
    if sink is not None:
        total += (sink - top).exp_()
    log_sum = (top + total.log()).masked_fill_(blind, torch.inf).squeeze(-1)
    return scores.div_(total.masked_fill_(blind, 1.0)), log_sum


def _silu(scores: Tensor) -> Tensor:
    return scores.mul_(scores.sigmoid())


def _silu_slope(scores: Tensor) -> Tensor:
    """sigmoid(score) · (1 + score · (1 - sigmoid(score)))."""
    gate = scores.sigmoid()
    return gate.mul_((1.0 - gate).mul_(scores).add_(1.0))


def _sigmoid_slope(scores: Tensor) -> Tensor:
    gate = scores.sigmoid()
    return gate.mul_(1.0 - gate)


@dataclass(frozen=True)
class Pointwise:
    """An activation that looks at one score at a time: the weight, in place, and its derivative, a new tensor."""

    weight: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]

    def weights(self, scores: Tensor, hidden: Tensor | None) -> Tensor:
        weights = self.weight(scores)
        return weights if hidden is None else weights.masked_fill_(hidden, 0.0)


POINTWISE = {
    "silu": Pointwise(_silu, _silu_slope),
    "sigmoid": Pointwise(Tensor.sigmoid_, _sigmoid_slope),
    "squared_relu": Pointwise(lambda x: x.relu_().square_(), lambda x: x.relu().mul_(2.0)),
    "linear": Pointwise(lambda x: x, torch.ones_like),
}


# --- forward -----------------------------------------------------------------------------------------


def attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Reference of `jagged_attention`."""
    a = Inputs(*arguments)
    result = a.query.new_zeros((*a.query.shape[:2], a.value.shape[2]))
    log_sum = a.query.new_full(log_sum_shape(a), torch.inf, dtype=accumulator(a.query.dtype))
    with as_given(a.query):
        for part in _sequences(a):
            if a.activation == "softmax":
                weights, sums = _softmax(part)
                log_sum[part.queries] = sums.transpose(0, 1)
            else:
                weights = POINTWISE[a.activation].weights(part.scores(), part.hidden())
            weights = part.scaled(weights, part.kept())
            result[part.queries] = part.by_head(part.by_group(weights) @ part.shared(a.value)).transpose(0, 1)
    return result, log_sum


# --- backward ----------------------------------------------------------------------------------------


class Gradients:
    """Gradients under construction; None where nobody wants one.

    A row belongs to one sequence and is written once, in its own dtype; biases and the sink add up, so halves are
    widened.
    """

    def __init__(self, a: Inputs, wanted: list[bool]) -> None:
        self.a, self.wanted = a, wanted
        self.query, self.key, self.value = (self.zeros(i) for i in range(3))
        self.bias, self.position_bias, self.time_bias, self.sink = (self.zeros(i, wide=True) for i in range(3, 7))

    def zeros(self, index: int, wide: bool = False) -> Tensor | None:
        x = getattr(self.a, DIFFERENTIABLE[index])
        if x is None or not self.wanted[index]:
            return None
        return x.new_zeros(x.shape, dtype=accumulator(x.dtype) if wide else x.dtype)

    def results(self) -> tuple[Tensor, ...]:
        """One tensor for each; without elements where there is no gradient."""
        found = [(getattr(self.a, name), getattr(self, name)) for name in DIFFERENTIABLE]
        return tuple(self.a.query.new_empty(0) if grad is None else grad.to(x.dtype) for x, grad in found)


def attention_backward(grad: Tensor, result: Tensor, log_sum: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """Reference of `jagged_attention_backward`; result and log_sum are computed anew, as scores are."""
    a, wanted = Inputs(*arguments[:-1]), arguments[-1]
    into = Gradients(a, wanted)
    with as_given(a.query):
        for part in _sequences(a):
            _add_sequence(part, grad, into)
    return into.results()


def _add_sequence(part: OneSequence, grad: Tensor, into: Gradients) -> None:
    a = part.a
    slopes = _softmax_slopes if a.activation == "softmax" else _pointwise_slopes
    result_grad = part.grouped(grad)
    weights_grad = part.by_head(result_grad @ part.shared(a.value).transpose(1, 2))
    weights, scores_grad = slopes(part, weights_grad, into)
    if into.value is not None:
        into.value[part.keys] = (part.by_group(weights).transpose(1, 2) @ result_grad).transpose(0, 1)
    del weights  # as large as the scores, and the biases need room
    _add_biases(part, scores_grad, into)
    if a.score_cap:
        scores_grad.mul_(part.saturation().square_().neg_().add_(1.0))
    _add_products(part, scores_grad, into)


def _softmax_slopes(part: OneSequence, grad: Tensor, into: Gradients) -> tuple[Tensor, Tensor]:
    """Weights, and the gradient of scores from that of weights, which is overwritten."""
    kept = part.kept()
    shares, log_sum = _softmax(part)
    grad = part.scaled(grad, kept)
    mean = (grad * shares).sum(-1, keepdim=True)
    if into.sink is not None and (sink := part.sink()) is not None:  # its value is zero, and so its weight's gradient
        into.sink -= ((sink - log_sum[..., None]).exp_() * mean).sum((1, 2))
    grad.sub_(mean).mul_(shares)
    return part.scaled(shares, kept), grad


def _pointwise_slopes(part: OneSequence, grad: Tensor, into: Gradients) -> tuple[Tensor, Tensor]:
    """Weights, and the gradient of scores from that of weights, which is overwritten."""
    activation = POINTWISE[part.a.activation]
    kept, hidden, scores = part.kept(), part.hidden(), part.scores()
    grad = part.scaled(grad, kept).mul_(activation.slope(scores))
    if hidden is not None:
        grad.masked_fill_(hidden, 0.0)
    return part.scaled(activation.weights(scores, hidden), kept), grad


def _add_products(part: OneSequence, scores_grad: Tensor, into: Gradients) -> None:
    """Gradients of queries and keys; each row belongs to one sequence, so there is nothing to add to."""
    a, slopes = part.a, part.by_group(scores_grad)
    if into.query is not None:
        into.query[part.queries] = part.by_head(slopes @ part.shared(a.key)).mul_(a.scale).transpose(0, 1)
    if into.key is not None:
        into.key[part.keys] = (slopes.transpose(1, 2) @ part.grouped(a.query)).mul_(a.scale).transpose(0, 1)


def _add_biases(part: OneSequence, scores_grad: Tensor, into: Gradients) -> None:
    if into.bias is not None:
        own = part.own(into.bias)
        queries, keys = part.places(own)
        summed = [dim for dim, size in enumerate(own.shape) if size == 1]
        slopes = scores_grad.sum(summed, keepdim=True) if summed else scores_grad
        _add_at(own.flatten(1), queries * own.shape[2] + keys, slopes)
    if into.position_bias is not None:
        _add_at(into.position_bias, part.positions(into.position_bias), scores_grad)
    if into.time_bias is not None:
        _add_at(into.time_bias, part.buckets(), scores_grad)


def _add_at(table: Tensor, entries: Tensor, slopes: Tensor) -> None:
    """table[h, entries[i, j]] += slopes[h, i, j], summed over heads where the table has one."""
    slopes = slopes.sum(0, keepdim=True) if table.shape[0] == 1 and slopes.shape[0] > 1 else slopes
    index = entries.reshape(1, -1).expand(table.shape[0], -1)
    table.scatter_add_(1, index, slopes.reshape(table.shape[0], -1).to(table.dtype))
