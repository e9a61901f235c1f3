"""Many elements into one: sums, extremes and where they are, scans, order."""

from __future__ import annotations

import torch

from ..dtypes import promoted
from ..graph import Node
from .registry import Tensor, dtype_of, integer, integers, kernel


def _axes(x: Tensor, axes: Tensor) -> list[int]:
    return integers(axes) or list(range(x.dim()))


def _keeps(node: Node) -> bool:
    return node.attribute("keep_dims", False)


@kernel("ReduceSum")
def reduce_sum(node: Node, x: Tensor, axes: Tensor) -> Tensor:
    return x.sum(_axes(x, axes), keepdim=_keeps(node), dtype=x.dtype)


@kernel("ReduceMean")
def reduce_mean(node: Node, x: Tensor, axes: Tensor) -> Tensor:
    return x.mean(_axes(x, axes), keepdim=_keeps(node))


@kernel("ReduceMeanWithCast")
def reduce_mean_with_cast(node: Node, x: Tensor, axes: Tensor) -> Tensor:
    return x.mean(_axes(x, axes), keepdim=_keeps(node), dtype=dtype_of(node, "dtype", x.dtype))


@kernel("ReduceMax")
def reduce_max(node: Node, x: Tensor, axes: Tensor) -> Tensor:
    return torch.amax(x, _axes(x, axes), keepdim=_keeps(node))


@kernel("ReduceMin")
def reduce_min(node: Node, x: Tensor, axes: Tensor) -> Tensor:
    return torch.amin(x, _axes(x, axes), keepdim=_keeps(node))


@kernel("ReduceAny")
def reduce_any(node: Node, x: Tensor, axes: Tensor) -> Tensor:
    return torch.any(x, _axes(x, axes), keepdim=_keeps(node))


@kernel("ReduceAll")
def reduce_all(node: Node, x: Tensor, axes: Tensor) -> Tensor:
    return torch.all(x, _axes(x, axes), keepdim=_keeps(node))


def _product(x: Tensor, axes: list[int], keeps: bool) -> Tensor:
    for axis in sorted((a % max(x.dim(), 1) for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keeps, dtype=x.dtype)
    return x


@kernel("ReduceProd")
def reduce_product(node: Node, x: Tensor, axes: Tensor) -> Tensor:
    return _product(x, _axes(x, axes), _keeps(node))


@kernel("ReduceProdD")
def reduce_product_along(node: Node, x: Tensor) -> Tensor:
    return _product(x, node.attribute("axes"), _keeps(node))


@kernel("ReduceLogSumExp")
def reduce_log_sum_exp(node: Node, x: Tensor, axes: Tensor) -> Tensor:
    return torch.logsumexp(x, _axes(x, axes), keepdim=_keeps(node))


def _deviation(node: Node, x: Tensor, mean: Tensor) -> Tensor:
    axes = node.attribute("dim", []) or list(range(x.dim()))
    correction = node.attribute("correction", 1) if node.attribute("unbiased", True) else 0
    count = torch.Size([x.shape[axis] for axis in axes]).numel() - correction
    squares = (x - mean).square().sum(axes, keepdim=node.attribute("keepdim", False))
    return (squares / max(count, 0)).sqrt().to(x.dtype)


@kernel("ReduceStdV2")
def reduce_std(node: Node, x: Tensor) -> tuple[Tensor, Tensor]:
    axes = node.attribute("dim", []) or list(range(x.dim()))
    mean = x.mean(axes, keepdim=True)
    return _deviation(node, x, mean), mean if node.attribute("keepdim", False) else x.mean(axes)


@kernel("ReduceStdWithMean")
def reduce_std_with_mean(node: Node, x: Tensor, mean: Tensor) -> Tensor:
    deviation = _deviation(node, x, mean)
    return 1 / (deviation + node.attribute("epsilon", 1e-3)) if node.attribute("invert", False) else deviation


@kernel("LpNormV2")
def norm(node: Node, x: Tensor) -> Tensor:
    axes = node.attribute("axes", []) or None
    order = node.attribute("p", 2.0)
    return torch.linalg.vector_norm(x, order, dim=axes, keepdim=node.attribute("keepdim", False))


@kernel("Cumsum")
def cumsum(node: Node, x: Tensor, axis: Tensor) -> Tensor:
    along = integer(axis)
    if node.attribute("reverse", False):
        x = x.flip(along)
    total = x.cumsum(along, dtype=promoted(x.dtype)).to(x.dtype)
    if node.attribute("exclusive", False):
        total = total - x
    return total.flip(along) if node.attribute("reverse", False) else total


@kernel("ArgMaxV2")
def argmax(node: Node, x: Tensor, dimension: Tensor) -> Tensor:
    return x.argmax(integer(dimension)).to(dtype_of(node, "dtype", torch.int64))


@kernel("ArgMin")
def argmin(node: Node, x: Tensor, dimension: Tensor) -> Tensor:
    return x.argmin(integer(dimension)).to(dtype_of(node, "dtype", torch.int64))


@kernel("ArgMaxWithValue")
def argmax_with_value(node: Node, x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.max(node.attribute("dimension"), keepdim=_keeps(node))
    return indices.to(torch.int32), values


@kernel("ArgMinWithValue")
def argmin_with_value(node: Node, x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = x.min(node.attribute("dimension"), keepdim=_keeps(node))
    return indices.to(torch.int32), values


@kernel("TopK", "TopKV2")
def top_k(node: Node, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    largest, in_order = node.attribute("largest", True), node.attribute("sorted", True)
    values, indices = x.topk(integer(k), node.attribute("dim", -1), largest, in_order)
    return values, indices.to(torch.int32)


@kernel("Sort")
def sort(node: Node, x: Tensor) -> tuple[Tensor, Tensor]:
    descending, stable = node.attribute("descending", False), node.attribute("stable", False)
    values, indices = torch.sort(x, dim=node.attribute("axis", -1), descending=descending, stable=stable)
    return values, indices.to(torch.int32)


@kernel("SearchSorted")
def search_sorted(node: Node, sequence: Tensor, values: Tensor, sorter: Tensor | None = None) -> Tensor:
    found = torch.searchsorted(sequence, values, right=node.attribute("right", False), sorter=sorter)
    return found.to(dtype_of(node, "dtype", torch.int64))


@kernel("Bucketize")
def bucketize(node: Node, x: Tensor) -> Tensor:
    boundaries = torch.tensor(node.attribute("boundaries"))
    found = torch.bucketize(x.to(boundaries.dtype), boundaries, right=node.attribute("right", True))
    return found.to(dtype_of(node, "dtype", torch.int32))
