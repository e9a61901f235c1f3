"""Attention over packed sequences, in which each query sees only keys of its own sequence.

    score[h, i, j]  = scale · <query[i, h], key[j, g]> + bias terms                 (g: the group of head h)
    weight[h, i, j] = dropout(post_scale · activation(score[h, i, j]))              over visible keys, else 0
    result[i, h]    = sum over j of weight[h, i, j] · value[j, g]
    log_sum[i, h]   = log of the sum over visible j of exp(score[h, i, j]); infinite where there is none

`log_sum` is for the backward of softmax, in the precision of sums; for silu it has no elements.

Rows `offsets[s]:offsets[s + 1]` belong to sequence s; queries and keys have row sets of their own: a last layer asks
for fewer rows than it reads. `columns` say where a row stood in the padded batch: distances, masks and biases are all
in terms of those. Rows behind the last offset belong to no sequence; their results and gradients are zero.

A pair is visible where all of these hold:
    min_distance <= query column - key column <= max_distance
    key_valid[j]
    pair_mask[s, h, query column, key column]           a size of 1 stands for every index, here and in `bias`
Terms added to the score:
    bias[s, h, query column, key column]
    position_bias[h, query column - key column + M - 1]          of 2M - 1 entries
    time_bias[h, number of time_bounds <= |query time - key time|]

The reference goes sequence by sequence; its largest tensor is one sequence's (H, Lq, Lk). The CPU kernel
(cpu/attention.h) keeps scores in blocks that fit the caches. The backward computes scores anew and draws the same
dropout (see dropout.py), so only inputs, result and log_sum are saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import dropout as dropping
from .cpu import attention as cpu
from .declare import accumulator, as_given, declare, has_data, require, require_size, require_tensor, runs

ops = torch.ops.turbogr

ACTIVATIONS = ("softmax", "silu")
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor query_offsets, Tensor key_offsets, "
    "Tensor query_columns, Tensor key_columns, Tensor? key_valid, Tensor? pair_mask, Tensor? bias, "
    "Tensor? position_bias, Tensor? time_bias, Tensor? time_bounds, Tensor? query_times, Tensor? key_times, "
    "Tensor? dropout_seed, str activation, float scale, float post_scale, int min_distance, int max_distance, "
    "float dropout"
)


class Inputs(NamedTuple):
    """Arguments of the op, in the order of its schema."""

    query: Tensor  # (Tq, H, D)
    key: Tensor  # (Tk, G, D)
    value: Tensor  # (Tk, G, Dv)
    query_offsets: Tensor  # (S + 1,)
    key_offsets: Tensor  # (S + 1,)
    query_columns: Tensor  # (Tq,)
    key_columns: Tensor  # (Tk,)
    key_valid: Tensor | None  # bool (Tk,)
    pair_mask: Tensor | None  # bool (S or 1, H or 1, Nq or 1, Nk or 1)
    bias: Tensor | None  # (S or 1, H or 1, Nq or 1, Nk or 1)
    position_bias: Tensor | None  # (H or 1, 2M - 1)
    time_bias: Tensor | None  # (H or 1, K + 1)
    time_bounds: Tensor | None  # int64 (K,), ascending; or int32, as then are times
    query_times: Tensor | None  # int64 (Tq,)
    key_times: Tensor | None  # int64 (Tk,)
    dropout_seed: Tensor | None  # int64, one number
    activation: str
    scale: float
    post_scale: float
    min_distance: int
    max_distance: int
    dropout: float


TENSORS = 16  # that many of the arguments are tensors; the others are attributes
DIFFERENTIABLE = ("query", "key", "value", "bias", "position_bias", "time_bias")


# --- checks ------------------------------------------------------------------------------------------


def _check(a: Inputs) -> None:
    """What can be said about shapes and dtypes without a look at the data."""
    for name in ("query", "key", "value"):
        x = getattr(a, name)
        require_tensor(x, _name(name), 3)
        require(x.dtype == a.query.dtype, f"{_name(name)} is {x.dtype}, while query is {a.query.dtype}")
    require_size(a.key.shape[2], a.query.shape[2], _name("key.shape[2]"))
    require_size(a.value.shape[0], a.key.shape[0], _name("value.shape[0]"))
    require_size(a.value.shape[1], a.key.shape[1], _name("value.shape[1]"))
    heads, groups = a.query.shape[1], a.key.shape[1]
    if isinstance(heads, int) and isinstance(groups, int):
        fits = heads > 0 and groups > 0 and heads % groups == 0
        require(fits, _name(f"{heads} heads of query do not divide among {groups} heads of key"))
    require(a.activation in ACTIVATIONS, _name(f"activation is one of {ACTIVATIONS}, not {a.activation!r}"))
    require(0.0 <= a.dropout <= 1.0, _name(f"dropout is a probability, not {a.dropout}"))
    _check_rows(a)
    _check_pairs(a)
    _check_tables(a)


def _check_rows(a: Inputs) -> None:
    """Vectors with one entry per row, and offsets."""
    require_tensor(a.query_offsets, _name("query_offsets"), 1, torch.int64)
    require_tensor(a.key_offsets, _name("key_offsets"), 1, torch.int64)
    require_size(a.key_offsets.shape[0], a.query_offsets.shape[0], _name("length of key_offsets"))
    for name, rows, dtype in (
        ("query_columns", a.query, torch.int64),
        ("key_columns", a.key, torch.int64),
        ("query_times", a.query, _time_dtype(a)),
        ("key_times", a.key, _time_dtype(a)),
        ("key_valid", a.key, torch.bool),
    ):
        x = getattr(a, name)
        if x is not None:
            require_tensor(x, _name(name), 1, dtype)
            require_size(x.shape[0], rows.shape[0], _name(f"length of {name}"))


def _time_dtype(a: Inputs) -> torch.dtype:
    """Of times and of their bounds: 64 bits, or 32 for all of them."""
    return torch.int32 if a.time_bounds is not None and a.time_bounds.dtype == torch.int32 else torch.int64


def _check_pairs(a: Inputs) -> None:
    """Tensors with one entry per sequence, head, query column and key column."""
    for name, dtype in (("pair_mask", torch.bool), ("bias", None)):
        x = getattr(a, name)
        if x is not None:
            require_tensor(x, _name(name), 4, dtype)
            _check_broadcast(x.shape[0], a.query_offsets.shape[0] - 1, f"{name}.shape[0]")
            _check_broadcast(x.shape[1], a.query.shape[1], f"{name}.shape[1]")


def _check_tables(a: Inputs) -> None:
    """Biases by distance and by time, and the seed."""
    for name in ("position_bias", "time_bias"):
        table = getattr(a, name)
        if table is not None:
            require_tensor(table, _name(name), 2)
            _check_broadcast(table.shape[0], a.query.shape[1], f"{name}.shape[0]")
    if a.position_bias is not None and isinstance(a.position_bias.shape[1], int):
        entries = a.position_bias.shape[1]
        require(entries % 2 == 1, _name(f"position_bias has 2M - 1 entries for some M, not {entries}"))
    absent = [x is None for x in (a.time_bias, a.time_bounds, a.query_times, a.key_times)]
    require(all(absent) or not any(absent), _name("time_bias, time_bounds, query_times and key_times come together"))
    if a.time_bias is not None and a.time_bounds is not None:
        require_tensor(a.time_bounds, _name("time_bounds"), 1, _time_dtype(a))
        require_size(a.time_bias.shape[1], a.time_bounds.shape[0] + 1, _name("time_bias.shape[1]"))
    if a.dropout_seed is not None:
        require_tensor(a.dropout_seed, _name("dropout_seed"), a.dropout_seed.dim(), torch.int64)
        require_size(a.dropout_seed.numel(), 1, _name("number of seeds"))


def _check_broadcast(found: Any, wanted: Any, what: str) -> None:
    """A size is 1 or the wanted one."""
    if not (isinstance(found, int) and found == 1):
        require_size(found, wanted, _name(what))


def _name(what: str) -> str:
    return f"jagged_attention: {what}"


def _check_columns(a: Inputs) -> None:
    """No column may point outside of a mask or a bias: real tensors only."""
    for name, table in (("pair_mask", a.pair_mask), ("bias", a.bias)):
        if table is not None:
            _check_range(a.query_columns, table.shape[2], "query", name)
            _check_range(a.key_columns, table.shape[3], "key", name)


def _check_range(columns: Tensor, size: int, what: str, table: str) -> None:
    if size == 1 or columns.numel() == 0:
        return
    low, high = (int(x) for x in columns.aminmax())
    if low < 0 or high >= size:
        raise IndexError(f"jagged_attention: {what} columns {low} to {high} exceed {table}, which has {size}")


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
        last = table.shape[1] // 2
        distances = self.distances()
        low, high = (int(x) for x in distances.aminmax())
        if low < -last or high > last:
            raise IndexError(
                f"jagged_attention: distances {low} to {high} exceed position_bias, which has -{last} to {last}"
            )
        return distances.add_(last)

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

    def scores(self) -> Tensor:
        """(H, Lq, Lk), hidden pairs included."""
        a = self.a
        scores = self.by_head(self.grouped(a.query) @ self.shared(a.key).transpose(1, 2)).mul_(a.scale)
        if a.bias is not None:
            scores += self.pairs(a.bias)
        if a.position_bias is not None:
            scores += a.position_bias[:, self.positions(a.position_bias)]
        if a.time_bias is not None:
            scores += a.time_bias[:, self.buckets()]
        return scores

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
    _check_columns(a)
    queries = runs(a.query_offsets, a.query.shape[0], "jagged_attention: query_offsets")
    keys = runs(a.key_offsets, a.key.shape[0], "jagged_attention: key_offsets")
    seed = int(a.dropout_seed.item()) if a.dropout_seed is not None and a.dropout > 0.0 else None
    for index, (rows, columns) in enumerate(zip(queries, keys, strict=True)):
        if rows[0] < rows[1] and columns[0] < columns[1]:
            yield OneSequence(a, index, slice(*rows), slice(*columns), seed)


def _softmax(scores: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Over visible keys, in place, and log_sum; a query that sees none has no weights."""
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    scores.sub_(top.masked_fill_(top == -torch.inf, 0.0)).exp_()
    total = scores.sum(-1, keepdim=True)
    log_sum = (top + total.log()).masked_fill_(total == 0.0, torch.inf).squeeze(-1)
    return scores.div_(total.masked_fill_(total == 0.0, 1.0)), log_sum


def _silu(scores: Tensor, hidden: Tensor | None) -> Tensor:
    """score · sigmoid(score) of visible pairs, in place."""
    scores.mul_(scores.sigmoid())
    return scores if hidden is None else scores.masked_fill_(hidden, 0.0)


def _silu_slope(scores: Tensor) -> Tensor:
    """sigmoid(score) · (1 + score · (1 - sigmoid(score)))."""
    gate = scores.sigmoid()
    return gate.mul_((1.0 - gate).mul_(scores).add_(1.0))


# --- forward -----------------------------------------------------------------------------------------


def attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Reference of `jagged_attention`."""
    a = Inputs(*arguments)
    _check(a)
    result = a.query.new_zeros((*a.query.shape[:2], a.value.shape[2]))
    log_sum = a.query.new_full(_log_sum_shape(a), torch.inf, dtype=accumulator(a.query.dtype))
    with as_given(a.query):
        for part in _sequences(a):
            if a.activation == "softmax":
                weights, sums = _softmax(part.scores(), part.hidden())
                log_sum[part.queries] = sums.transpose(0, 1)
            else:
                weights = _silu(part.scores(), part.hidden())
            weights = part.scaled(weights, part.kept())
            result[part.queries] = part.by_head(part.by_group(weights) @ part.shared(a.value)).transpose(0, 1)
    return result, log_sum


def _log_sum_shape(a: Inputs) -> tuple[Any, ...]:
    return tuple(a.query.shape[:2]) if a.activation == "softmax" else (0,)


def _cpu(library: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    a = Inputs(*arguments)
    _check(a)
    return cpu.attention(library, a)


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    a = Inputs(*arguments)
    _check(a)
    result = a.query.new_empty((*a.query.shape[:2], a.value.shape[2]))
    return result, a.query.new_empty(_log_sum_shape(a), dtype=accumulator(a.query.dtype))


# --- backward ----------------------------------------------------------------------------------------


class Gradients:
    """Gradients under construction; None where nobody wants one.

    A row belongs to one sequence and is written once, in its own dtype; biases add up, so halves are widened.
    """

    def __init__(self, a: Inputs, wanted: list[bool]) -> None:
        self.a, self.wanted = a, wanted
        self.query, self.key, self.value = (self.zeros(i) for i in range(3))
        self.bias, self.position_bias, self.time_bias = (self.zeros(i, wide=True) for i in range(3, 6))

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
    _check_backward(a, grad, result, log_sum, wanted)
    into = Gradients(a, wanted)
    with as_given(a.query):
        for part in _sequences(a):
            _add_sequence(part, grad, into)
    return into.results()


def _add_sequence(part: OneSequence, grad: Tensor, into: Gradients) -> None:
    a = part.a
    slopes = _softmax_slopes if a.activation == "softmax" else _silu_slopes
    result_grad = part.grouped(grad)
    weights_grad = part.by_head(result_grad @ part.shared(a.value).transpose(1, 2))
    weights, scores_grad = slopes(part, weights_grad)
    if into.value is not None:
        into.value[part.keys] = (part.by_group(weights).transpose(1, 2) @ result_grad).transpose(0, 1)
    del weights  # as large as the scores, and the biases need room
    _add_products(part, scores_grad, into)
    _add_biases(part, scores_grad, into)


def _softmax_slopes(part: OneSequence, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, and the gradient of scores from that of weights, which is overwritten."""
    kept = part.kept()
    shares, _ = _softmax(part.scores(), part.hidden())
    grad = part.scaled(grad, kept)
    grad.sub_((grad * shares).sum(-1, keepdim=True)).mul_(shares)
    return part.scaled(shares, kept), grad


def _silu_slopes(part: OneSequence, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, and the gradient of scores from that of weights, which is overwritten."""
    kept, hidden, scores = part.kept(), part.hidden(), part.scores()
    grad = part.scaled(grad, kept).mul_(_silu_slope(scores))
    if hidden is not None:
        grad.masked_fill_(hidden, 0.0)
    return part.scaled(_silu(scores, hidden), kept), grad


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


def _check_backward(a: Inputs, grad: Tensor, result: Tensor, log_sum: Tensor, wanted: list[bool]) -> None:
    _check(a)
    require(len(wanted) == len(DIFFERENTIABLE), f"jagged_attention_backward: wanted has one entry per {DIFFERENTIABLE}")
    shape = (*a.query.shape[:2], a.value.shape[2])
    for x, what, wide in ((grad, "grad", shape), (result, "result", shape), (log_sum, "log_sum", _log_sum_shape(a))):
        require(x.dim() == len(wide), f"jagged_attention_backward: {what} must have {len(wide)} dims, not {x.dim()}")
        for found, size in zip(x.shape, wide, strict=True):
            require_size(found, size, f"jagged_attention_backward: size of {what}")
    for x, what in ((grad, "grad"), (result, "result")):
        require(x.dtype == a.query.dtype, f"jagged_attention_backward: {what} is {x.dtype}, query is {a.query.dtype}")


def _cpu_backward(library: Any, grad: Tensor, result: Tensor, log_sum: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    a, wanted = Inputs(*arguments[:-1]), arguments[-1]
    _check_backward(a, grad, result, log_sum, wanted)
    return cpu.attention_backward(library, grad, result, log_sum, a, wanted)


def _backward_fake(grad: Tensor, result: Tensor, log_sum: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    a, wanted = Inputs(*arguments[:-1]), arguments[-1]
    _check_backward(a, grad, result, log_sum, wanted)
    inputs = [getattr(a, name) for name in DIFFERENTIABLE]
    pairs = zip(inputs, wanted, strict=True)
    return tuple(x.new_empty(x.shape) if want and x is not None else a.query.new_empty(0) for x, want in pairs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.attributes = inputs[TENSORS:]
    ctx.save_for_backward(*output, *inputs[:TENSORS])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    places = [Inputs._fields.index(name) for name in DIFFERENTIABLE]
    wanted = [ctx.needs_input_grad[place] for place in places]
    found = ops.jagged_attention_backward(grad, *ctx.saved_tensors, *ctx.attributes, wanted)
    gradients: list[Tensor | None] = [None] * len(Inputs._fields)
    for place, want, gradient in zip(places, wanted, found, strict=True):
        gradients[place] = gradient if want else None
    return tuple(gradients)


# --- FLOPs -------------------------------------------------------------------------------------------


def _flops(*arguments: Any, out_val: Any = None) -> Any:
    """Products of queries with keys and of weights with values, over all pairs of a sequence."""
    a = Inputs(*arguments)
    return 2 * _pairs(a) * a.query.shape[1] * (a.query.shape[2] + a.value.shape[2])


def _backward_flops(grad: Tensor, result: Tensor, log_sum: Tensor, *arguments: Any, out_val: Any = None) -> Any:
    """Twice the forward; scores that are computed anew do not count."""
    return 2 * _flops(*arguments[:-1])


def _pairs(a: Inputs) -> Any:
    """Pairs of a query and a key in one sequence; all pairs there could be where offsets have no values yet."""
    if not (has_data(a.query_offsets) and has_data(a.key_offsets)):
        return a.query.shape[0] * a.key.shape[0]
    return int((a.query_offsets.diff() * a.key_offsets.diff()).sum())


declare(
    f"jagged_attention({_ARGUMENTS}) -> (Tensor result, Tensor log_sum)",
    reference=attention,
    cpu=_cpu,
    fake=_fake,
    backward=_backward,
    save=_save,
    flops=_flops,
)
declare(
    f"jagged_attention_backward(Tensor grad, Tensor result, Tensor log_sum, {_ARGUMENTS}, bool[] wanted) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=attention_backward,
    cpu=_cpu_backward,
    fake=_backward_fake,
    flops=_backward_flops,
)
