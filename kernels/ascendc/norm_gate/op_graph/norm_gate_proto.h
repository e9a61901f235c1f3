#pragma once

#include "graph/operator_reg.h"

namespace ge {

// result = layer_norm(x) · gate over the last dim; mean and rstd of each row, for the backward.
REG_OP(NormGate)
    .INPUT(x, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .INPUT(gate, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OPTIONAL_INPUT(weight, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OPTIONAL_INPUT(bias, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OUTPUT(result, TensorType({DT_FLOAT16, DT_BF16, DT_FLOAT}))
    .OUTPUT(mean, TensorType({DT_FLOAT}))
    .OUTPUT(rstd, TensorType({DT_FLOAT}))
    .REQUIRED_ATTR(eps, Float)
    .OP_END_FACTORY_REG(NormGate)

}  // namespace ge
