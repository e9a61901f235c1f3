"""`jagged_attention` and its backward in C++."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from .call import TYPES, Arguments, address, call, fields

ACTIVATIONS = {"softmax": 0, "silu": 1, "sigmoid": 2, "squared_relu": 3, "linear": 4}  # as attention.h counts them


class AttentionArguments(Arguments):
    """The struct of attention.h, field for field."""

    _fields_ = fields(
        "query key value query_offsets key_offsets query_columns key_columns key_valid pair_mask bias position_bias "
        "time_bias sink time_bounds query_times key_times result log_sum grad query_grad key_grad value_grad bias_grad "
        "position_grad time_grad sink_grad",
        "type threads sequences query_rows key_rows heads groups depth value_depth "
        "query_row query_head key_row key_head value_row value_head grad_row grad_head "
        "mask_0 mask_1 mask_2 mask_3 mask_queries mask_keys bias_0 bias_1 bias_2 bias_3 bias_queries bias_keys "
        "bias_grad_0 bias_grad_1 bias_grad_2 bias_grad_3 "
        "position_entries position_stride time_entries time_stride activation min_distance max_distance dropping seed",
        "scale post_scale dropout score_cap",
    )


def attention(library: ctypes.CDLL, a: Any) -> tuple[Tensor, Tensor]:
    """Result (Tq, H, Dv), and the logarithm of softmax's denominators (Tq, H); the latter is empty for others."""
    work = _Work(a)
    query = a.query
    rows, heads = query.shape[0], query.shape[1]
    result = query.new_empty((rows, heads, a.value.shape[2]))
    log_sum = torch.empty((rows, heads) if a.activation == "softmax" else (0,), dtype=work.real)
    work.arguments.result, work.arguments.log_sum = result.data_ptr(), log_sum.data_ptr()
    call(library.turbogr_jagged_attention, work.arguments)
    return result, log_sum


def attention_backward(
    library: ctypes.CDLL, grad: Tensor, result: Tensor, log_sum: Tensor, a: Any, wanted: list[bool]
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, bias, position_bias, time_bias, sink; without elements where not wanted."""
    work = _Work(a)
    arguments = work.arguments
    grad = work.rows(grad, "grad")
    result, log_sum = result.contiguous(), log_sum.contiguous()
    arguments.grad, arguments.result, arguments.log_sum = grad.data_ptr(), result.data_ptr(), log_sum.data_ptr()
    found: list[Tensor] = []
    for name, x, want in zip(("query", "key", "value"), (a.query, a.key, a.value), wanted, strict=False):
        found.append(x.new_empty(x.shape if want else 0))
        setattr(arguments, f"{name}_grad", found[-1].data_ptr() if want else None)
    sums = (a.bias, a.position_bias, a.time_bias, a.sink)
    for name, x, want in zip(("bias", "position", "time", "sink"), sums, wanted[3:], strict=True):
        if not want or x is None:
            found.append(a.query.new_empty(0))
            continue
        total = torch.zeros(x.shape, dtype=work.real)
        setattr(arguments, f"{name}_grad", total.data_ptr())
        if name == "bias":
            work.strides("bias_grad", total)
        found.append(total)
    call(library.turbogr_jagged_attention_backward, arguments)
    for place, x in enumerate(sums, 3):
        if wanted[place] and x is not None:
            found[place] = found[place].to(x.dtype)
    return tuple(found)


class _Work:
    """Arguments of one call, and the tensors that must stay alive meanwhile."""

    def __init__(self, a: Any) -> None:
        self.real = torch.float64 if a.query.dtype == torch.float64 else torch.float32
        self.alive: list[Tensor] = []
        query, key, value = a.query, a.key, a.value
        heads, depth = query.shape[1:]
        seed = int(a.dropout_seed) if a.dropout_seed is not None and a.dropout > 0.0 else None
        self.arguments = x = AttentionArguments()
        x.type, x.threads = TYPES[query.dtype], torch.get_num_threads()
        x.sequences, x.query_rows, x.key_rows = a.query_offsets.shape[0] - 1, query.shape[0], key.shape[0]
        x.heads, x.groups, x.depth, x.value_depth = heads, key.shape[1], depth, value.shape[2]
        x.query = self.rows(query, "query").data_ptr()
        x.key = self.rows(key, "key").data_ptr()
        x.value = self.rows(value, "value").data_ptr()
        for name in ("query_offsets", "key_offsets", "query_columns", "key_columns", "key_valid"):
            setattr(x, name, address(self.plain(getattr(a, name))))
        for name in ("time_bounds", "query_times", "key_times"):
            setattr(x, name, address(self.plain(self.wide(getattr(a, name)))))
        x.activation, x.dropping, x.seed = ACTIVATIONS[a.activation], seed is not None, seed or 0
        x.min_distance, x.max_distance = a.min_distance, a.max_distance
        x.scale, x.post_scale, x.dropout, x.score_cap = a.scale, a.post_scale, a.dropout, a.score_cap
        if a.pair_mask is not None:
            self.pairs("mask", "pair_mask", a.pair_mask)
        if a.bias is not None:
            self.pairs("bias", "bias", self.keep(a.bias.to(self.real)))
        if a.position_bias is not None:
            self.table("position", a.position_bias)
        if a.time_bias is not None:
            self.table("time", a.time_bias)
        if a.sink is not None:
            x.sink = self.keep(a.sink.to(self.real).contiguous()).data_ptr()

    def keep(self, x: Tensor) -> Tensor:
        self.alive.append(x)
        return x

    def wide(self, x: Tensor | None) -> Tensor | None:
        return x if x is None or x.dtype == torch.int64 else self.keep(x.to(torch.int64))

    def plain(self, x: Tensor | None) -> Tensor | None:
        return x if x is None or x.is_contiguous() else self.keep(x.contiguous())

    def rows(self, x: Tensor, name: str) -> Tensor:
        """Rows and heads at any stride, features beside each other."""
        if x.shape[2] > 1 and x.stride(2) != 1:
            x = self.keep(x.contiguous())
        setattr(self.arguments, f"{name}_row", x.stride(0))
        setattr(self.arguments, f"{name}_head", x.stride(1))
        return x

    def pairs(self, name: str, field: str, x: Tensor) -> None:
        setattr(self.arguments, field, x.data_ptr())
        setattr(self.arguments, f"{name}_queries", x.shape[2])
        setattr(self.arguments, f"{name}_keys", x.shape[3])
        self.strides(name, x)

    def strides(self, name: str, x: Tensor) -> None:
        """Of 0 where a size of 1 stands for every index."""
        for dim in range(4):
            setattr(self.arguments, f"{name}_{dim}", x.stride(dim) if x.shape[dim] > 1 else 0)

    def table(self, name: str, x: Tensor) -> None:
        x = self.keep(x.to(self.real).contiguous())
        setattr(self.arguments, f"{name}_bias", x.data_ptr())
        setattr(self.arguments, f"{name}_entries", x.shape[1])
        setattr(self.arguments, f"{name}_stride", x.shape[1] if x.shape[0] > 1 else 0)
