"""`jagged_attention` and its backward as AscendC kernels, in the twin."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..ascendc.limits import lacking
from ..attention_inputs import DIFFERENTIABLE, Inputs
from ..cpu.call import Arguments, fields
from .build import library
from .launch import TILING_BYTES, Launch, launch

OPS = ("jagged_attention", "jagged_attention_backward")
FAR = (1 << 30) - 1  # kFarTime of attention_shape.h: times of a sequence are clamped to this, so that gaps fit int32
NEVER = (1 << 31) - 1  # a bound that no gap reaches


class AttentionProblem(Arguments):
    """The struct of attention_tiling.h, field for field."""

    _fields_ = fields(
        "",
        "sequences query_rows key_rows heads groups depth value_depth bytes index_bytes softmax has_valid "
        "position_entries position_heads time_bounds time_heads min_distance max_distance "
        "bias_sequences bias_heads bias_queries bias_keys mask_sequences mask_heads mask_queries mask_keys "
        "grad_sequences grad_heads has_seed wanted deterministic lacking cores",
        "scale post_scale dropout",
    )


def jagged_attention(*arguments: Any, cores: int = 40, index: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Result and log_sum. `index` is the dtype in which the kernel gets offsets and columns."""
    a = _prepared(Inputs(*arguments))
    rows, heads = a.query.shape[:2]
    result = a.query.new_full((rows, heads, a.value.shape[2]), torch.nan)
    log_sum = torch.full((rows, heads) if a.activation == "softmax" else (0,), torch.nan)
    if result.numel():
        tensors = [*_tensors(a, index), result, log_sum]
        _launch("jagged_attention", a, index, tensors, 2, _problem(a, index, cores))
    return result, log_sum


def jagged_attention_backward(
    grad: Tensor,
    result: Tensor,
    log_sum: Tensor,
    *arguments: Any,
    cores: int = 40,
    index: torch.dtype = torch.int64,
    deterministic: bool | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, bias, position_bias, time_bias, sink; without elements where not wanted.

    Sums have a fixed order where `deterministic`; where that is not said, if torch is told to be so.
    """
    given, wanted = Inputs(*arguments[:-1]), arguments[-1]
    a = _prepared(given)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    inputs = [getattr(given, name) for name in DIFFERENTIABLE]
    pairs = zip(inputs, wanted, strict=True)
    launched = bool(a.key.numel())  # else nobody sees anything
    start = torch.nan if launched else 0.0
    found = [x.new_full(x.shape, start) if want and x is not None else given.query.new_empty(0) for x, want in pairs]
    if any(x.numel() for x in found) and launched:
        sums = [_pair_grad(a, deterministic) if found[3].numel() else torch.empty(0)]
        sums += [torch.full(x.shape, torch.nan) for x in found[4:]]
        bits = sum(bool(x.numel()) << place for place, x in enumerate(found))
        problem = _problem(a, index, cores, bits, deterministic)
        if found[3].numel():
            problem.grad_sequences, problem.grad_heads = sums[0].shape[:2]
        tensors = [grad, result, log_sum, *_tensors(a, index), *found[:3], *sums]
        _launch("jagged_attention_backward", a, index, tensors, 7, problem)
        found[3:] = [_summed(total, x) for x, total in zip(found[3:], sums, strict=True)]
    return tuple(found)


def _pair_grad(a: Inputs, deterministic: bool) -> Tensor:
    """Room for the gradient of bias. Sums over sequences or heads come later where their order matters."""
    assert a.bias is not None
    sequences, heads = a.query_offsets.numel() - 1, a.query.shape[1]
    return torch.full((sequences, heads, *a.bias.shape[2:]) if deterministic else a.bias.shape, torch.nan)


def _summed(total: Tensor, like: Tensor) -> Tensor:
    """A gradient in the shape and dtype of what it is of, summed over what that was broadcast over."""
    dims = [dim for dim, size in enumerate(like.shape) if size == 1 and total.shape[dim] > 1]
    return (total.sum(dims, keepdim=True) if dims else total).to(like.dtype)


def _launch(
    op: str,
    a: Inputs,
    index: torch.dtype,
    tensors: list[Tensor | None],
    outputs: int,
    problem: AttentionProblem,
) -> None:
    if absent := lacking(op, a._asdict()):
        raise NotImplementedError(f"{op}: the AscendC kernel has no {absent}; see its README")
    dtypes = {"QUERY": a.query.dtype, "QUERY_OFFSETS": index}
    if not _fits(op, dtypes, problem):
        raise NotImplementedError(f"{op}: the AscendC kernel does not take these sizes; see its README")
    launch(op, dtypes, tensors, problem, outputs=outputs)


def _fits(op: str, dtypes: dict[str, torch.dtype], problem: AttentionProblem) -> bool:
    """The tiling function has no blocks for what the kernel does not take."""
    tiling, plan = (ctypes.c_uint8 * TILING_BYTES)(), Launch()
    tile = getattr(library(op, dtypes.items()), f"tile_{op}")
    tile(ctypes.byref(problem), ctypes.byref(tiling), ctypes.byref(plan))
    return plan.blocks > 0


def _prepared(a: Inputs) -> Inputs:
    """The same attention as the kernels take it: bias and pair_mask have an entry for each key column."""
    columns = int(a.key_columns.max()) + 1 if a.key_columns.numel() else 1

    def table(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if x is None:
            return None
        return x.to(dtype).expand(*x.shape[:3], columns if x.shape[3] == 1 else x.shape[3]).contiguous()

    return a._replace(bias=table(a.bias, torch.float32), pair_mask=table(a.pair_mask, torch.uint8))


def _tensors(a: Inputs, index: torch.dtype) -> list[Tensor | None]:
    """Inputs, as the entries take them: in the order of the schema."""
    table = a.position_bias, a.time_bias
    position_bias, time_bias = (None if x is None else x.float() for x in table)
    query_times, key_times = _times(a)
    bounds = None if a.time_bounds is None else a.time_bounds.clamp(0, NEVER).to(torch.int32)
    rows = (a.query_offsets, a.key_offsets, a.query_columns, a.key_columns)
    valid = None if a.key_valid is None else a.key_valid.to(torch.uint8)
    return [
        a.query, a.key, a.value, *(x.to(index) for x in rows), valid, a.pair_mask, a.bias, position_bias, time_bias,
        bounds, query_times, key_times, a.dropout_seed, a.sink,
    ]  # fmt: skip


def _times(a: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Times in int32, relative to that of the first key of the same sequence."""
    if a.query_times is None or a.key_times is None:
        return None, None
    if a.key_times.numel() == 0:
        return torch.zeros_like(a.query_times, dtype=torch.int32), a.key_times.to(torch.int32)
    origins = a.key_times[a.key_offsets.clamp(max=a.key_times.numel() - 1)]
    return _relative(a.query_times, a.query_offsets, origins), _relative(a.key_times, a.key_offsets, origins)


def _relative(times: Tensor, offsets: Tensor, origins: Tensor) -> Tensor:
    rows = torch.arange(times.numel(), device=times.device)
    sequences = (torch.searchsorted(offsets, rows, right=True) - 1).clamp(min=0)
    return (times - origins[sequences]).clamp(-FAR, FAR).to(torch.int32)


def _pair_sizes(name: str, table: Tensor | None) -> dict[str, int]:
    sizes = (0, 0, 0, 0) if table is None else table.shape
    return {f"{name}_{dim}": size for dim, size in zip(("sequences", "heads", "queries", "keys"), sizes, strict=True)}


def _problem(
    a: Inputs, index: torch.dtype, cores: int, wanted: int = 0, deterministic: bool = True
) -> AttentionProblem:
    return AttentionProblem(
        sequences=a.query_offsets.numel() - 1,
        query_rows=a.query.shape[0],
        key_rows=a.key.shape[0],
        heads=a.query.shape[1],
        groups=a.key.shape[1],
        depth=a.query.shape[2],
        value_depth=a.value.shape[2],
        bytes=a.query.element_size(),
        index_bytes=index.itemsize,
        softmax=a.activation == "softmax",
        has_valid=a.key_valid is not None,
        position_entries=0 if a.position_bias is None else a.position_bias.shape[1],
        position_heads=0 if a.position_bias is None else a.position_bias.shape[0],
        time_bounds=0 if a.time_bounds is None else a.time_bounds.numel(),
        time_heads=0 if a.time_bias is None else a.time_bias.shape[0],
        **_pair_sizes("bias", a.bias),
        **_pair_sizes("mask", a.pair_mask),
        min_distance=a.min_distance,
        max_distance=a.max_distance,
        has_seed=a.dropout_seed is not None,
        wanted=wanted,
        deterministic=deterministic,
        lacking=bool(lacking("jagged_attention", a._asdict())),
        cores=cores,
        scale=a.scale,
        post_scale=a.post_scale,
        dropout=a.dropout,
    )
