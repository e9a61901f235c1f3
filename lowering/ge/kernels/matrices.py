"""Products of matrices, and convolutions."""

from __future__ import annotations

import torch

from ..graph import GraphError, Node
from .registry import Tensor, integers, kernel, require_default

aten = torch.ops.aten


def _product(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, bias: Tensor | None) -> Tensor:
    product = torch.matmul(a.transpose(-1, -2) if transpose_a else a, b.transpose(-1, -2) if transpose_b else b)
    return product if bias is None else product + bias


@kernel("MatMul")
def matmul(node: Node, x1: Tensor, x2: Tensor, bias: Tensor | None = None) -> Tensor:
    return _product(x1, x2, node.attribute("transpose_x1", False), node.attribute("transpose_x2", False), bias)


@kernel("MatMulV2")
def matmul_v2(node: Node, x1: Tensor, x2: Tensor, bias: Tensor | None = None, offset_w: Tensor | None = None) -> Tensor:
    require_default(node, offset_x=0)
    if offset_w is not None:
        raise GraphError(f"{node}: quantized weights are not simulated")
    return _product(x1, x2, node.attribute("transpose_x1", False), node.attribute("transpose_x2", False), bias)


@kernel("BatchMatMul")
def batch_matmul(node: Node, x1: Tensor, x2: Tensor) -> Tensor:
    return _product(x1, x2, node.attribute("adj_x1", False), node.attribute("adj_x2", False), None)


@kernel("BatchMatMulV2")
def batch_matmul_v2(
    node: Node, x1: Tensor, x2: Tensor, bias: Tensor | None = None, offset_w: Tensor | None = None
) -> Tensor:
    require_default(node, offset_x=0)
    if offset_w is not None:
        raise GraphError(f"{node}: quantized weights are not simulated")
    return _product(x1, x2, node.attribute("adj_x1", False), node.attribute("adj_x2", False), bias)


def _convolution(node: Node) -> tuple[list[int], list[int], list[int], int]:
    """Strides, padding, dilation, groups; in GE's order of axes, which torchair always asks to be NCHW."""
    if node.attribute("data_format", "NHWC") != "NCHW":
        raise GraphError(f"{node}: only convolutions in NCHW are simulated")
    top, bottom, left, right = node.attribute("pads")
    if (top, left) != (bottom, right):
        raise GraphError(f"{node}: uneven padding {node.attribute('pads')} is not simulated")
    dilations = node.attribute("dilations", [1, 1, 1, 1])
    return node.attribute("strides")[2:], [top, left], dilations[2:], node.attribute("groups", 1)


@kernel("Conv2D")
def conv2d(
    node: Node, x: Tensor, filters: Tensor, bias: Tensor | None = None, offset_w: Tensor | None = None
) -> Tensor:
    strides, padding, dilation, groups = _convolution(node)
    return torch.conv2d(x, filters, bias, strides, padding, dilation, groups)


def _convolution_gradient(node: Node, out: Tensor, x: Tensor, filters: Tensor, wanted: list[bool]) -> list[Tensor]:
    strides, padding, dilation, groups = _convolution(node)
    return aten.convolution_backward(
        out, x, filters, None, strides, padding, dilation, False, [0, 0], groups, wanted
    )  # fmt: skip


@kernel("Conv2DBackpropInput")
def conv2d_to_input(node: Node, input_size: Tensor, filters: Tensor, out: Tensor) -> Tensor:
    x = out.new_zeros(integers(input_size))
    return _convolution_gradient(node, out, x, filters, [True, False, False])[0]


@kernel("Conv2DBackpropFilter")
def conv2d_to_filter(node: Node, x: Tensor, filter_size: Tensor, out: Tensor) -> Tensor:
    filters = out.new_zeros(integers(filter_size))
    return _convolution_gradient(node, out, x, filters, [False, True, False])[1]
