#pragma once

#include "graph/operator_reg.h"

namespace ge {

// Gradients of NormGate; `wanted` has a bit each for x (1), gate (2), weight (4) and bias (8).
REG_OP(NormGateBackward)
    .INPUT(grad, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(x, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(gate, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OPTIONAL_INPUT(weight, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OPTIONAL_INPUT(bias, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(mean, TensorType({DT_FLOAT}))
    .INPUT(rstd, TensorType({DT_FLOAT}))
    .OUTPUT(grad_x, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OUTPUT(grad_gate, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OUTPUT(grad_weight, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OUTPUT(grad_bias, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .REQUIRED_ATTR(wanted, Int)
    .OP_END_FACTORY_REG(NormGateBackward)

}  // namespace ge
