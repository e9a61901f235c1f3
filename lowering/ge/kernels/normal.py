"""Norms, softmax and losses, with their gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..graph import Node
from .registry import Tensor, integers, kernel

aten = torch.ops.aten
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


def _reduction(node: Node) -> int:
    return _REDUCTIONS[node.attribute("reduction", "mean")]


@kernel("LayerNormV4")
def layer_norm(
    node: Node, x: Tensor, normalized_shape: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None
) -> tuple[Tensor, ...]:
    return aten.native_layer_norm(x, integers(normalized_shape), gamma, beta, node.attribute("epsilon", 1e-5))


@kernel("LayerNormGradV3")
def layer_norm_gradient(
    node: Node, dy: Tensor, x: Tensor, rstd: Tensor, mean: Tensor, gamma: Tensor
) -> tuple[Tensor, ...]:
    bias = torch.zeros_like(gamma)
    return aten.native_layer_norm_backward(dy, x, list(gamma.shape), mean, rstd, gamma, bias, [True] * 3)


@kernel("RmsNorm")
def rms_norm(node: Node, x: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    axes = list(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(x.float().square().mean(axes, keepdim=True) + node.attribute("epsilon", 1e-6))
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


@kernel("RmsNormGrad")
def rms_norm_gradient(node: Node, dy: Tensor, x: Tensor, rstd: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    axes = list(range(x.dim() - gamma.dim(), x.dim()))
    unit, scaled = x.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (scaled - unit * (scaled * unit).mean(axes, keepdim=True))
    return dx.to(x.dtype), (dy.float() * unit).sum_to_size(gamma.shape)


@kernel("SoftmaxV2")
def softmax(node: Node, x: Tensor) -> Tensor:
    (axis,) = node.attribute("axes", [-1])
    return torch.softmax(x, axis, dtype=torch.float32 if node.attribute("half_to_float", False) else None)


@kernel("SoftmaxGrad")
def softmax_gradient(node: Node, softmax: Tensor, gradient: Tensor) -> Tensor:
    (axis,) = node.attribute("axes", [-1])
    return aten._softmax_backward_data(gradient, softmax, axis, softmax.dtype)


@kernel("LogSoftmaxV2")
def log_softmax(node: Node, logits: Tensor) -> Tensor:
    (axis,) = node.attribute("axes", [-1])
    return torch.log_softmax(logits, axis)


@kernel("LogSoftmaxGrad")
def log_softmax_gradient(node: Node, gradient: Tensor, result: Tensor) -> Tensor:
    (axis,) = node.attribute("axis", [-1])
    return aten._log_softmax_backward_data(gradient, result, axis, result.dtype)


@kernel("NLLLoss")
def nll_loss(node: Node, x: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, ...]:
    ignored = node.attribute("ignore_index", -100)
    return aten.nll_loss_forward(x, target.long(), weight, _reduction(node), ignored)


@kernel("NLLLossGrad")
def nll_loss_gradient(
    node: Node, x: Tensor, y_grad: Tensor, target: Tensor, weight: Tensor, total_weight: Tensor
) -> Tensor:
    ignored = node.attribute("ignore_index", -100)
    return aten.nll_loss_backward(y_grad, x, target.long(), weight, _reduction(node), ignored, total_weight)


@kernel("MseLoss")
def mse_loss(node: Node, predict: Tensor, label: Tensor) -> Tensor:
    return F.mse_loss(predict, label, reduction=node.attribute("reduction", "mean"))


@kernel("MseLossGrad")
def mse_loss_gradient(node: Node, predict: Tensor, label: Tensor, gradient: Tensor) -> Tensor:
    return aten.mse_loss_backward(gradient, predict, label, _reduction(node))


@kernel("SigmoidCrossEntropyWithLogitsV2")
def binary_cross_entropy_with_logits(
    node: Node, predict: Tensor, target: Tensor, weight: Tensor | None = None, pos_weight: Tensor | None = None
) -> Tensor:
    reduction = node.attribute("reduction", "mean")
    return F.binary_cross_entropy_with_logits(predict, target, weight, reduction=reduction, pos_weight=pos_weight)


def _by_channel(statistic: Tensor, x: Tensor) -> Tensor:
    """A value for each channel, beside elements whose second axis is the channel."""
    return statistic.reshape([-1 if axis == 1 else 1 for axis in range(x.dim())])


def _over_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


@kernel("BNInfer")
def batch_norm_inference(
    node: Node, x: Tensor, scale: Tensor, offset: Tensor, mean: Tensor, variance: Tensor
) -> Tensor:
    gain = scale * torch.rsqrt(variance + node.attribute("epsilon"))
    return ((x - _by_channel(mean, x)) * _by_channel(gain, x) + _by_channel(offset, x)).to(x.dtype)


@kernel("BNInferGrad")
def batch_norm_inference_gradient(node: Node, grads: Tensor, scale: Tensor, variance: Tensor) -> Tensor:
    gain = scale * torch.rsqrt(variance + node.attribute("epsilon", 1e-4))
    return (grads * _by_channel(gain, grads)).to(grads.dtype)


@kernel("BatchNormV3")
def batch_norm(
    node: Node, x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor
) -> tuple[Tensor, ...]:
    """Statistics of the batch, running ones beside them; the latter are written into the inputs."""
    training, epsilon = node.attribute("is_training", True), node.attribute("epsilon", 1e-5)
    running = running_mean.clone(), running_var.clone()
    momentum = node.attribute("momentum", 0.1)
    y, mean, rstd = aten.native_batch_norm(x, weight, bias, *running, training, momentum, epsilon)
    return y, *running, mean, rstd


@kernel("BNTrainingUpdateGrad")
def batch_norm_parameter_gradients(
    node: Node, grads: Tensor, x: Tensor, mean: Tensor, variance: Tensor
) -> tuple[Tensor, Tensor]:
    unit = (x - _by_channel(mean, x)) * torch.rsqrt(_by_channel(variance, x) + node.attribute("epsilon", 1e-4))
    return (grads * unit).sum(_over_channels(x)), grads.sum(_over_channels(x))


@kernel("BNTrainingReduceGrad")
def batch_norm_input_gradient(
    node: Node, grads: Tensor, x: Tensor, diff_scale: Tensor, diff_offset: Tensor,
    scale: Tensor, mean: Tensor, variance: Tensor,
) -> Tensor:  # fmt: skip
    rstd = torch.rsqrt(_by_channel(variance, x) + node.attribute("epsilon", 1e-4))
    unit, count = (x - _by_channel(mean, x)) * rstd, x.numel() // x.shape[1]
    centred = grads - (_by_channel(diff_offset, x) + unit * _by_channel(diff_scale, x)) / count
    return (_by_channel(scale, x) * rstd * centred).to(x.dtype)
