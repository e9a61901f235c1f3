"""Arguments of `jagged_attention`, and what must hold of them before anybody looks at the data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .declare import require, require_size, require_tensor

ACTIVATIONS = ("softmax", "silu", "sigmoid", "squared_relu", "linear")
DIFFERENTIABLE = ("query", "key", "value", "bias", "position_bias", "time_bias", "sink")


class Inputs(NamedTuple):
    """Arguments of the op, in the order of its schema.

    What came later stands behind the attributes, with a default: calls and graphs from before stay valid.
    """

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
    sink: Tensor | None = None  # (H,)
    score_cap: float = 0.0


def log_sum_shape(a: Inputs) -> tuple[Any, ...]:
    return tuple(a.query.shape[:2]) if a.activation == "softmax" else (0,)


def check(a: Inputs) -> None:
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
    capped = a.score_cap >= 0.0 and math.isfinite(a.score_cap)
    require(capped, _name(f"score_cap is a number above 0, or 0 for none, not {a.score_cap}"))
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
    """Biases by distance and by time, the sink, and the seed."""
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
    if a.sink is not None:
        require(a.activation == "softmax", _name(f"sink is a term of softmax's denominator; {a.activation} has none"))
        require_tensor(a.sink, _name("sink"), 1)
        require_size(a.sink.shape[0], a.query.shape[1], _name("length of sink"))
    if a.dropout_seed is not None:
        require_tensor(a.dropout_seed, _name("dropout_seed"), a.dropout_seed.dim(), torch.int64)
        require_size(a.dropout_seed.numel(), 1, _name("number of seeds"))


def _check_broadcast(found: Any, wanted: Any, what: str) -> None:
    """A size is 1 or the wanted one."""
    if not (isinstance(found, int) and found == 1):
        require_size(found, wanted, _name(what))


def _name(what: str) -> str:
    return f"jagged_attention: {what}"


def check_columns(a: Inputs) -> None:
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


def check_backward(a: Inputs, grad: Tensor, result: Tensor, log_sum: Tensor, wanted: list[bool]) -> None:
    check(a)
    require(len(wanted) == len(DIFFERENTIABLE), f"jagged_attention_backward: wanted has one entry per {DIFFERENTIABLE}")
    shape = (*a.query.shape[:2], a.value.shape[2])
    for x, what, wide in ((grad, "grad", shape), (result, "result", shape), (log_sum, "log_sum", log_sum_shape(a))):
        require(x.dim() == len(wide), f"jagged_attention_backward: {what} must have {len(wide)} dims, not {x.dim()}")
        for found, size in zip(x.shape, wide, strict=True):
            require_size(found, size, f"jagged_attention_backward: size of {what}")
    for x, what in ((grad, "grad"), (result, "result")):
        require(x.dtype == a.query.dtype, f"jagged_attention_backward: {what} is {x.dtype}, query is {a.query.dtype}")
