"""Sampled softmax by its AscendC kernels: forward and backward.

Ids reach the kernels as 32 bits, as they do on an NPU: two ids that differ by a multiple of 2^32 count as equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..cpu.call import Arguments, fields
from ..declare import require
from ..sampled_softmax import Inputs
from .launch import launch

OPS = ("sampled_softmax", "sampled_softmax_backward")
WIDEST = 512


class SampledSoftmaxProblem(Arguments):
    _fields_ = fields("", "rows negatives groups width bytes has_ids has_scales cores", "scale")


class SampledSoftmaxBackwardProblem(Arguments):
    _fields_ = fields("", "rows negatives groups width bytes has_ids has_scales wanted cores", "scale")


def sampled_softmax(*arguments: Any, cores: int) -> tuple[Tensor, Tensor]:
    a = _prepared(Inputs(*arguments))
    loss, log_sum = (a.query.new_empty(a.query.shape[0], dtype=torch.float32) for _ in range(2))
    problem = SampledSoftmaxProblem(*_sizes(a), cores, a.scale)
    launch("sampled_softmax", _dtypes(a), [*a[:8], loss, log_sum], problem, outputs=2)
    return loss, log_sum


def sampled_softmax_backward(grad: Tensor, log_sum: Tensor, *arguments: Any, cores: int) -> tuple[Tensor, ...]:
    a, wanted = _prepared(Inputs(*arguments[:-1])), arguments[-1]
    found = [x.new_empty(x.shape if want else 0) for x, want in zip(a[:3], wanted, strict=True)]
    mask = sum(1 << place for place, want in enumerate(wanted) if want)
    problem = SampledSoftmaxBackwardProblem(*_sizes(a), mask, cores, a.scale)
    tensors = [grad.float().contiguous(), log_sum.contiguous(), *a[:8], *found]
    launch("sampled_softmax_backward", _dtypes(a), tensors, problem, outputs=3)
    return tuple(found)


# --- preparation -------------------------------------------------------------------------------------


def _prepared(a: Inputs) -> Inputs:
    """Tensors as the kernels take them; offsets may be of 32 bits as well."""
    taken = (torch.float16, torch.bfloat16, torch.float32)
    require(a.query.dtype in taken, f"sampled_softmax: no AscendC kernel for {a.query.dtype}")
    width = a.query.shape[1]
    fits = width % 16 == 0 and 16 <= width <= WIDEST
    require(fits, f"sampled_softmax: rows of {width}, and the kernel takes multiples of 16 up to {WIDEST}")
    same = a.query_offsets.dtype == a.negative_offsets.dtype
    require(same, f"sampled_softmax: offsets of {a.query_offsets.dtype} and of {a.negative_offsets.dtype}")
    dense: dict[str, Any] = {
        name: x.to(torch.int32 if name.endswith("_ids") else x.dtype).contiguous()
        for name, x in a._asdict().items()
        if isinstance(x, Tensor)
    }
    return a._replace(**dense)


def _sizes(a: Inputs) -> tuple[int, ...]:
    rows, width = a.query.shape
    negatives, groups = a.negative.shape[0], a.query_offsets.shape[0] - 1
    optional = a.negative_ids is not None, a.negative_scales is not None
    return rows, negatives, groups, width, a.query.element_size(), *optional


def _dtypes(a: Inputs) -> dict[str, torch.dtype]:
    return {"QUERY": a.query.dtype, "QUERY_OFFSETS": a.query_offsets.dtype}
