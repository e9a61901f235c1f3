"""Each GE operator in a graph of its own, against torch: value, dtype and shape, under the checker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from turbogr_compile.lowering.ge.graph import GraphError
from turbogr_compile.lowering.ge.kernels import BELIEFS, FAMILIES, KERNELS, collectives, registry
from turbogr_compile.lowering.ge.kernels.random import packed, unpacked

from .operators import run
from .simulator import needs_torchair

pytestmark = needs_torchair
aten = torch.ops.aten
G = torch.Generator().manual_seed(0)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=G)


def i(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def n(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


X, Y, Z = f(4, 6), f(4, 6), f(4, 6)
P = X.abs() + 0.5
U = torch.rand(4, 6, generator=G) * 1.8 - 0.9
K = torch.arange(24).reshape(4, 6)
B = X > 0
ROWS, IDX = f(10, 6), torch.tensor([[0, 2], [9, 2]])
I32 = torch.int32
Case = tuple[str, list[Any], dict[str, Any], Callable[[], Any]]
CASES: list[Case] = []


def case(op: str, inputs: list[Any], expected: Callable[[], Any], **attributes: Any) -> None:
    CASES.append((op, inputs, attributes, expected))


OF_ANY = ["Abs", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Expm1", "Floor", "Neg", "Round", "Sign", "Sin", "Sinh", "Square",
          "Tan", "Tanh", "Sigmoid", "Relu", "Reciprocal", "IsFinite", "IsInf", "IsNan"]  # fmt: skip
OF_POSITIVE = ["Sqrt", "Rsqrt", "Log", "Log1p"]
OF_SMALL = ["Acos", "Asin", "Asinh", "Atan", "Atanh", "Erfc", "Erfinv", "Trunc"]
for name, given, function in [
    *[(op, X, getattr(torch, op.lower())) for op in OF_ANY],
    *[(op, P, getattr(torch, op.lower())) for op in OF_POSITIVE],
    *[(op, U, getattr(torch, op.lower())) for op in OF_SMALL],
    ("Acosh", P + 1, torch.acosh), ("Invert", K, torch.bitwise_not), ("LogicalNot", B, torch.logical_not),
    ("OnesLike", X, torch.ones_like), ("ZerosLike", X, torch.zeros_like), ("LogSigmoid", X, F.logsigmoid),
    ("Mish", X, F.mish), ("Softplus", X, F.softplus), ("HardSwish", X * 3, F.hardswish),
    ("Gelu", X, lambda x: F.gelu(x, approximate="tanh")), ("Identity", X, lambda x: x),
    ("TensorMove", X, lambda x: x),
]:  # fmt: skip
    case(name, [given], lambda given=given, function=function: function(given))

for name, a, b, function in [
    *[(op, X, Y, getattr(torch, op.lower())) for op in ["Add", "Sub", "Mul", "Maximum", "Minimum"]],
    ("AddV2", X, Y, torch.add), ("RealDiv", X, P, torch.true_divide), ("Div", X, P, torch.true_divide),
    ("FloorDiv", X, P, torch.floor_divide), ("FloorMod", X, P, torch.remainder), ("Mod", X, P, torch.fmod),
    ("Pow", P, Y, torch.pow), ("Xlogy", X, P, torch.xlogy), ("Equal", K, K.flip(0), torch.eq),
    ("NotEqual", K, K.flip(0), torch.ne), ("Less", X, Y, torch.lt), ("LessEqual", X, Y, torch.le),
    ("Greater", X, Y, torch.gt), ("GreaterEqual", X, Y, torch.ge), ("LogicalAnd", B, B.flip(0), torch.logical_and),
    ("LogicalOr", B, B.flip(0), torch.logical_or), ("BitwiseAnd", K, K + 3, torch.bitwise_and),
    ("BitwiseOr", K, K + 3, torch.bitwise_or), ("BitwiseXor", K, K + 3, torch.bitwise_xor),
    ("LeftShift", K, K % 5, torch.bitwise_left_shift), ("RightShift", K, K % 5, torch.bitwise_right_shift),
    ("TruncateDiv", K - 9, K + 2, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    ("Add", X, Y[0], torch.add), ("Sub", K, K[0], torch.sub),
    ("ReluGrad", X, Y, lambda g, x: g * (x > 0)), ("SigmoidGrad", U, Y, lambda y, g: g * y * (1 - y)),
    ("TanhGrad", U, Y, lambda y, g: g * (1 - y * y)),
    ("LogSigmoidGrad", X, Y, lambda g, x: torch.func.vjp(F.logsigmoid, x)[1](g)[0]),
    ("SoftplusGrad", X, Y, lambda g, x: torch.func.vjp(F.softplus, x)[1](g)[0]),
    ("HardSwishGrad", X, Y * 3, lambda g, x: torch.func.vjp(F.hardswish, x)[1](g)[0]),
    ("HardSigmoidGrad", X, Y * 4, lambda g, x: torch.func.vjp(F.hardsigmoid, x)[1](g)[0]),
    ("PRelu", X, n(0.2).reshape(1), lambda x, w: F.prelu(x, w)),
]:  # fmt: skip
    case(name, [a, b], lambda a=a, b=b, function=function: function(a, b))

case("SelectV2", [B, X, Y], lambda: torch.where(B, X, Y))
case("Lerp", [X, Y, n(0.3)], lambda: torch.lerp(X, Y, 0.3))
case("MaskedFill", [X, B, n(-1e9)], lambda: X.masked_fill(B, -1e9))
case("ClipByValueV2", [X, n(-0.5), n(0.5)], lambda: X.clamp(-0.5, 0.5))
case("AxpyV2", [X, Y, n(2.0)], lambda: X + 2 * Y)
case("Axpy", [X, Y], lambda: X + 2 * Y, alpha=2.0)
case("Sxpy", [X, Y, None], lambda: X - Y)
case("Sxpy", [X, Y, n(2.0)], lambda: X - 2 * Y)
case("Addcmul", [X, Y, Z, n(0.5)], lambda: torch.addcmul(X, Y, Z, value=0.5))
case("Addcdiv", [X, Y, P, n(0.5)], lambda: torch.addcdiv(X, Y, P, value=0.5))
case("Adds", [X], lambda: X + 1.5, value=1.5)
case("Muls", [X], lambda: X * 1.5, value=1.5)
case("Cast", [X], lambda: X.to(torch.float16), dst_type=torch.float16)
case("Cast", [X], lambda: X.to(torch.int64), dst_type=torch.int64)
case("Bitcast", [X], lambda: X.view(torch.int32), type=torch.int32)
case("Assign", [X.clone(), Y], lambda: Y)
case("IdentityN", [[X, Y]], lambda: (X, Y))
case("NanToNum", [X / 0], lambda: (X / 0).nan_to_num(0.0, 9.0, -9.0), nan=0.0, posinf=9.0, neginf=-9.0)
case("Swish", [X], lambda: F.silu(X))
case("Swish", [X], lambda: X * torch.sigmoid(2 * X), scale=2.0)
case("SwishGrad", [Y, X, F.silu(X)], lambda: aten.silu_backward(Y, X))
case("GeluGrad", [Y, X, X], lambda: aten.gelu_backward(Y, X, approximate="tanh"))
case("GeluV2", [X], lambda: F.gelu(X))
case("GeluGradV2", [Y, X], lambda: aten.gelu_backward(Y, X))
case("Elu", [X], lambda: F.elu(X, 0.5), alpha=0.5)
case("EluGradV2", [Y, X], lambda: torch.func.vjp(lambda x: F.elu(x, 0.5), X)[1](Y)[0], alpha=0.5)
case("LeakyRelu", [X], lambda: F.leaky_relu(X, 0.1), negative_slope=0.1)
case("LeakyReluGrad", [Y, X], lambda: Y * torch.where(X > 0, 1.0, 0.1), negative_slope=0.1)
case("HardSigmoid", [X * 3], lambda: F.hardsigmoid(X * 3))
case("HardtanhGrad", [X, Y], lambda: torch.func.vjp(F.hardtanh, X)[1](Y)[0])
case("ThresholdV2", [X, n(0.1), n(7.0)], lambda: F.threshold(X, 0.1, 7.0))
case("ThresholdGradV2D", [Y.half(), X.half()], lambda: Y.half() * (X.half() > 0.1), threshold=0.1)
case("GLU", [X], lambda: F.glu(X))
case("GLUGrad", [f(4, 3), X], lambda: aten.glu_backward(CASES_GLU, X, -1))
CASES_GLU = CASES[-1][1][0]
case("PReluGrad", [Y, X, n(0.2).reshape(1)], lambda: (Y * torch.where(X > 0, 1.0, 0.2), Y * X * (X <= 0)))

case("Shape", [X], lambda: i(4, 6), dtype=torch.int64)
case("Reshape", [X, i(3, -1)], lambda: X.reshape(3, 8))
case("Transpose", [f(2, 3, 4), i(2, 0, 1)], lambda: CASES_T.permute(2, 0, 1))
CASES_T = CASES[-1][1][0]
case("Permute", [X], lambda: X.t(), order=[1, 0])
case("ExpandDims", [X, n(1, torch.int64)], lambda: X.unsqueeze(1))
case("Unsqueeze", [X], lambda: X[None, :, None, :, None], axes=[0, 2, -1])
case("Squeeze", [X[None, :, None]], lambda: X, axis=[0, 2])
case("FlattenV2", [f(2, 3, 4)], lambda: CASES_F.flatten(1), axis=1)
CASES_F = CASES[-1][1][0]
case("BroadcastTo", [X[:, None], i(4, 3, 6)], lambda: X[:, None].expand(4, 3, 6))
case("Expand", [X[:1], i(4, 6)], lambda: X[:1].expand(4, 6))
case("Tile", [X, i(2, 1)], lambda: X.repeat(2, 1))
case("Fill", [i(2, 3), n(1.5)], lambda: torch.full((2, 3), 1.5))
case("Fill", [i(2), n(True, torch.bool)], lambda: torch.full((2,), True))
case("Empty", [i(2, 3, dtype=I32)], lambda: torch.zeros(2, 3), dtype=torch.float32, init=True)
case("Range", [n(1, torch.int64), n(9, torch.int64), n(3, torch.int64)], lambda: torch.arange(1, 9, 3))
case("LinSpace", [n(0.0), n(1.0), n(5, torch.int64)], lambda: torch.linspace(0, 1, 5))
case("Pack", [[X, Y]], lambda: torch.stack([X, Y], 1), N=2, axis=1)
case("Pack", [[n(2, torch.int64), i(3)]], lambda: i(2, 3), N=2)
case("Unpack", [X], lambda: X.unbind(1), num=6, axis=1)
case("ConcatV2", [[X, Y], n(1, torch.int64)], lambda: torch.cat([X, Y], 1), N=2)
case("ConcatD", [[X, Y]], lambda: torch.cat([X, Y], 1), concat_dim=1, N=2)
case("SplitV", [X, i(2, -1, 1), n(1, I32)], lambda: X.split([2, 3, 1], 1), num_split=3)
case("StridedSliceV2", [X, i(1, 0), i(3, 2**31 - 1), i(0, 1), i(1, 2)], lambda: X[1:3, ::2])
case("StridedSliceV2", [X, i(-2), i(2**31 - 1), i(1), None], lambda: X[:, -2:])
case("AsStrided", [X, i(2, 3), i(6, 2), n(1, torch.int64)], lambda: X.as_strided((2, 3), (6, 2), 1))
case("ViewCopy", [X.clone(), i(2, 6), i(6, 1), i(6), Y[:2], i(2, 6), i(6, 1), i(0)],
     lambda: torch.cat([X[:1], Y[:2], X[3:]]))  # fmt: skip
case("PadV3", [X, i(0, 0, 1, 2), n(3.0)], lambda: F.pad(X, (1, 2), value=3.0))
case("PadV3", [X, i(0, 1, 0, 2), None], lambda: F.pad(X, (1, 2)), paddings_contiguous=False)
case("PadV3", [X, i(0, 0, 1, 2), None], lambda: F.pad(X, (1, 2), "replicate"), mode="edge")
case("ReverseV2", [X, i(0, 1)], lambda: X.flip(0, 1))
case("Roll", [X], lambda: X.roll(2, 1), shifts=[2], dims=[1])
case("Tril", [X], lambda: X.tril(-1), diagonal=-1)
case("Triu", [X], lambda: X.triu(1), diagonal=1)

case("ReduceSum", [X, i(1)], lambda: X.sum(1, keepdim=True), keep_dims=True)
case("ReduceSum", [X, i()], lambda: X.sum())
case("ReduceMean", [X, i(0, 1)], lambda: X.mean())
case("ReduceMeanWithCast", [X, i(1)], lambda: X.mean(1, dtype=torch.float16), dtype=torch.float16)
case("ReduceMax", [X, i(1)], lambda: X.amax(1))
case("ReduceMin", [X, i(1)], lambda: X.amin(1))
case("ReduceAny", [B, i(1)], lambda: B.any(1))
case("ReduceAll", [B, i(1)], lambda: B.all(1))
case("ReduceProd", [X, i(0, 1)], lambda: X.prod())
case("ReduceProdD", [X], lambda: X.prod(1, keepdim=True), axes=[1], keep_dims=True)
case("ReduceLogSumExp", [X, i(1)], lambda: X.logsumexp(1))
case("ReduceStdV2", [X], lambda: (X.std(1, correction=0), X.mean(1)), dim=[1], correction=0)
case("ReduceStdWithMean", [X, X.mean(1, keepdim=True).expand_as(X).clone()], lambda: X.std(1), dim=[1])
case("LpNormV2", [X], lambda: X.norm(dim=1, keepdim=True), axes=[1], keepdim=True)
case("Cumsum", [X, n(1, torch.int64)], lambda: X.cumsum(1))
case("Cumsum", [X, n(1, torch.int64)], lambda: X.flip(1).cumsum(1).flip(1) - X, exclusive=True, reverse=True)
case("ArgMaxV2", [X, n(1, torch.int64)], lambda: X.argmax(1))
case("ArgMin", [X, n(1, torch.int64)], lambda: X.argmin(1).to(I32), dtype=I32)
case("ArgMaxWithValue", [X], lambda: (X.argmax(1).to(I32), X.amax(1)), dimension=1)
case("ArgMinWithValue", [X], lambda: (X.argmin(1, True).to(I32), X.amin(1, True)), dimension=1, keep_dims=True)
case("TopK", [X, n(2, I32)], lambda: (X.topk(2).values, X.topk(2).indices.to(I32)))
case("TopKV2", [X, n(2, I32)], lambda: (X.topk(2, 0, False)[0], X.topk(2, 0, False)[1].to(I32)), dim=0, largest=False)
case("Sort", [X], lambda: (X.sort(-1, True)[0], X.sort(-1, True)[1].to(I32)), descending=True)
case(
    "SearchSorted", [i(0, 2, 5), i(2, 3), None], lambda: torch.searchsorted(i(0, 2, 5), i(2, 3), right=True), right=True
)
case("Bucketize", [X], lambda: torch.bucketize(X, n(0.0).reshape(1), right=True).to(I32), boundaries=[0.0])

case("Gather", [ROWS, IDX], lambda: ROWS[IDX])
case("GatherV2", [ROWS, i(5, 1), n(1, torch.int64)], lambda: ROWS[:, [5, 1]])
case("GatherV2", [ROWS, n(-1, torch.int64), i(1)], lambda: ROWS[:, -1], negative_index_support=True)
case("GatherElements", [X, K % 4], lambda: X.gather(0, K % 4))
case("GatherNd", [ROWS, i(3, 4)[None]], lambda: ROWS[3, 4][None])
case("IndexByTensor", [ROWS, [IDX]], lambda: ROWS[IDX], indices_mask=[1])
case("IndexByTensor", [ROWS, [i(-1, 0)]], lambda: ROWS[:, [-1, 0]], indices_mask=[0, 1])
case("IndexPutV2", [X.clone(), Y[:2], i(1, 0), i(6, 1), [i(3, 3)]], lambda: X.index_put((i(3, 3),), Y[:2], True),
     accumulate=True)  # fmt: skip
case("ScatterElements", [X, K % 4, Y], lambda: X.scatter_add(0, K % 4, Y), axis=0, reduction="add")
case("ScatterElements", [X, i(2, 0)[None], Y[:1, :2]], lambda: X.scatter(1, i(2, 0)[None], Y[:1, :2]), axis=1)
case("InplaceIndexAdd", [X.clone(), i(1, 1, dtype=I32), Y[:2], n(2.0)], lambda: X.index_add(0, i(1, 1), Y[:2], alpha=2),
     axis=0)  # fmt: skip
case("ScatterNdUpdate", [X.clone(), i(2)[None], Y[:1]], lambda: X.index_copy(0, i(2), Y[:1]))
case("ScatterNdAdd", [X.clone(), i(2)[None], Y[:1]], lambda: X.index_add(0, i(2), Y[:1]))
case("UnsortedSegmentSum", [X, i(2, 0, 2, 1), n(3, torch.int64)], lambda: torch.stack([X[1], X[3], X[0] + X[2]]))
case("OneHot", [i(2, 0, 7), n(3, I32), n(1.0), n(0.0)], lambda: torch.eye(8)[[2, 0, 7], :3])
case("EmbeddingDenseGrad", [f(2, 2, 6), IDX], lambda: aten.embedding_dense_backward(CASES_E, IDX, 10, 2, False),
     num_weights=10, padding_idx=2)  # fmt: skip
CASES_E = CASES[-1][1][0]
case("EmbeddingBag", [ROWS, i(1, 2, 3, 4), i(0, 3), None],
     lambda: (F.embedding_bag(i(1, 2, 3, 4), ROWS, i(0, 3), mode="max"), None, None, None), mode="max")  # fmt: skip

case("MatMul", [X, f(5, 6), None], lambda: X @ CASES_M.t(), transpose_x2=True)
CASES_M = CASES[-1][1][1]
case("MatMulV2", [X, Y, f(6), None], lambda: X.t() @ Y + CASES_M2, transpose_x1=True)
CASES_M2 = CASES[-1][1][2]
case("BatchMatMul", [f(2, 3, 4, 5), f(2, 3, 6, 5)], lambda: CASES_B[0] @ CASES_B[1].mT, adj_x2=True)
CASES_B = CASES[-1][1]
case("BatchMatMulV2", [f(2, 4, 5), f(5, 3), f(3), None], lambda: CASES_B2[0] @ CASES_B2[1] + CASES_B2[2])
CASES_B2 = CASES[-1][1]
IMAGE, FILTERS, OUT = f(2, 3, 5, 7), f(4, 3, 2, 3), f(2, 4, 6, 3)
CONV = {"strides": [1, 1, 1, 2], "pads": [1, 1, 0, 0], "data_format": "NCHW"}


def convolution_gradients(wanted: list[bool]) -> list[torch.Tensor]:
    return aten.convolution_backward(OUT, IMAGE, FILTERS, None, [1, 2], [1, 0], [1, 1], False, [0, 0], 1, wanted)


case("Conv2D", [IMAGE, FILTERS, f(4), None], lambda: F.conv2d(IMAGE, FILTERS, CASES_C, (1, 2), (1, 0)), **CONV)
CASES_C = CASES[-1][1][2]
case(
    "Conv2DBackpropInput",
    [i(2, 3, 5, 7, dtype=I32), FILTERS, OUT],
    lambda: convolution_gradients([True, False, False])[0],
    **CONV,
)
case(
    "Conv2DBackpropFilter",
    [IMAGE, i(4, 3, 2, 3, dtype=I32), OUT],
    lambda: convolution_gradients([False, True, False])[1],
    **CONV,
)

GAMMA, BETA = f(6), f(6)
NORM = aten.native_layer_norm(X, [6], GAMMA, BETA, 1e-5)
case("LayerNormV4", [X, i(6), GAMMA, BETA], lambda: NORM)
case("LayerNormV4", [X, i(6), None, None], lambda: aten.native_layer_norm(X, [6], None, None, 1e-3), epsilon=1e-3)
case("LayerNormGradV3", [Y, X, NORM[2], NORM[1], GAMMA],
     lambda: aten.native_layer_norm_backward(Y, X, [6], NORM[1], NORM[2], GAMMA, BETA, [True] * 3))  # fmt: skip
RSTD = X.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
case("RmsNorm", [X, GAMMA], lambda: (F.rms_norm(X, (6,), GAMMA, 1e-6), RSTD))
case(
    "RmsNormGrad",
    [Y, X, RSTD, GAMMA],
    lambda: torch.func.vjp(lambda x, g: F.rms_norm(x, (6,), g, 1e-6), X, GAMMA)[1](Y),
)
case("SoftmaxV2", [X], lambda: X.softmax(0), axes=[0])
case("SoftmaxV2", [X.half()], lambda: X.half().softmax(-1, dtype=torch.float32), half_to_float=True)
case("SoftmaxGrad", [X.softmax(-1), Y], lambda: torch.func.vjp(lambda x: x.softmax(-1), X)[1](Y)[0])
case("LogSoftmaxV2", [X], lambda: X.log_softmax(-1))
case("LogSoftmaxGrad", [Y, X.log_softmax(-1)], lambda: torch.func.vjp(lambda x: x.log_softmax(-1), X)[1](Y)[0])
LABELS = i(1, 0, 5, 2, dtype=I32)
case("NLLLoss", [X, LABELS, None], lambda: aten.nll_loss_forward(X, LABELS.long(), None, 1, 0), ignore_index=0)
case("NLLLossGrad", [X, n(2.0), LABELS, torch.ones(6), n(3.0)],
     lambda: aten.nll_loss_backward(n(2.0), X, LABELS.long(), None, 1, 0, n(3.0)), ignore_index=0)  # fmt: skip
case("MseLoss", [X, Y], lambda: F.mse_loss(X, Y))
case("MseLossGrad", [X, Y, n(2.0)], lambda: aten.mse_loss_backward(n(2.0), X, Y, 2), reduction="sum")
case("SigmoidCrossEntropyWithLogitsV2", [X, B.float(), None, None],
     lambda: F.binary_cross_entropy_with_logits(X, B.float()))  # fmt: skip

PIXELS, DPIXELS, CHANNELS = f(5, 3, 2, 2), f(5, 3, 2, 2), [f(3).abs() + 0.5 for _ in range(4)]


def batch_norm(training: bool) -> Any:
    return lambda x, w, b: F.batch_norm(x, CHANNELS[2].clone(), CHANNELS[3].clone(), w, b, training, 0.1, 1e-5)


MEAN, VARIANCE = PIXELS.mean((0, 2, 3)), PIXELS.var((0, 2, 3), correction=0)
BN_GRADS = torch.func.vjp(batch_norm(True), PIXELS, *CHANNELS[:2])[1](DPIXELS)
case("BNInfer", [PIXELS, *CHANNELS], lambda: batch_norm(False)(PIXELS, *CHANNELS[:2]), epsilon=1e-5)
case("BNInferGrad", [DPIXELS, CHANNELS[0], CHANNELS[3]],
     lambda: torch.func.vjp(batch_norm(False), PIXELS, *CHANNELS[:2])[1](DPIXELS)[0], epsilon=1e-5)  # fmt: skip
case("BatchNormV3", [PIXELS, *[c.clone() for c in CHANNELS]], lambda: (
    batch_norm(True)(PIXELS, *CHANNELS[:2]), CHANNELS[2] * 0.9 + MEAN * 0.1,
    CHANNELS[3] * 0.9 + PIXELS.var((0, 2, 3)) * 0.1, MEAN, (VARIANCE + 1e-5).rsqrt()))  # fmt: skip
case("BNTrainingUpdateGrad", [DPIXELS, PIXELS, MEAN, VARIANCE], lambda: BN_GRADS[1:], epsilon=1e-5)
case("BNTrainingReduceGrad", [DPIXELS, PIXELS, *BN_GRADS[1:], CHANNELS[0], MEAN, VARIANCE], lambda: BN_GRADS[0],
     epsilon=1e-5)  # fmt: skip

case("DropOutDoMask", [X, packed(B), n(0.5)], lambda: torch.where(B, X * 2, 0))

for name in ["Abs", "Cos", "Cosh", "Erf", "Erfc", "Exp", "Expm1", "Log", "Log10", "Log1p", "Log2", "Neg", "Sigmoid",
             "Sin", "Sinh", "Tan", "Tanh"]:  # fmt: skip
    pair = [U.abs() + 0.01, U[:2].abs() + 0.01]
    of_torch = getattr(torch, name.lower())
    case(f"Foreach{name}", [pair], lambda p=pair, g=of_torch: tuple(g(t) for t in p))
TWO, MORE, THIRD = [X, X[:2]], [P, P[:2]], [Z, Z[:2]]
for name, function in {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.true_divide,
                       "Maximum": torch.maximum, "Minimum": torch.minimum, "Pow": torch.pow}.items():  # fmt: skip
    base = MORE if name == "Pow" else TWO
    alpha = [n(2.0)] if name in ("Add", "Sub") else []
    case(f"Foreach{name}List", [base, MORE, *alpha], lambda g=function, b=base, k=2 if alpha else 1: tuple(
        g(x, y * k) for x, y in zip(b, MORE, strict=True)))  # fmt: skip
    case(f"Foreach{name}Scalar", [base, n(0.5)], lambda g=function, b=base: tuple(g(x, n(0.5)) for x in b))
    case(f"Foreach{name}ScalarList", [base, torch.tensor([0.5, 2.0])], lambda g=function, b=base: tuple(
        g(x, n(s)) for x, s in zip(b, (0.5, 2.0), strict=True)))  # fmt: skip
for name, function in {"mul": torch.addcmul, "div": torch.addcdiv}.items():
    one, each = n(0.5), torch.tensor([0.5, 2.0])
    for kind, scalar, values in (
        ("Scalar", one, (0.5, 0.5)),
        ("ScalarList", each, (0.5, 2.0)),
        ("List", each, (0.5, 2.0)),
    ):
        case(f"ForeachAddc{name}{kind}", [TWO, THIRD, MORE, scalar], lambda g=function, v=values: tuple(
            g(x, y, z, value=s) for x, y, z, s in zip(TWO, THIRD, MORE, v, strict=True)))  # fmt: skip
case(
    "ForeachLerpScalar",
    [TWO, MORE, n(0.3)],
    lambda: tuple(torch.lerp(a, b, 0.3) for a, b in zip(TWO, MORE, strict=True)),
)
case("ForeachLerpList", [TWO, MORE, THIRD], lambda: tuple(map(torch.lerp, TWO, MORE, THIRD)))
case("ForeachNorm", [TWO, n(2.0)], lambda: tuple(t.norm() for t in TWO))
case("ForeachPowScalarAndTensor", [n(2.0), TWO], lambda: tuple(2.0**t for t in TWO))
case("ForeachRoundOffNumber", [TWO, i(3)], lambda: tuple(t.ceil() for t in TWO))

RANDOM = {"StatelessDropOutGenMask", "StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessRandperm",
          "StatelessBernoulli", "MultinomialWithReplacement"}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{k}-{c[0]}" for k, c in enumerate(CASES)])
def test_kernel_agrees_with_torch(case):
    op, inputs, attributes, expected = case
    wanted = expected()
    wanted = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted]
    found = run(op, inputs, wanted, attributes)
    for result, value in zip(found, [w for w in wanted if w is not None], strict=True):
        torch.testing.assert_close(result, value, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_every_kernel_is_tested():
    of_collectives = {op for op, kernel in KERNELS.items() if kernel.__module__ == collectives.__name__}
    families = {family.__name__ for family in FAMILIES} | {registry.__name__}
    ours = {op for op, kernel in KERNELS.items() if kernel.__module__ in families}
    assert ours - {c[0] for c in CASES} - RANDOM - of_collectives == set()


def test_beliefs_are_about_kernels():
    assert set(BELIEFS) <= set(KERNELS) and all(BELIEFS.values())


SHAPE, SEED, OFFSET = i(200, 50), n(7, torch.int64), n(12, torch.int64)
KEY, COUNTER, NEXT = (i(*v, dtype=torch.uint64) for v in ([7], [0, 12], [0, 16]))
DRAWS = [
    ("StatelessRandomUniformV2", [SHAPE, KEY, COUNTER, n(1, I32)], torch.empty(200, 50),
     {"dtype": torch.float32}, (0.5, 1 / 12**0.5)),
    ("StatelessRandomNormalV2", [SHAPE, KEY, COUNTER, n(1, I32)], torch.empty(200, 50),
     {"dtype": torch.float32}, (0.0, 1.0)),
    ("StatelessBernoulli", [SHAPE, n(0.25), SEED, OFFSET], torch.empty(200, 50), {"dtype": torch.float32},
     (0.25, 0.1875**0.5)),
    ("StatelessRandperm", [n(10000, torch.int64), SEED, OFFSET], torch.empty(10000, dtype=torch.int64),
     {"dtype": torch.int64}, (4999.5, 2886.9)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "like", "attributes", "moments"), DRAWS, ids=[d[0] for d in DRAWS])
def test_random_kernels_repeat_and_have_the_right_moments(op, inputs, like, attributes, moments):
    (first,) = run(op, inputs, [like], attributes)
    assert torch.equal(first, run(op, inputs, [like], attributes)[0])
    other = [t + 1 if t is SEED else NEXT if t is COUNTER else t for t in inputs]
    assert not torch.equal(first, run(op, other, [like], attributes)[0])
    mean, deviation = moments
    assert abs(first.double().mean() - mean) < 0.05 * deviation
    assert abs(first.double().std() - deviation) < 0.05 * deviation


def test_multinomial_draws_by_weight():
    weights = torch.tensor([[0.0, 1.0, 3.0]])
    like = torch.empty(1, 4000, dtype=torch.int64)
    (drawn,) = run("MultinomialWithReplacement", [weights, SEED, OFFSET], [like], {"numsamples": 4000})
    share = torch.bincount(drawn[0], minlength=3) / 4000
    torch.testing.assert_close(share, torch.tensor([0.0, 0.25, 0.75]), atol=0.03, rtol=0)


@pytest.mark.parametrize("count", [1, 8, 127, 128, 129])
def test_dropout_masks_are_packed_and_padded(count):
    keep = torch.rand(count, generator=G) < 0.5
    mask = packed(keep)
    assert mask.dtype == torch.uint8 and len(mask) == -(-count // 128) * 16
    assert torch.equal(unpacked(mask, keep.shape), keep)


def test_dropout_keeps_the_given_share():
    like = torch.empty(-(-10000 // 128) * 16, dtype=torch.uint8)
    (mask,) = run("StatelessDropOutGenMask", [i(10000), n(0.7), SEED, n(0, torch.int64), i(0, 12)], [like], {})
    assert abs(unpacked(mask, torch.Size([10000])).float().mean() - 0.7) < 0.02


BAD = [
    ("Gather", [ROWS, i(10)], ROWS[:1], {}, "from 10 to 10 into 10 rows"),
    ("Gather", [ROWS, i(-1)], ROWS[:1], {}, "from -1 to -1"),
    ("EmbeddingDenseGrad", [f(1, 6), i(10)], ROWS, {"num_weights": 10}, "into 10 rows"),
    ("Squeeze", [X], X, {"axis": [0]}, "not all of size one"),
    ("Reshape", [X, i(5, 5)], X, {}, r"failed on \(f32\[4, 6\], i64\[2\]\)"),
    ("StridedSliceV2", [X, i(0), i(1), None, None], X[:1], {"begin_mask": 1}, "begin_mask=1 is not simulated"),
    ("ScatterElements", [X, K % 4, Y], X, {"reduction": "mul"}, "'mul' is not simulated"),
    ("Conv2D", [IMAGE, FILTERS, None, None], OUT, {**CONV, "data_format": "NHWC"}, "only convolutions in NCHW"),
    ("Add", [X, Y], X.double(), {}, "one dtype is wanted, and there are x1 of f32, x2 of f32, y of f64"),
    ("Sigmoid", [X], X.half(), {}, "declares f16"),
    ("Add", [X, Y], X[:2], {}, r"declares \[2, 6\]"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "inputs", "like", "attributes", "message"), BAD)
def test_what_cannot_be_right_is_an_error(op, inputs, like, attributes, message):
    with pytest.raises(GraphError, match=message):
        run(op, inputs, [like], attributes)
