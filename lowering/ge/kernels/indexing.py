"""Rows and elements by index: lookups, scatters, and the gradient of an embedding."""

from __future__ import annotations

import torch

from ..graph import GraphError, Node
from .registry import Tensor, integer, integers, kernel, require_default

aten = torch.ops.aten


def _within(node: Node, indices: Tensor, size: int, negative: bool = False) -> Tensor:
    """An NPU reads whatever lies there; better to stop."""
    if indices.numel():
        low, high = int(indices.min()), int(indices.max())
        if low < (-size if negative else 0) or high >= size:
            raise GraphError(f"{node}: indices from {low} to {high} into {size} rows")
    return indices.long() % size if negative and size else indices.long()


def _gather(node: Node, x: Tensor, indices: Tensor, axis: int) -> Tensor:
    require_default(node, batch_dims=0)
    axis %= max(x.dim(), 1)
    inside = _within(node, indices, x.shape[axis], node.attribute("negative_index_support", False))
    rows = x.index_select(axis, inside.reshape(-1))
    return rows.reshape(x.shape[:axis] + indices.shape + x.shape[axis + 1 :])


@kernel("Gather")
def gather(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    return _gather(node, x, indices, 0)


@kernel("GatherV2")
def gather_along(node: Node, x: Tensor, indices: Tensor, axis: Tensor) -> Tensor:
    return _gather(node, x, indices, integer(axis))


@kernel("GatherElements")
def gather_elements(node: Node, x: Tensor, index: Tensor) -> Tensor:
    axis = node.attribute("dim", 0)
    return x.gather(axis, _within(node, index, x.shape[axis]))


@kernel("GatherNd")
def gather_nd(node: Node, x: Tensor, indices: Tensor) -> Tensor:
    return x[tuple(indices.long().unbind(-1))]


@kernel("IndexByTensor")
def index(node: Node, x: Tensor, *indices: Tensor) -> Tensor:
    """The mask says which axes have an index."""
    mask = node.attribute("indices_mask", []) or [1] * len(indices)
    given = iter(indices)
    chosen = [next(given) if has_index else None for has_index in mask]
    for axis, tensor in enumerate(chosen):
        if tensor is not None:
            _within(node, tensor, x.shape[axis], negative=True)
    return x[tuple(slice(None) if tensor is None else tensor.long() for tensor in chosen)]


@kernel("IndexPutV2")
def index_put(
    node: Node, x: Tensor, value: Tensor, indexed_sizes: Tensor, indexed_strides: Tensor, *indices: Tensor
) -> Tensor:
    given = iter(indices)
    chosen = [next(given).long() if has_index else None for has_index in integers(indexed_sizes)]
    return aten.index_put(x, chosen, value, node.attribute("accumulate", False))


@kernel("ScatterElements")
def scatter_elements(node: Node, data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    axis, reduction = node.attribute("axis", 0), node.attribute("reduction", "none")
    inside = _within(node, indices, data.shape[axis], negative=True)
    if reduction == "none":
        return data.scatter(axis, inside, updates)
    if reduction != "add":
        raise GraphError(f"{node}: reduction {reduction!r} is not simulated")
    return data.scatter_add(axis, inside, updates)


@kernel("InplaceIndexAdd")
def index_add(node: Node, var: Tensor, indices: Tensor, updates: Tensor, alpha: Tensor | None = None) -> Tensor:
    axis = node.attribute("axis")
    inside = _within(node, indices, var.shape[axis])
    return var.index_add(axis, inside, updates, alpha=1 if alpha is None else alpha.item())


@kernel("ScatterNdUpdate")
def scatter_nd_update(node: Node, var: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return var.index_put(tuple(indices.long().unbind(-1)), updates)


@kernel("ScatterNdAdd")
def scatter_nd_add(node: Node, var: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return var.index_put(tuple(indices.long().unbind(-1)), updates, accumulate=True)


@kernel("UnsortedSegmentSum")
def unsorted_segment_sum(node: Node, x: Tensor, segments: Tensor, count: Tensor) -> Tensor:
    rows = x.reshape(segments.numel(), *x.shape[segments.dim() :])
    total = x.new_zeros((integer(count), *rows.shape[1:]))
    return total.index_add(0, _within(node, segments, integer(count)).reshape(-1), rows)


@kernel("OneHot")
def one_hot(node: Node, x: Tensor, depth: Tensor, on: Tensor, off: Tensor) -> Tensor:
    axis = node.attribute("axis", -1)
    along = x.dim() if axis == -1 else axis
    classes = torch.arange(integer(depth), dtype=x.dtype)
    shape = [-1 if place == along else 1 for place in range(x.dim() + 1)]
    return torch.where(x.unsqueeze(along) == classes.reshape(shape), on, off)


@kernel("EmbeddingDenseGrad")
def embedding_gradient(node: Node, grad: Tensor, indices: Tensor) -> Tensor:
    rows, padding = node.attribute("num_weights"), node.attribute("padding_idx", -1)
    inside = _within(node, indices, rows)
    return aten.embedding_dense_backward(grad, inside, rows, padding, node.attribute("scale_grad_by_freq", False))


@kernel("EmbeddingBag")
def embedding_bag(
    node: Node, weight: Tensor, indices: Tensor, offsets: Tensor | None = None, per_sample: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Only the bags themselves: nothing reads the rest, since torchair converts no gradient."""
    mode = {"sum": 0, "mean": 1, "max": 2}[node.attribute("mode", "mean")]
    if offsets is None:
        raise GraphError(f"{node}: bags without offsets are not simulated")
    inside, starts = _within(node, indices, weight.shape[0]), offsets.long()
    last = node.attribute("include_last_offset", False)
    padding = node.attribute("padding_idx", -1)
    bags, *_ = aten._embedding_bag(weight, inside, starts, False, mode, False, per_sample, last, padding)
    return bags, None, None, None
