"""Rows gathered and added up by number, by the AscendC kernels in the twin."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..cpu.call import Arguments, fields
from .launch import launch

SUMMED = (torch.float16, torch.bfloat16, torch.float32)


class GatherProblem(Arguments):
    _fields_ = fields("", "count width bytes cores")


class ScatterProblem(Arguments):
    _fields_ = fields("", "entries count width bytes index_bytes cores")


class EmbeddingBackwardProblem(Arguments):
    _fields_ = fields("", "entries count width padding_idx bytes index_bytes cores")


# --- gather ------------------------------------------------------------------------------------------


def gather_rows(x: Tensor, rows: Tensor, *, cores: int) -> Tensor:
    found = _gather("gather_rows", "X", "ROWS", x.reshape(x.shape[0], prod(x.shape[1:])), rows, cores)
    return found.view(rows.shape[0], *x.shape[1:])


def embedding(weight: Tensor, ids: Tensor, padding_idx: int, *, cores: int) -> Tensor:
    found = _gather("embedding", "WEIGHT", "IDS", weight, ids.reshape(-1), cores)
    return found.view(*ids.shape, weight.shape[1])


def _gather(op: str, x_name: str, rows_name: str, x: Tensor, rows: Tensor, cores: int) -> Tensor:
    _check_range(op, rows, x.shape[0])
    if x.shape[1] == 0:
        return x.new_empty((rows.shape[0], 0))
    words = _as_words(x)
    result = words.new_empty((rows.shape[0], words.shape[1]))
    problem = GatherProblem(result.shape[0], result.shape[1], result.element_size(), cores)
    launch(op, {x_name: words.dtype, rows_name: rows.dtype}, [words, rows.contiguous(), result], problem, outputs=1)
    return _from_words(result, x)


def _as_words(x: Tensor) -> Tensor:
    """The same bytes in a dtype that the kernel moves: it looks at none of them."""
    x = x.contiguous()
    if x.dtype in SUMMED:
        return x
    size = _row_bytes(x)
    if size % 2:
        return x.view(torch.uint8).to(torch.int16).view(torch.float16)
    return x.view(torch.float16 if size % 4 else torch.float32)


def _from_words(words: Tensor, like: Tensor) -> Tensor:
    if words.dtype == like.dtype:
        return words
    return (words.view(torch.int16).to(torch.uint8) if _row_bytes(like) % 2 else words).view(like.dtype)


def _row_bytes(x: Tensor) -> int:
    return x.shape[1] * x.element_size()


# --- scatter -----------------------------------------------------------------------------------------


def scatter_rows(x: Tensor, rows: Tensor, count: int, *, cores: int) -> Tensor:
    _check_dtype("scatter_rows", x)
    _check_range("scatter_rows", rows, count)
    flat = x.reshape(x.shape[0], prod(x.shape[1:])).contiguous()
    result = x.new_empty((count, flat.shape[1]))
    problem = ScatterProblem(*flat.shape[:1], *result.shape, x.element_size(), rows.element_size(), cores)
    launch("scatter_rows", {"X": x.dtype, "ROWS": rows.dtype}, [flat, rows.contiguous(), result], problem, outputs=1)
    return result.view(count, *x.shape[1:])


def embedding_backward(grad: Tensor, ids: Tensor, count: int, padding_idx: int, *, cores: int) -> Tensor:
    _check_dtype("embedding_backward", grad)
    _check_range("embedding_backward", ids, count)
    result = grad.new_empty((count, grad.shape[-1]))
    problem = EmbeddingBackwardProblem(
        ids.numel(), *result.shape, padding_idx, grad.element_size(), ids.element_size(), cores
    )
    tensors = [grad.contiguous(), ids.contiguous(), result]
    launch("embedding_backward", {"GRAD": grad.dtype, "IDS": ids.dtype}, tensors, problem, outputs=1)
    return result


# --- what the kernels take for granted ---------------------------------------------------------------


def _check_range(op: str, rows: Tensor, limit: int) -> None:
    if rows.numel():
        low, high = (int(end) for end in rows.aminmax())
        if low < 0 or high >= limit:
            raise IndexError(f"{op}: rows from {low} to {high}, and there are {limit}")


def _check_dtype(op: str, x: Tensor) -> None:
    if x.dtype not in SUMMED:
        raise TypeError(f"{op}: the AscendC kernel adds float16, bfloat16 and float32, not {x.dtype}")
