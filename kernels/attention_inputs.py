"""Arguments of `jagged_attention`, and what must hold of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .contract import (
    BOOL,
    INT64,
    REAL,
    Array,
    As,
    Ascending,
    Contract,
    Distances,
    Entries,
    Flags,
    Number,
    Range,
    Rule,
    Word,
    together,
)

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


COLUMNS = 1 << 29  # of a sequence: differences of columns fit into 32 bits with room to spare

_HEADS = "G*M"
_TIMES = (torch.int64, torch.int32)


def _inside(argument: str, offsets: str, size: str, table: str) -> Entries:
    """No column points outside of a mask or a bias."""
    return Entries(argument, Range(size, within=offsets, or_one=True), table)


CONTRACT = Contract(
    together("time_bias", "time_bounds", "query_times", "key_times"),
    Rule("sink is None or activation == 'softmax'", "sink is a term of softmax's denominator; {activation} has none"),
    Rule("dropout_seed is None or dropout_seed.numel() == 1", "dropout_seed is one number"),
    _inside("query_columns", "query_offsets", "Mq", "pair_mask"),
    _inside("key_columns", "key_offsets", "Mk", "pair_mask"),
    _inside("query_columns", "query_offsets", "Bq", "bias"),
    _inside("key_columns", "key_offsets", "Bk", "bias"),
    Distances("query_columns", "key_columns", "query_offsets", "key_offsets", "P", "position_bias"),
    nonzero="G M",
    key=Array("Tk G D", REAL),
    query=Array(f"Tq {_HEADS} D", As("key")),
    value=Array("Tk G E", As("key")),
    query_offsets=Array("S+1", INT64, Ascending("Tq")),
    key_offsets=Array("S+1", INT64, Ascending("Tk")),
    query_columns=Array("Tq", INT64, Range(most=COLUMNS, within="query_offsets", error=ValueError)),
    key_columns=Array("Tk", INT64, Range(most=COLUMNS, within="key_offsets", error=ValueError)),
    key_valid=Array("Tk", BOOL),
    pair_mask=Array(f"S|1 {_HEADS}|1 Mq Mk", BOOL),
    bias=Array(f"S|1 {_HEADS}|1 Bq Bk", REAL),
    position_bias=Array(f"{_HEADS}|1 2*P-1", REAL),
    time_bias=Array(f"{_HEADS}|1 K+1", REAL),
    time_bounds=Array("K", _TIMES, Ascending()),
    query_times=Array("Tq", As("time_bounds")),
    key_times=Array("Tk", As("time_bounds")),
    dropout_seed=Array("...", INT64, anywhere=True),
    activation=Word(ACTIVATIONS),
    dropout=Number(0.0, 1.0),
    sink=Array(_HEADS, REAL),
    score_cap=Number(0.0),
)
BACKWARD = CONTRACT.extended(
    Rule("not unlike(L, (Tq, G*M) if activation == 'softmax' else (0,))", "log_sum has sizes {tuple(L)}"),
    grad=Array(f"Tq {_HEADS} E", As("key")),
    result=Array(f"Tq {_HEADS} E", As("key")),
    log_sum=Array("...L", As("key", sums=True)),
    wanted=Flags(DIFFERENTIABLE),
)
