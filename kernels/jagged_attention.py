"""Attention over packed sequences, in which each query sees only keys of its own sequence.

    product[h, i, j] = scale · <query[i, h], key[j, g]>                              (g: the group of head h)
    score[h, i, j]   = capped product + bias terms,      capped x = score_cap · tanh(x / score_cap), or x without a cap
    weight[h, i, j]  = dropout(post_scale · activation(score[h, i, j]))              over visible keys, else 0
    result[i, h]     = sum over j of weight[h, i, j] · value[j, g]
    log_sum[i, h]    = log of softmax's denominator; infinite where the query sees no key

Activations:
    softmax         exp(score) / denominator; the denominator is the sum of exp(score) over visible keys, and of
                    exp(sink[h]) where there is a sink: a key that every query sees, whose value is zero
    silu            score · sigmoid(score)
    sigmoid         sigmoid(score)
    squared_relu    max(score, 0)²
    linear          score: with no features of queries and keys, the biases are the weights
A query that sees no key, or whose scores are all -inf, has a result of zero, with a sink and without.

The cap is that of Gemma 2: of the scaled product, before masks and biases, so that a bias of -1e9 hides a pair as ever.
The sink is that of GPT-OSS: one logit per head, neither capped nor biased, and never dropped.

`log_sum` is for the backward of softmax, in the precision of sums; other activations have none, and it has no elements.
With a sink it includes the sink, so that a weight is exp(score - log_sum) either way.

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

The reference (attention_reference.py) goes sequence by sequence. The CPU kernel (cpu/attention.h) keeps scores in
blocks that fit the caches. The backward computes scores anew and draws the same dropout (see dropout.py), so only
inputs, result and log_sum are saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention_inputs import BACKWARD, CONTRACT, DIFFERENTIABLE, Inputs, log_sum_shape
from .attention_reference import attention, attention_backward
from .cpu import attention as cpu
from .declare import accumulator, declare, has_data

__all__ = ["DIFFERENTIABLE", "Inputs", "attention", "attention_backward"]

ops = torch.ops.turbogr

_TENSORS = (
    "Tensor query, Tensor key, Tensor value, Tensor query_offsets, Tensor key_offsets, "
    "Tensor query_columns, Tensor key_columns, Tensor? key_valid, Tensor? pair_mask, Tensor? bias, "
    "Tensor? position_bias, Tensor? time_bias, Tensor? time_bounds, Tensor? query_times, Tensor? key_times, "
    "Tensor? dropout_seed"
)
_ATTRIBUTES = "str activation, float scale, float post_scale, int min_distance, int max_distance, float dropout"
_ATTRIBUTE, _SINK = Inputs._fields.index("activation"), Inputs._fields.index("sink")  # tensors, attributes, the sink
_PLACES = [Inputs._fields.index(name) for name in DIFFERENTIABLE]


def _cpu(library: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    return cpu.attention(library, Inputs(*arguments))


def _fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    a = Inputs(*arguments)
    result = a.query.new_empty((*a.query.shape[:2], a.value.shape[2]))
    return result, a.query.new_empty(log_sum_shape(a), dtype=accumulator(a.query.dtype))


def _cpu_backward(library: Any, grad: Tensor, result: Tensor, log_sum: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    a, wanted = Inputs(*arguments[:-1]), arguments[-1]
    return cpu.attention_backward(library, grad, result, log_sum, a, wanted)


def _backward_fake(grad: Tensor, result: Tensor, log_sum: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    a, wanted = Inputs(*arguments[:-1]), arguments[-1]
    inputs = [getattr(a, name) for name in DIFFERENTIABLE]
    pairs = zip(inputs, wanted, strict=True)
    return tuple(x.new_empty(x.shape) if want and x is not None else a.query.new_empty(0) for x, want in pairs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.attributes, ctx.score_cap = inputs[_ATTRIBUTE:_SINK], inputs[-1]
    ctx.save_for_backward(*output, *inputs[:_ATTRIBUTE], inputs[_SINK])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad  # of the arguments that were given; defaults at the end are not among them
    wanted = [place < len(needed) and needed[place] for place in _PLACES]
    *saved, sink = ctx.saved_tensors
    found = ops.jagged_attention_backward(grad, *saved, *ctx.attributes, sink, ctx.score_cap, wanted)
    gradients: list[Tensor | None] = [None] * len(needed)
    for place, want, gradient in zip(_PLACES, wanted, found, strict=True):
        if want:
            gradients[place] = gradient
    return tuple(gradients)


# --- FLOPs -------------------------------------------------------------------------------------------


def _flops(*arguments: Any, out_val: Any = None, **named: Any) -> Any:
    """Products of queries with keys and of weights with values, over all pairs of a sequence."""
    a = Inputs(*arguments, **named)
    return 2 * _pairs(a) * a.query.shape[1] * (a.query.shape[2] + a.value.shape[2])


def _backward_flops(grad: Tensor, result: Tensor, log_sum: Tensor, *arguments: Any, out_val: Any = None) -> Any:
    """Twice the forward, or once where nobody asks how weights change; scores that are computed anew do not count."""
    a, wanted = Inputs(*arguments[:-1]), arguments[-1]
    given = not a.query.shape[2] and not any(wanted[3:])
    return (1 if given else 2) * _flops(*a)


def _pairs(a: Inputs) -> Any:
    """Pairs of a query and a key in one sequence; all pairs there could be where offsets have no values yet."""
    if not (has_data(a.query_offsets) and has_data(a.key_offsets)):
        return a.query.shape[0] * a.key.shape[0]
    return int((a.query_offsets.diff() * a.key_offsets.diff()).sum())


declare(
    f"jagged_attention({_TENSORS}, {_ATTRIBUTES}, Tensor? sink=None, float score_cap=0.0) "
    "-> (Tensor result, Tensor log_sum)",
    CONTRACT,
    reference=attention,
    cpu=_cpu,
    fake=_fake,
    backward=_backward,
    save=_save,
    flops=_flops,
)
declare(
    f"jagged_attention_backward(Tensor grad, Tensor result, Tensor log_sum, {_TENSORS}, {_ATTRIBUTES}, "
    "Tensor? sink, float score_cap, bool[] wanted) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    BACKWARD,
    reference=attention_backward,
    cpu=_cpu_backward,
    fake=_backward_fake,
    flops=_backward_flops,
)
