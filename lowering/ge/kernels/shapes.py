"""Shapes: what changes where elements stand, not what they are; and tensors made from a shape alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..graph import GraphError, Node
from .registry import Tensor, dtype_of, integer, integers, kernel, require_default


@kernel("Shape")
def shape(node: Node, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape), dtype=dtype_of(node, "dtype", torch.int32))


@kernel("Reshape")
def reshape(node: Node, x: Tensor, shape: Tensor) -> Tensor:
    require_default(node, axis=0, num_axes=-1)
    return x.reshape(integers(shape))


@kernel("Transpose")
def transpose(node: Node, x: Tensor, perm: Tensor) -> Tensor:
    return x.permute(integers(perm)).contiguous()


@kernel("Permute")
def permute(node: Node, x: Tensor) -> Tensor:
    return x.permute(node.attribute("order", [0])).contiguous()


@kernel("ExpandDims")
def expand_dims(node: Node, x: Tensor, axis: Tensor) -> Tensor:
    return x.unsqueeze(integer(axis))


@kernel("Unsqueeze")
def unsqueeze(node: Node, x: Tensor) -> Tensor:
    """The axes are those of the result."""
    axes = node.attribute("axes", [])
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


@kernel("Squeeze")
def squeeze(node: Node, x: Tensor) -> Tensor:
    axes = node.attribute("axis", [])
    if any(x.shape[a] != 1 for a in axes):
        raise GraphError(f"{node}: squeezes axes {axes} of {list(x.shape)}, which are not all of size one")
    return x.squeeze(tuple(axes)) if axes else x.squeeze()


@kernel("FlattenV2")
def flatten(node: Node, x: Tensor) -> Tensor:
    return x.flatten(node.attribute("axis", 1), node.attribute("end_axis", -1))


@kernel("BroadcastTo", "Expand")
def broadcast(node: Node, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(integers(shape)).contiguous()


@kernel("Tile")
def tile(node: Node, x: Tensor, multiples: Tensor) -> Tensor:
    return x.repeat(integers(multiples))


@kernel("Fill")
def fill(node: Node, dims: Tensor, value: Tensor) -> Tensor:
    return value.reshape(()).expand(integers(dims)).clone()


@kernel("Empty")
def empty(node: Node, shape: Tensor) -> Tensor:
    """Whoever reads elements that nobody wrote gets what is easy to notice."""
    dtype = dtype_of(node, "dtype", torch.int32)
    if node.attribute("init", False):
        return torch.zeros(integers(shape), dtype=dtype)
    return torch.full(integers(shape), float("nan") if dtype.is_floating_point else 1, dtype=dtype)


@kernel("Range")
def range_(node: Node, start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@kernel("LinSpace")
def linspace(node: Node, start: Tensor, stop: Tensor, num: Tensor) -> Tensor:
    return torch.linspace(start.item(), stop.item(), integer(num), dtype=start.dtype)


@kernel("Pack")
def pack(node: Node, *inputs: Tensor) -> Tensor:
    """Sizes arrive with one element and any rank; they count as scalars where one of them is a scalar."""
    if any(x.dim() == 0 for x in inputs):
        inputs = tuple(x.reshape(()) for x in inputs)
    return torch.stack(inputs, node.attribute("axis", 0))


@kernel("Unpack")
def unpack(node: Node, x: Tensor) -> tuple[Tensor, ...]:
    parts = x.unbind(node.attribute("axis", 0))
    return tuple(part.contiguous() for part in parts)


@kernel("ConcatV2")
def concat(node: Node, *inputs: Tensor) -> Tensor:
    *parts, axis = inputs
    return torch.cat([part.reshape(1) if part.dim() == 0 else part for part in parts], integer(axis))


@kernel("ConcatD")
def concat_along(node: Node, *inputs: Tensor) -> Tensor:
    return torch.cat(inputs, node.attribute("concat_dim"))


@kernel("SplitV")
def split(node: Node, x: Tensor, sizes: Tensor, axis: Tensor) -> tuple[Tensor, ...]:
    """One size may be -1: what is left."""
    wanted, along = integers(sizes), integer(axis)
    if -1 in wanted:
        wanted[wanted.index(-1)] = x.shape[along] - sum(size for size in wanted if size >= 0)
    return tuple(part.contiguous() for part in x.split(wanted, along))


@kernel("StridedSliceV2")
def strided_slice(
    node: Node, x: Tensor, begin: Tensor, end: Tensor, axes: Tensor | None = None, strides: Tensor | None = None
) -> Tensor:
    require_default(node, begin_mask=0, end_mask=0, ellipsis_mask=0, new_axis_mask=0, shrink_axis_mask=0)
    starts = integers(begin)
    along = integers(axes) if axes is not None else range(len(starts))
    steps = integers(strides) if strides is not None else [1] * len(starts)
    for axis, start, stop, step in zip(along, starts, integers(end), steps, strict=True):
        x = torch.ops.aten.slice.Tensor(x, axis, start, stop, step)
    return x.contiguous()


@kernel("AsStrided")
def as_strided(node: Node, x: Tensor, size: Tensor, stride: Tensor, offset: Tensor) -> Tensor:
    return x.contiguous().as_strided(integers(size), integers(stride), integer(offset)).contiguous()


@kernel("ViewCopy")
def view_copy(
    node: Node, dst: Tensor, dst_size: Tensor, dst_stride: Tensor, dst_offset: Tensor,
    src: Tensor, src_size: Tensor, src_stride: Tensor, src_offset: Tensor,
) -> Tensor:  # fmt: skip
    result = dst.clone(memory_format=torch.contiguous_format)
    part = src.contiguous().as_strided(integers(src_size), integers(src_stride), integer(src_offset))
    result.as_strided(integers(dst_size), integers(dst_stride), integer(dst_offset)).copy_(part)
    return result


@kernel("PadV3")
def pad(node: Node, x: Tensor, paddings: Tensor, value: Tensor | None = None) -> Tensor:
    flat, rank = integers(paddings), x.dim()
    if node.attribute("paddings_contiguous", True):
        pairs = [(flat[2 * i], flat[2 * i + 1]) for i in range(rank)]
    else:
        pairs = [(flat[i], flat[i + rank]) for i in range(rank)]
    mode = {"constant": "constant", "edge": "replicate", "reflect": "reflect"}[node.attribute("mode", "constant")]
    last_first = [amount for pair in reversed(pairs) for amount in pair]
    if mode != "constant":
        while last_first[-2:] == [0, 0]:  # torch wants only the axes that are padded
            last_first = last_first[:-2]
        return F.pad(x, last_first, mode)
    return F.pad(x, last_first, mode, 0 if value is None else value.item())


@kernel("ReverseV2")
def reverse(node: Node, x: Tensor, axis: Tensor) -> Tensor:
    return x.flip(integers(axis))


@kernel("Roll")
def roll(node: Node, x: Tensor) -> Tensor:
    return torch.ops.aten.roll(x, node.attribute("shifts"), node.attribute("dims", []))


@kernel("Tril")
def tril(node: Node, x: Tensor) -> Tensor:
    return torch.tril(x, node.attribute("diagonal", 0))


@kernel("Triu")
def triu(node: Node, x: Tensor) -> Tensor:
    return torch.triu(x, node.attribute("diagonal", 0))
